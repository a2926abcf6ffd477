"""The page in a real browser: what it shows of a recording is what a replay of the recording gives.

Chromium is driven over a pipe by its own protocol, one JSON object after the other, so no driver is needed. Where
there is no Chromium these tests are skipped, and say so; `make browser` installs it where it can.

pressed.recording.json is of 16 requests in a pool of 24 blocks of 4 tokens: prompts are cut, shared and evicted all the
time, and one request is preempted.
"""

import base64
import contextlib
import json
import os
import random
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest

from nanovllm import SamplingParams
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.request import Sampled
from nanovllm.scheduler import Scheduler
from nanovllm.trace.live import Live
from nanovllm.trace.page import render, render_live
from nanovllm.trace.perfetto import label
from nanovllm.trace.recorder import Recorder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
]  # fmt: skip

PRESSED = json.loads((Path(__file__).parent / "pressed.recording.json").read_text(encoding="utf-8"))
TAKE, HOLD, FREE, KNOW, FORGET, EVICT = range(6)

browsed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is here: `make browser` installs it where it can")


class Page:
    """A tab of a Chromium of our own."""

    def __init__(self, folder):
        here, theirs = os.pipe(), os.pipe()
        log = (os.POSIX_SPAWN_OPEN, 2, os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        # what it reads as descriptor 3 and writes as 4; ours are the lowest that were free, in this order
        ends = [(os.POSIX_SPAWN_DUP2, here[0], 3), (os.POSIX_SPAWN_DUP2, theirs[1], 4)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=[log, *ends])
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
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
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
        self.mouse(*self.middle(selector), click=True)

    def middle(self, selector):
        find = f"const box = document.querySelector({selector!r}).getBoundingClientRect()"
        return self(f"(() => {{ {find}; return [box.x + box.width / 2, box.y + box.height / 2] }})()")

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
        os.waitpid(self.process, 0)
        os.close(self.pipe)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    page = Page(str(tmp_path_factory.mktemp("chromium")))
    yield page
    page.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a recording; at the end nothing may have gone wrong in it, nor come from elsewhere."""

    def opened(recording, where="", **look):
        path = tmp_path / "run.html"
        path.write_text(recording if isinstance(recording, str) else render(recording), encoding="utf-8")
        browser.open(f"{path.as_uri()}{where}", **look)
        return browser

    yield opened
    assert browser.complaints() == []
    assert browser("performance.getEntriesByType('resource').map(each => each.name)") == []


def books(recording, step):
    """What the format says of a step, replayed from the beginning in the plainest way."""
    blocks = recording["engine"]["num_blocks"]
    readers, findable, lru, tables, running = [0] * blocks, [0] * blocks, [], {}, set()
    for facts in [*recording["steps"], {"blocks": recording["tail"], "preempted": [], "spans": []}][: step + 1]:
        events = facts["blocks"]
        for code, block, request in zip(events[::3], events[1::3], events[2::3], strict=True):
            if code in (TAKE, HOLD):
                readers[block] = 1 if code == TAKE else readers[block] + 1
                tables.setdefault(request, []).append(block)
            elif code == FREE:
                readers[block] -= 1
                tables[request].remove(block)
                if readers[block] == 0 and findable[block]:
                    lru.append(block)
            elif code in (KNOW, FORGET):
                findable[block] = int(code == KNOW)
            if code in (HOLD, FORGET) and block in lru:
                lru.remove(block)
        running -= set(facts["preempted"])
        running |= {span[0] for span in facts["spans"]}
    requests = recording["requests"]
    alive = {
        index
        for index, facts in enumerate(requests)
        if facts["queued_step"] is not None
        and facts["queued_step"] <= step
        and (facts["gone_step"] is None or facts["gone_step"] > step)
    }
    return {
        "step": step,
        "readers": readers,
        "findable": findable,
        "lru": lru,
        "tables": {str(request): table for request, table in tables.items() if table and request >= 0},
        "waiting": sorted(alive - running, key=lambda index: (requests[index]["rank"], index)),
        "running": sorted(alive & running),
    }


def seen(page, step):
    state = page.state(step)
    return {name: state[name] for name in ("step", "readers", "findable", "lru", "tables", "waiting", "running")}


def tiny(**changes):
    """Two requests with a common prompt, four steps; the second waits, and draws a token with alternatives."""

    def facts(index, **more):
        return {
            "id": f"r{index}", "sample": 0, "arrived": 10 * index, "before_step": index, "queued_step": index,
            "prompt": [1, 2, 3, 4, 5], "priority": 0, "rank": 0, "max_tokens": 2, "params": {"temperature": 0.5},
            "cached": 4 * index, "ended": 500, "end_step": 1 + 2 * index, "gone_step": 2 + 2 * index,
            "finish": "length", "stop": None, "text": " sea sky",
        } | more  # fmt: skip

    def step(n, spans, blocks, **more):
        times = [100 * n + each for each in (0, 10, 20, 30, 80, 90)]
        return {"t": times, "spans": spans, "preempted": [], "wait": None, "blocks": blocks} | more

    recording = {
        "format": "nanovllm recording", "version": 1, "dropped_steps": 0, "tail": [],
        "engine": {"model": "tiny", "device": "cpu", "block_size": 4, "num_blocks": 4, "max_num_seqs": 1},
        "texts": {"1": "Write", "2": " of", "3": " the", "4": " cold", "5": " wind:", "6": " sea", "7": " sky"},
        "requests": [facts(0), facts(1)],
        "steps": [
            step(0, [[0, 0, 5, 6]], [TAKE, 0, 0, TAKE, 1, 0]),
            step(1, [[0, 5, 6, 7]], [KNOW, 0, -1], wait="seqs"),
            step(2, [[1, 4, 5, 6]], [FREE, 1, 0, FREE, 0, 0, HOLD, 0, 1, TAKE, 1, 1]),
            step(3, [[1, 5, 6, 7]], [], top={"1": [[7, -0.2231], [6, -1.6094]]}),
        ],
    }  # fmt: skip
    return recording | changes


def held_in(html):
    """The recording that a page holds."""
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', html, re.DOTALL)
    return json.loads(found.group(1))


# --- without a browser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["</script><script>", "<!--<script>", "a\u2028b\u2029c", "\ud800", "é 水 \0 \\"])
def test_the_page_holds_any_text_as_it_was(text):
    recording = tiny(texts={"1": text})
    html = render(recording)
    assert held_in(html.encode("utf-8").decode("utf-8")) == recording
    assert html.count("</script>") == render(tiny()).count("</script>")


def test_numbers_that_json_does_not_know_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        render(tiny(texts={"1": float("nan")}))


def test_the_live_page_holds_no_recording():
    assert '<script type="application/json" id="recording" data-live="/a?b=1&amp;c"></script>' in render_live(
        "/a?b=1&c"
    )


def test_the_page_needs_nothing_from_elsewhere():
    html = render(tiny())
    assert "default-src 'none'" in html and "Permission is hereby granted" in html, "its policy, the licence of Preact"
    assert not re.search(r"""(src|href)=["'](?!data:,)[a-z]*:?/""", html)
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert "trace/page/page.html" in pyproject, "the wheel must hold it"


# --- what is shown is what was -----------------------------------------------------------------------------------


@browsed
def test_the_books_are_those_of_the_recording_at_every_step(show):
    page = show(PRESSED)
    steps = list(range(len(PRESSED["steps"]) + 1))  # and what came after the last one
    there = [*steps, *reversed(steps), *random.Random(0).sample(steps, 40)]
    assert any(len(books(PRESSED, step)["waiting"]) > 1 for step in steps)
    expected = {step: books(PRESSED, step) for step in steps}
    for step in there:
        assert seen(page, step) == expected[step]


@browsed
def test_a_step_is_told_in_words(show):
    page = show(tiny())
    assert "Request r0 arrives" in page.text(".story") and "It gets prompt tokens 0–4, and draws" in page.text(".story")
    assert "draws “ sea”" in page.text(".story")
    page.press("ArrowRight")
    story = page.text(".story")
    assert "Request r0 decodes one token: “ sky”" in story and "ends: it reached its limit of tokens" in story
    assert "Why request r1 is not admitted: as many requests run as may (1)." in story
    page.press("ArrowRight")
    assert "Request r1 is admitted: 4 tokens found in the cache (1 block)" in page.text(".story")


@browsed
def test_preemption_eviction_and_chunks_are_told(show):
    page = show(PRESSED)
    page.press("p")
    step = page.state()["cursor"]
    (victim,) = PRESSED["steps"][step]["preempted"]
    assert f"Request {victim} is preempted" in page.text(".story")
    page.press("Home")
    page.press("e")
    step = page.state()["cursor"]
    first = next(n for n, facts in enumerate(PRESSED["steps"]) if EVICT in facts["blocks"][::3])
    assert step == first
    assert re.search(r"Blocks? \d+.* (is|are) evicted for request", page.text(".story"))
    chunked = next(n for n, s in enumerate(PRESSED["steps"]) if any(span[3] == -1 for span in s["spans"]))
    page(f"nanovllm.player.go({chunked})")
    page.frame()
    assert re.search(r"chunk 1 of [23]", page.text(".story"))
    page.press("e", shift=True)
    assert page.state()["cursor"] < chunked or "No earlier eviction" in page.text(".notices")


@browsed
def test_the_totals_are_those_of_the_recording(show):
    page = show(PRESSED)
    drawn = sum(span[3] >= 0 for step in PRESSED["steps"] for span in step["spans"])
    evictions = sum(step["blocks"][::3].count(EVICT) for step in PRESSED["steps"])
    text = page("[...document.querySelectorAll('.totals div')].map(each => each.textContent).join(';')")
    for name, number in {
        "requests": 16,
        "steps": 103,
        "tokens drawn": drawn,
        "preemptions": 1,
        "evictions": evictions,
    }.items():
        assert f"{name}{number}" in text, text


@browsed
def test_blocks_tell_what_they_hold_and_select_who_reads_them(show):
    page = show(tiny(), "#step=3")
    x, y = page(
        "(() => { const box = document.querySelector('#map').getBoundingClientRect(); return [box.x, box.y] })()"
    )
    page.mouse(x + 40 + 10, y + 14)
    hint = page.text(".hint")
    assert "Block 0: held by 1 reader" in hint and "request r1" in hint and "“Write of the cold”" in hint
    page.mouse(x + 40 + 10, y + 14, click=True)
    assert page.state()["selected"] == 1
    page.until("location.hash === '#step=3&request=1'")
    page("nanovllm.player.go(2)")  # under a pointer that rests
    page.until("document.querySelector('.hint').innerText.includes('shared in this step')")


# --- driving it ---------------------------------------------------------------------------------------------------


@browsed
def test_keys_step_play_and_help(show):
    page = show(PRESSED)
    page.press("End")
    assert page.state()["cursor"] == 103 and "nobody waits and nobody runs" in page.text(".story")
    page.press("ArrowLeft")
    page.press("ArrowLeft", shift=True)
    assert page.state()["cursor"] == 92
    page.press("Home")
    page("nanovllm.player.speed = 100")
    page.press(" ")
    page.until("nanovllm.player.cursor > 5")
    page.press(" ")
    stopped = page.state()
    time.sleep(0.1)
    assert not stopped["playing"] and page.state()["cursor"] == stopped["cursor"]
    page.press("?")
    assert "How to read this" in page.text("dialog")
    page.press("Escape")
    assert page("document.querySelector('dialog')") is None
    page.press("/")
    assert page("document.activeElement.id") == "search"


@browsed
def test_playing_ends_with_the_last_step(show):
    page = show(tiny(), "#step=0")
    page("nanovllm.player.speed = 30")
    page.click("#play")
    page.until("nanovllm.player.cursor === 3 && !nanovllm.player.playing")


@browsed
def test_the_pointer_moves_the_cursor_and_lanes_select(show):
    page = show(PRESSED)
    middle, y = page.middle("#chart")
    page.mouse(middle, y, click=True)
    assert 45 <= page.state()["cursor"] <= 52
    x, y = page(
        "(() => { const box = document.querySelector('.lanes').getBoundingClientRect(); return [box.x, box.y] })()"
    )
    scrolled = page("document.querySelector('.lanes').scrollTop")
    page.mouse(x + 200, y + 25, click=True)
    assert page.state()["selected"] == (scrolled + 24) // 17
    page.click("[aria-label='Zoom in']")
    assert page("nanovllm.player.view.to - nanovllm.player.view.from") == pytest.approx(104 * 0.625)


@browsed
def test_a_text_grows_with_the_cursor_and_shows_alternatives(show):
    page = show(tiny(), "#step=2&request=1")
    assert page.text(".text") == "Write of the cold wind: sea"
    assert page.text(".prompt.cached") == "Write of the cold" and page.text(".prompt.now") == " wind:"
    page.press("ArrowRight")
    assert page.text(".text").endswith(" sea sky") and page.text(".token.new") == " sky"
    page.mouse(*page.middle(".token.new"))
    assert "80 %" in page.text(".hint") and "20 %" in page.text(".hint") and "“ sea”" in page.text(".hint")
    assert page.text(".table").split() == ["0", "1"]


@browsed
def test_a_character_of_several_tokens_is_shown_whole(show):
    texts = {
        "1": " \udce6",
        "2": "\udc97",
        "3": "\udca5本",
        "4": "\udcff",
        "5": "é",
        "6": "\udcf0\udc9f",
        "7": "\udc98\udc80",
    }
    page = show(tiny(texts=texts), "#step=2&request=1")
    assert page.text(".text") == " 日本<FF>é<F0><9F>", "and bytes that are none are shown as they are"
    page.press("ArrowRight")
    assert page.text(".text") == " 日本<FF>é😀" and page.text(".token.new") == "😀"
    assert "decodes one token: “<98><80>”" in page.text(".story")
    page("document.querySelector('#search').value = '日本'")
    page("document.querySelector('.search').requestSubmit()")
    page.frame()
    assert "1 of 2" in page.text(".search")


@browsed
def test_signals_of_a_text_turn_nothing_around_it(show):
    texts = {str(token): "\u202eabc" if token == 5 else "xyz" for token in range(1, 8)} | {"7": "\u202e\x1b[0m\n"}
    page = show(tiny(texts=texts), "#step=3&request=1")
    assert "“<202E>␛[0m⏎”" in page.text(".story")
    prompt, token = page("""['.prompt.now, .prompt.done:nth-last-child(1)', '.token'].map(
        each => document.querySelector(each).getBoundingClientRect().right)""")
    assert token > prompt, "what was drawn stands behind the prompt, and not in it"


@browsed
def test_search_finds_names_and_texts(show):
    page = show(tiny())
    for words, found in (("r1", 1), ("cold WIND", 0), ("sky", 0)):
        page(f"document.querySelector('#search').value = {words!r}")
        page("document.querySelector('.search').requestSubmit()")
        page.frame()
        assert page.state()["selected"] == found
    page("document.querySelector('#search').value = 'no such words'")
    page("document.querySelector('.search').requestSubmit()")
    page.frame()
    assert "nothing found" in page.text(".search")


@browsed
def test_samples_have_the_names_that_explain_gives_them(show):
    recording = tiny()
    recording["requests"][1] |= {"id": "r0", "sample": 1}
    page = show(recording, "#request=1")
    assert page.text(".request h2") == "Request r0/1" and "Request r0 arrives" in page.text(".story")
    assert [label(row) for row in recording["requests"]] == ["r0", "r0/1"]


@browsed
@pytest.mark.parametrize("name", ["r", "a-name-that-is-as-long-as-some-are-" * 4])
def test_it_is_told_what_a_sample_waits_for_and_its_panel_can_be_closed(show, name):
    recording = tiny()
    recording["requests"][1] |= {"id": name, "sample": 1}
    recording["steps"][1]["wait"] = "prefix"
    page = show(recording, "#step=1&request=1")
    why = f"Why request {name}/1 is not admitted: another one is computing what its prompt begins with"
    assert why in page.text(".queues")
    title, close = page.middle(".request .dot"), page.middle(".request [aria-label=Close]")
    inside = page("document.querySelector('.request').getBoundingClientRect().right")
    assert abs(title[1] - close[1]) < 12 and close[0] < inside
    cut = page("(title => title.scrollWidth > title.clientWidth)(document.querySelector('.request h2'))")
    assert cut == (len(name) > 9)
    page.press("ArrowRight")
    assert "Why request" not in page.text(".queues")


@browsed
def test_the_number_of_the_step_says_where_we_are_whatever_is_written(show):
    page = show(PRESSED, "#step=7")
    for written, there in (("", 7), ("5000", 103), ("4000", 103), ("-3", 0), ("12.4", 12)):
        page(f"document.querySelector('#step').value = '{written}'")
        page("document.querySelector('#step').dispatchEvent(new Event('change', { bubbles: true }))")
        page.frame()
        assert page.state()["cursor"] == there and page("document.querySelector('#step').value") == str(there)


@browsed
def test_a_hint_stays_when_a_finger_is_lifted(show):
    page = show(tiny(), "#step=3&request=1", width=390, height=844)
    page("document.querySelector('.token').scrollIntoView({ block: 'center' })")
    (x, y), elsewhere = page.middle(".token.new"), page.middle(".request h2")
    for place, shown in (((x, y), True), (elsewhere, False)):
        page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": place[0], "y": place[1]}])
        page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        page.frame()
        assert page("!!document.querySelector('.hint')") == shown


@browsed
def test_help_gives_the_focus_back(show):
    page = show(tiny())
    page("document.querySelector('#help').focus()")
    page.click("#help")
    page.click("dialog [aria-label=Close]")
    page.until("!document.querySelector('dialog')")
    assert page("document.activeElement.id") == "help"


@browsed
def test_no_outline_is_cut_and_no_legend(show):
    page = show(tiny(dropped_steps=3), "#step=1&request=0")
    room = page("document.querySelector('.queues .chip').getBoundingClientRect().x - "
                "document.querySelector('.queues').getBoundingClientRect().x")  # fmt: skip
    assert room >= 3
    panel, last = (page(f"document.querySelector('{each}').getBoundingClientRect().bottom")
                   for each in (".map", ".legend li:last-child"))  # fmt: skip
    assert last < panel


@browsed
def test_dark_and_light_follow_the_system_and_the_switch(show):
    page = show(PRESSED, dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page(ground)
    page.press("d")
    assert page(ground) != dark and page("document.documentElement.dataset.theme") == "light"
    page.click("#theme")
    assert page(ground) == dark


@browsed
@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1280, 800)])
def test_nothing_is_wider_than_the_screen(show, width, height):
    page = show(PRESSED, "#step=50&request=9", width=width, height=height)
    assert page("document.documentElement.scrollWidth") <= width
    outside = page("""[...document.querySelectorAll('button, select, input, .panel, canvas')].filter(each => {
        const box = each.getBoundingClientRect();
        return box.width && (box.left < -1 || box.right > innerWidth + 1);
    }).map(each => each.outerHTML)""")
    assert outside == []
    nameless = page("""[...document.querySelectorAll('button, input, select')].filter(
        each => !(each.innerText || each.ariaLabel || each.labels?.length)).map(each => each.outerHTML)""")
    assert nameless == []


