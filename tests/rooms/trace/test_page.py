"""The page in a real browser: what it shows of a recording is what a replay of the recording gives.

Chromium is driven over a pipe by its own protocol, one JSON object after the other, so no driver is needed. Where
there is no Chromium these tests are skipped, and say so; `make browser` installs it where it can.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --mute-audio --remote-debugging-pipe"
).split()


class Page:
    """A tab of a Chromium of our own."""

    def __init__(self, folder):
        here, theirs = os.pipe(), os.pipe()  # what it reads as descriptor 3, and writes as 4
        command = ["sh", "-c", f'exec "$@" 3<&{here[0]} 4>&{theirs[1]}', "sh", CHROMIUM, *FLAGS]
        command += [f"--user-data-dir={folder}", "about:blank"]
        with open(os.path.join(folder, "log"), "wb") as log:
            self.process = subprocess.Popen(command, pass_fds=(here[0], theirs[1]), stdout=log, stderr=log)
        os.close(here[0])
        os.close(theirs[1])
        self.pipe, self.answers, self.rest = here[1], theirs[0], b""
        self.number, self.events, self.session = 0, [], None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.pipe, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self.rest:
            piece = os.read(self.answers, 1 << 20)
            assert piece, "the browser has ended"
            self.rest += piece
        first, _, self.rest = self.rest.partition(b"\0")
        return json.loads(first)

    def __call__(self, script):
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url, width=1280, height=800, dark=False):
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.querySelector('main, .refusal')")
        self.frame()

    def until(self, condition, seconds=10):
        end = time.monotonic() + seconds
        while not self(f"!!({condition})"):
            assert time.monotonic() < end, f"never came: {condition}"
            time.sleep(0.02)

    def frame(self):
        """Let the page draw."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def press(self, key, shift=False):
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            named = {"key": key, "modifiers": 8 if shift else 0, **(text if kind == "keyDown" else {})}
            self.call("Input.dispatchKeyEvent", type=kind, **named)
        self.frame()

    def mouse(self, x, y, click=False):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def click(self, selector):
        box = self(f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] }})()")
        self.mouse(*box, click=True)

    def text(self, selector):
        return self(f"document.querySelector({selector!r}).innerText")

    def state(self, step=""):
        return self(f"nanovllm.state({step})")

    def complaints(self):
        """What the page wrote to the console, and what went wrong in it."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        self("1")  # so that all events are read
        return [event for event in self.events if event.get("method") in bad]

    def screenshot(self, path):
        self.frame()
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        with contextlib.suppress(OSError):
            self.call("Browser.close")
        self.process.wait(10)
        os.close(self.pipe)
        os.close(self.answers)
