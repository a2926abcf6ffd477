"""The page, served while the engine runs: to this machine alone, by server-sent events.

    engine's thread    Recorder     writes down steps, and waits for nobody
    a thread a viewer  Follower     looks ten times a second at what is new, and sends it

``web/src/live.ts`` says what the messages are. The server is the standard library's: it has two addresses to answer.
"""

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import VERSION

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
SECONDS = 0.1
"""Between two looks at what is new."""
QUIET_SECONDS = 10.0
"""After so long without news a comment is sent, which finds out whether anyone is still there."""
WRITE_SECONDS = 10.0
"""How long a viewer may leave a message unread before it is given up."""
MOST_VIEWERS = 16

CHANGING = ("cached", "ended", "end_step", "gone_step", "queued_step", "finish", "stop", "text")
"""Facts of a request that are not known when it comes."""


class Follower:
    """What one viewer has been sent of a recording that goes on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_steps = self._num_requests = self._dropped = 0
        self._texts: set[int] = set()
        self._open: dict[int, tuple[Any, ...]] = {}  # requests that have not ended, and what was said of them
        self._began = False

    def news(self) -> str:
        """Return a message of all that is new, as JSON; empty if nothing is.

        The recorder is held up for as long as it takes to copy lists of what is new.
        """
        recorder = self._recorder
        with recorder.watching():
            settled = next((i for i, step in enumerate(recorder.steps[self._num_steps :]) if not step), None)
            stop = len(recorder.steps) if settled is None else self._num_steps + settled
            steps = recorder.steps[self._num_steps : stop]
            new = [{**row, "prompt": list(row["prompt"])} for row in recorder.requests[self._num_requests :]]
            changed = [(place, recorder.requests[place]) for place in self._open]
            told = {place: tuple(row[name] for name in CHANGING) for place, row in changed}
            texts = sorted(recorder.ids - self._texts)
            dropped = recorder.dropped_steps
        message: list[str] = []
        if not self._began:
            message.append(f'"engine":{dump(recorder.facts)},"version":{VERSION}')
        if texts and recorder.decode is not None:
            message.append(f'"texts":{dump({str(token): recorder.decode(token) for token in texts})}')
        rows: list[dict[str, Any]] = [
            {"index": place, **dict(zip(CHANGING, now, strict=True))}
            for place, now in told.items() if now != self._open[place]
        ]  # fmt: skip
        rows += [{"index": self._num_requests + place, **row} for place, row in enumerate(new)]
        if rows:
            message.append(f'"requests":{dump(rows)}')
        if steps:
            message.append(f'"steps":[{",".join(steps)}]')
        if dropped != self._dropped:
            message.append(f'"dropped_steps":{dropped}')
        self._began = True
        self._num_steps, self._dropped = stop, dropped
        self._texts.update(texts)
        told |= {self._num_requests + place: tuple(row[name] for name in CHANGING) for place, row in enumerate(new)}
        self._open = {place: now for place, now in told.items() if now[1] is None}
        self._num_requests += len(new)
        return "{" + ",".join(message) + "}" if message else ""


class Live:
    """The server of one engine. Raises ConfigError if the port cannot be had; port 0 takes any that is free."""

    def __init__(self, port: int) -> None:
        self.recorder: Recorder | None = None
        self.closed = threading.Event()
        self.viewers = threading.Semaphore(MOST_VIEWERS)
        live = self

        class Handler(Viewer):
            source = live

        try:
            self._server = Server((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            rule = f"live is {port}; it must be a port of {HOST} that is free ({error}). Take another, or 0 for any."
            raise ConfigError(rule, parameter="live", value=port) from error
        self.port = self._server.server_port
        self.address = f"http://{HOST}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="nanovllm-live", daemon=True)

    def begin(self, recorder: Recorder) -> None:
        """Show what is recorded from now on."""
        self.recorder = recorder
        self._thread.start()
        logger.warning("watch the engine at %s", self.address)

    def close(self) -> None:
        """Send viewers the rest and end."""
        if not self.closed.is_set():
            self.closed.set()
            if self._thread.is_alive():
                self._server.shutdown()
            self._server.server_close()


class Server(ThreadingHTTPServer):
    """A thread for each viewer, none of which keeps the program alive or is waited for."""

    daemon_threads = True
    block_on_close = False


class Viewer(BaseHTTPRequestHandler):
    """One request of a browser: for the page, or for the events."""

    source: Live
    timeout = WRITE_SECONDS

    def do_GET(self) -> None:
        """Answer. A name that leads here from elsewhere (DNS rebinding) is refused: other sites' pages could read."""
        port = self.source.port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(403, "this page is for this machine alone")
        elif self.path == "/":
            page = import_module("nanovllm.trace.page").render_live().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
        elif self.path != "/events":
            self.send_error(404)
        elif not self.source.viewers.acquire(blocking=False):
            self.send_error(503, f"{MOST_VIEWERS} are watching already")
        else:
            try:
                self._send_events()
            except OSError as error:
                logger.debug("a viewer is gone: %s", error)
            finally:
                self.source.viewers.release()

    def log_message(self, format: str, *args: object) -> None:
        """Say it to those alone who want to know."""
        logger.debug(format, *args)

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        assert self.source.recorder is not None, "the server starts when there is one"
        follower, last = Follower(self.source.recorder), time.monotonic()
        while True:
            ends = self.source.closed.is_set()
            message = follower.news()
            if message or time.monotonic() - last > QUIET_SECONDS:
                self.wfile.write((f"data: {message}\n\n" if message else ": nothing new\n\n").encode())
                last = time.monotonic()
            if ends:
                return
            self.source.closed.wait(SECONDS)


def dump(value: Any) -> str:
    """Write JSON in ASCII: half a surrogate pair, as a token alone can be, has no UTF-8."""
    return json.dumps(value, separators=(",", ":"))