# --- what can be wrong with a recording ---------------------------------------------------------------------------


@browsed
def test_hostile_texts_are_texts(show):
    bad = "</script><script>document.title = 'hit'</script><img src=x onerror=\"document.title = 'hit'\">"
    recording = tiny(texts={str(token): bad for token in range(1, 8)})
    recording["engine"] |= {"model": bad}
    recording["requests"][1] |= {"id": bad, "text": bad}
    page = show(recording, "#step=3&request=1")
    assert page.text(".text").startswith(bad)
    assert page("document.images.length") == 0 and page("document.title") != "hit"


@browsed
@pytest.mark.parametrize(
    ("html", "said"),
    [
        (render(tiny(version=2)), "version 2 of the format; the page shows version 1"),
        (render({"hello": 1}), "no recording of nanovllm"),
        (render(tiny()).replace('{"format"', '{format'), "is damaged"),
        (render(tiny(engine={})), "lacks its engine"),
    ],
    ids=["version", "other", "damaged", "engine"],
)  # fmt: skip
def test_what_cannot_be_shown_says_why(show, html, said):
    page = show(html)
    assert said in page.text(".refusal")


@browsed
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": [], "requests": []}, "This recording is empty"),
        ({"steps": []}, "No step was recorded"),
        ({"dropped_steps": 1234}, "1,234 steps are missing"),
        ({"texts": {}}, ""),
    ],
    ids=["empty", "no steps", "missing", "no texts"],
)
def test_recordings_with_gaps_are_shown(show, changes, said):
    page = show(tiny(**changes), "#request=1")
    assert said in page.text(".notices")
    for key in ("End", "ArrowLeft", " ", "p", "0", "+"):
        page.press(key)


