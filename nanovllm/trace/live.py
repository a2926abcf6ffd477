"""The page, served while the engine runs: to this machine alone, by server-sent events.

    engine's thread    Recorder     writes down steps, and waits for nobody
    a thread a viewer  Follower     looks ten times a second at what is new, and sends it

No lock is between them: a follower reads lists that only grow, of things that do not change. Python runs one thread at
a time, so who comes late gets the state so far in messages that take about a millisecond each, with a pause behind
each.

``web/src/live.ts`` says what the messages are. The server is the standard library's: it has two addresses to answer.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import VERSION
from nanovllm.trace.step import Step

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
SECONDS = 0.1
"""Between two looks at what is new."""
STILL_SECONDS = 2.0
"""After so long without change, once the recording is full, what the engine does is said once more: that it rests."""
QUIET_SECONDS = 10.0
"""After so long without news a comment is sent, which finds out whether anyone is still there."""
WRITE_SECONDS = 10.0
"""How long a viewer may leave a message unread before it is given up."""
CLOSE_SECONDS = 1.0
"""How long the engine waits, when it is closed, for viewers to take the rest."""
MOST_VIEWERS = 16
MOST_SPANS, MOST_STEPS, MOST_TOKENS, MOST_ROWS = 2000, 200, 4000, 100
"""Of one message; a step and a prompt are not cut."""

END = "end"
"""Name of the last event: who does not get it has lost the connection."""

CHANGING = ("cached", "ended", "end_step", "gone_step", "finish", "stop", "text")
"""Facts of a request that are not known when it comes."""


class Follower:
    """What one viewer has been sent of a recording that goes on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_steps = self._num_requests = self._num_changes = self._dropped = 0
        self._ids: set[int] = set()
        self._now: dict[str, float] = {}
        self._rests = self._began = False
        self.behind = False
        """Whether there was more to say than the last message holds."""

    def news(self) -> str:
        """Return a message of what is new, or of a part of it, as JSON; empty if nothing is."""
        recorder = self._recorder
        # in this order: steps speak of requests that came before them, and a row is replaced before that is noted
        settled = recorder.steps[self._num_steps : self._num_steps + MOST_STEPS]
        changes = recorder.changes[self._num_changes : self._num_changes + MOST_ROWS]
        dropped = recorder.dropped_steps
        rows: list[dict[str, Any]] = [
            {"index": place, **{name: recorder.requests[place][name] for name in CHANGING}}
            for place in dict.fromkeys(changes) if place < self._num_requests
        ]  # fmt: skip
        self._num_changes += len(changes)
        new, ids = self._arrived()
        rows += new
        unknown = len(recorder.requests) > self._num_requests
        steps = [] if unknown else self._settled(settled, ids)
        self.behind = unknown or len(changes) == MOST_ROWS or self._more_settled()
        message: list[str] = []
        if not self._began:
            message.append(f'"engine":{dump(recorder.facts)},"version":{VERSION}')
        ids -= self._ids
        if ids and recorder.decode is not None:
            message.append(f'"texts":{dump({str(token): recorder.decode(token) for token in sorted(ids)})}')
        if rows:
            message.append(f'"requests":{dump(rows)}')
        if steps:
            message.append(f'"steps":[{",".join(steps)}]')
        if dropped != self._dropped:
            message.append(f'"dropped_steps":{dropped}')
        if dropped and not self.behind and (now := self._changed()):
            message.append(f'"now":{dump(now)}')
        self._began, self._dropped = True, dropped
        self._ids |= ids
        if message and self.behind:
            message.append('"behind":true')
        return "{" + ",".join(message) + "}" if message else ""

    def _changed(self) -> dict[str, float]:
        """Return what the engine does, if that has changed since it was told, or has not for long; else nothing."""
        last, now = self._now, self._recorder.now()
        rests = bool(last) and now == {**last, "seconds": now["seconds"]}
        if rests and (self._rests or now["seconds"] - last["seconds"] < STILL_SECONDS):
            return {}
        self._now, self._rests = now, rests
        return now

    def _arrived(self) -> tuple[list[dict[str, Any]], set[int]]:
        """Return rows of requests not sent before, and their tokens."""
        rows: list[dict[str, Any]] = []
        ids: set[int] = set()
        room = MOST_TOKENS
        for row in self._recorder.requests[self._num_requests : self._num_requests + MOST_ROWS]:
            if room > 0:
                rows.append({"index": self._num_requests + len(rows), **row, "prompt": row["prompt"].tolist()})
                ids.update(row["prompt"])
                room -= len(row["prompt"])
        self._num_requests += len(rows)
        return rows, ids

    def _settled(self, steps: Sequence[Step | None], ids: set[int]) -> list[str]:
        """Return JSON of the next steps, and add their tokens to ``ids``."""
        found: list[str] = []
        room = MOST_SPANS
        for step in steps:
            if step is None or room <= 0:
                break
            found.append(step.json())
            ids |= step.ids()
            room -= step.num_spans
        self._num_steps += len(found)
        return found

    def _more_settled(self) -> bool:
        return any(step is not None for step in self._recorder.steps[self._num_steps : self._num_steps + 1])


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
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SECONDS,), name="nanovllm-live", daemon=True
        )

    def begin(self, recorder: Recorder) -> None:
        """Show what is recorded from now on."""
        self.recorder = recorder
        self._thread.start()
        logger.warning("watch the engine at %s", self.address)

    def close(self) -> None:
        """Send viewers the rest, as far as they take it in ``CLOSE_SECONDS``, and end."""
        if not self.closed.is_set():
            self.closed.set()
            until = time.monotonic() + CLOSE_SECONDS
            # each viewer has a place until it is sent all; who holds all places has seen the last one go
            if not all(self.viewers.acquire(timeout=max(0.0, until - time.monotonic())) for _ in range(MOST_VIEWERS)):
                logger.warning("a viewer has not taken the end of the recording in %s s, and misses it", CLOSE_SECONDS)
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
            ends, began = self.source.closed.is_set(), time.monotonic()
            message = follower.news()
            if message or began - last > QUIET_SECONDS:
                # JSON is all that may hold half a surrogate pair, and this is how JSON writes one
                text = f"data: {message}\n\n" if message else ": nothing new\n\n"
                self.wfile.write(text.encode(errors="backslashreplace"))
                last = time.monotonic()
            if follower.behind:  # as long as this took: half of the time is the engine's
                self.source.closed.wait(min(SECONDS, time.monotonic() - began))
            elif ends:
                tail = dump({"tail": self.source.recorder.tail})
                self.wfile.write(f"event: {END}\ndata: {tail}\n\n".encode())
                return
            else:
                if not message:
                    self.source.recorder.flush()
                self.source.closed.wait(SECONDS)


def dump(value: Any) -> str:
    """Write compact JSON."""
    return json.dumps(value, separators=(",", ":"))