@browsed
def test_who_outgrew_the_cache_did_not_reach_its_limit(show):
    recording = tiny()
    recording["requests"][0]["max_tokens"] = 3
    page = show(recording, "#step=1&request=0")
    assert "Request r0 ends: it grew until the cache could hold no more of it." in page.text(".story")
    assert "2 of at most 3 tokens" in page.text(".facts")


@browsed
def test_who_ended_before_any_step_is_shown_so(show):
    recording = tiny()
    recording["requests"].append(recording["requests"][1] | {
        "id": "gone", "before_step": 0, "queued_step": 0, "end_step": None, "gone_step": 0, "finish": "abort",
    })  # fmt: skip
    page = show(recording, "#step=3&request=2")
    x, y = page(
        "(() => { const box = document.querySelector('.lanes').getBoundingClientRect(); return [box.x, box.y] })()"
    )
    page.mouse(x + 200, y + 2.5 * 17)
    assert "never admitted" in page.text(".hint") and "ended before the first step" in page.text(".hint")
    page.click("[aria-label=Scale] button + button")  # by time
    assert "ended: abort" in page.text(".request")


@browsed
def test_who_has_ended_and_still_holds_blocks_does_not_just_run(show):
    recording = tiny()
    recording["requests"][0]["gone_step"] = 3
    page = show(recording, "#step=2&request=0")
    assert page.state()["running"] == [0, 1]
    assert "has ended, and gives its blocks back next" in page.text(".request .panel-head")
    assert page("document.querySelectorAll('.queues .ending').length") == 1


@browsed
def test_thousands_of_steps_are_reached_at_once(show):
    blocks, steps, dice = 4096, 5000, random.Random(0)
    recording = tiny(steps=[], requests=[])
    recording["engine"] = {"model": "long", "device": "cuda", "block_size": 16, "num_blocks": blocks}
    facts = tiny()["requests"][0] | {
        "ended": None,
        "end_step": None,
        "gone_step": None,
        "finish": None,
        "before_step": 0,
    }
    recording["requests"] = [facts | {"id": str(index), "queued_step": 0} for index in range(32)]
    for n in range(steps):
        events = [TAKE, n, n % 32] if n < blocks else []
        spans = [[request, 5 + n, 6 + n, 6] for request in range(32)]
        spans = spans if n else [[request, 0, 5, 6] for request in range(32)]
        recording["steps"].append(
            {
                "t": [n * 100 + each for each in (0, 1, 2, 3, 90, 95)],
                "spans": spans,
                "preempted": [],
                "wait": None,
                "blocks": events,
            }
        )
    began = time.monotonic()
    page = show(recording)
    assert time.monotonic() - began < 8
    places = [dice.randrange(steps) for _ in range(50)]
    took = page(
        f"{places}.map(step => {{ const began = performance.now(); nanovllm.player.replay.at(step);"
        " return performance.now() - began }).sort((a, b) => a - b)"
    )
    assert took[40] < 16 and page.state(4999)["readers"] == [1] * blocks
    assert sum(page.state(1000)["readers"]) == 1001


# --- live -----------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Serves the live page, and sends what is put into ``messages``; None breaks the connection."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.messages = Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if self.path == "/events" else "text/html; charset=utf-8")
        self.end_headers()
        if self.path != "/events":
            self.wfile.write(render_live().encode())
            return
        self.wfile.write(b"retry: 100\n\n")
        while (message := self.server.messages.get()) is not None:
            if message == "end":
                self.wfile.write(b'event: end\ndata: {"tail":[2,1,1,2,0,1]}\n\n')
                return
            self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())

    def log_message(self, *facts):
        pass


@browsed
def test_a_live_page_follows_until_it_is_scrubbed_and_comes_back(browser):
    recording = tiny()
    steps, requests = recording["steps"], [facts | {"index": n} for n, facts in enumerate(recording["requests"])]
    with Server() as server:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        assert "Waiting for the engine" in browser.text(".notices") or "connection" in browser.text(".notices")
        alive = [{**facts, "ended": None, "end_step": None, "gone_step": None, "finish": None} for facts in requests]
        server.messages.put(
            {"engine": recording["engine"], "texts": recording["texts"], "requests": alive[:1], "steps": steps[:1]}
        )
        browser.until("nanovllm.player.replay.length === 1")
        server.messages.put({"requests": alive[1:], "steps": steps[1:2]})
        browser.until("nanovllm.player.cursor === 1")
        assert browser.state()["follow"] and browser.state()["waiting"] == [1]
        browser.press("Home")
        ends = [{"index": 0, "ended": 500, "end_step": 1, "gone_step": 2, "finish": "length"}]
        server.messages.put({"requests": ends, "steps": steps[2:]})
        browser.until("nanovllm.player.replay.length === 4")
        assert browser.state()["cursor"] == 0 and not browser.state()["follow"]
        ended = recording | {"requests": [{**alive[0], **ends[0]}, alive[1]]}
        for step in (3, 0, 2, 1):
            assert seen(browser, step) == books(ended, step)
        browser.click("#follow")
        assert browser.state()["cursor"] == 3
        server.messages.put(None)
        browser.until("document.querySelector('#follow').innerText === 'connection lost' || !nanovllm.player.connected")
        browser.until("nanovllm.player.connected")
        server.messages.put({"engine": recording["engine"], "texts": {}, "requests": requests, "steps": steps[:2]})
        browser.until("nanovllm.player.replay.length === 2")
        assert browser.state()["cursor"] == 1, "a new engine begins anew"
        assert browser("document.title") == "tiny · nanovllm"
        server.messages.put({"requests": [{"index": 7}]})
        browser.until("document.querySelector('.refusal')")
        assert "Request 7 came when only 2 are known" in browser.text(".refusal")
        browser.call("Page.navigate", url="about:blank")
        server.messages.put(None)
        server.shutdown()


@browsed
def test_a_live_page_says_that_the_engine_is_closed_and_asks_no_more(browser):
    recording = tiny()
    requests = [facts | {"index": n} for n, facts in enumerate(recording["requests"])]
    with Server() as server:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        server.messages.put({**recording, "requests": requests})
        browser.until("nanovllm.player.replay.length === 4")
        server.messages.put("end")
        browser.until("document.querySelector('.notices').innerText.includes('The engine is closed')")
        time.sleep(0.4)
        assert "lost" not in browser.text("#page") and browser.state()["connected"]
        assert browser.state()["cursor"] == 4 and browser.state()["readers"] == [0] * 4, (
            "and what came after it is seen"
        )
        browser.press("Home")
        assert browser.state()["cursor"] == 0 and "Request r0 arrives" in browser.text(".story")
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()


def serving(max_steps):
    """An engine that takes a millisecond a step, with a recording of so many, and the server of its page."""
    scheduler = Scheduler(BlockManager(4096, 16), max_num_seqs=4, max_num_batched_tokens=64)
    engine = LLMEngine(scheduler, Slow(), Limits(max_model_len=10**6, vocab_size=100))
    live = Live(0)
    recorder = Recorder(
        engine, facts={"model": "slow"}, decode=str, max_steps=max_steps, deliver=lambda recorder: live.close()
    )
    engine.observers.append(recorder)
    live.begin(recorder)
    return engine, live


class Slow:
    """A runner that draws the same token always, after a while."""

    lookahead = 0

    def submit(self, output):
        time.sleep(0.001)
        return lambda: [Sampled(1) if span.samples else None for span in output.spans]


NOW = re.compile(
    r"The recording is full: ([\d,]+) steps are not in it\. Now: (\d+) running, (\d+) waiting, "
    r"([\d,]+) of 4,096 blocks in use, [\d,]+ cached, ([\d,]+) tokens/s and ([\d,]+) of prompts\."
)


def now(page):
    """The numbers of the line that tells what the engine does."""
    return [int(number.replace(",", "")) for number in NOW.fullmatch(page.text(".notices .doing")).groups()]


@browsed
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_goes_on_when_the_recording_is_full(browser, tmp_path, width, dark):
    engine, live = serving(30)
    for _ in range(5):
        engine.add_request(None, [1, 2, 3], SamplingParams(max_tokens=10**5))
    until = threading.Event()

    def work():
        while not until.is_set():
            engine.step()

    working = threading.Thread(target=work, daemon=True)
    working.start()
    try:
        browser.open(live.address, width=width, height=844, dark=dark)
        browser.until("document.querySelector('.notices .doing')")
        time.sleep(0.5)
        first = now(browser)
        time.sleep(0.5)
        second = now(browser)
        for _, running, waiting, held, rate, prompts in (first, second):
            assert (running, waiting) == (4, 1) and held >= 4 and 100 < rate < 4000 and prompts == 0
        assert second[0] > first[0] and second[3] > first[3] and browser.state()["cursor"] == 29
        assert browser("document.documentElement.scrollWidth") <= width
        assert browser("!document.querySelector('.notices .doing').closest('[role=status], [aria-live]')")
        browser.screenshot(tmp_path / "full.png")
        browser.press("Home")
        assert browser.state()["cursor"] == 0
        assert now(browser)[1] == 4, "whatever step is looked at"
    finally:
        until.set()
        working.join()
    for name in list(engine._requests):
        engine.abort(name)
    browser.until(
        "/Now: 0 running, 0 waiting, 0 of .* 0 tokens.s and 0 of/.test(document.querySelector('.doing').innerText)"
    )
    engine.close()
    browser.until("nanovllm.player.closed")
    browser.frame()
    closed = browser.text(".notices")
    assert "steps are missing: the recorder's limit was reached" in closed and "The engine is closed" in closed
    assert not browser("document.querySelector('.doing')")
    assert browser.complaints() == []
    browser.call("Page.navigate", url="about:blank")


@browsed
def test_a_page_with_as_many_steps_as_it_takes_hears_what_comes(browser):
    """A recording may be full with just as many."""
    recording = tiny()
    requests = [facts | {"index": n} for n, facts in enumerate(recording["requests"])]
    step = recording["steps"][1] | {"blocks": []}
    told = {"seconds": 5, "running": 1, "waiting": 0, "held": 1, "cached": 0, "prompt_tokens": 0, "drawn_tokens": 0}
    with Server() as server:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        steps = recording["steps"] + [step] * (50_000 - 4)
        server.messages.put({**recording, "requests": requests, "steps": steps})
        browser.until("nanovllm.player.replay.length === 50000", seconds=30)
        server.messages.put({"dropped_steps": 1, "now": told})
        browser.until("document.querySelector('.doing')")
        assert "1 step is not in it. Now: 1 running" in browser.text(".doing")
        server.messages.put({"now": told | {"seconds": 6, "drawn_tokens": 700, "prompt_tokens": 30}})
        browser.until("document.querySelector('.doing').innerText.includes(' 700 tokens/s and 30 of prompts')")
        server.messages.put({"now": told | {"seconds": 60, "drawn_tokens": 800}})
        browser.until("document.querySelector('.doing').innerText.includes(' 0 tokens/s and')")
        server.messages.put(None)
        browser.until("!document.querySelector('.doing')")
        assert "1 step is missing" in browser.text(".notices")
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()
