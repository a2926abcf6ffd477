"""The page while the engine runs: what viewers are sent, one by one, is the recording."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams, cli
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import CheckpointError, ConfigError, EngineError
from nanovllm.request import Sampled
from nanovllm.scheduler import Scheduler
from nanovllm.trace import live as live_module
from nanovllm.trace import recorder as recorder_module
from nanovllm.trace import top
from nanovllm.trace.file import TraceFile
from nanovllm.trace.live import MOST_ROWS, MOST_SPANS, MOST_TOKENS, MOST_VIEWERS, Follower, Live
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.replay import Replay

SECONDS = 20


class Ones:
    """A runner that computes nothing, and draws the same token always."""

    lookahead = 0

    def submit(self, output):
        return lambda: [Sampled(1) if span.samples else None for span in output.spans]


def decoding(num_requests, num_steps, prompt=5, **limits):
    """An engine of so many requests that have gone so many steps, and its recorder."""
    blocks = BlockManager(num_requests * (num_steps + prompt + 100), 16)
    scheduler = Scheduler(blocks, max_num_seqs=num_requests + 1, max_num_batched_tokens=num_requests * prompt)
    engine = LLMEngine(scheduler, Ones(), Limits(max_model_len=10**6, vocab_size=10**5))
    recorder = Recorder(engine, decode=str, **limits)
    engine.observers.append(recorder)
    for number in range(num_requests):
        engine.add_request(None, list(range(number, number + prompt)), SamplingParams(max_tokens=10**5))
    for _ in range(num_steps):
        engine.step()
    return engine, recorder


def joined(messages):
    """What a page knows after these messages."""
    made = {"texts": {}, "requests": [], "steps": [], "dropped_steps": 0}
    for number, message in enumerate(messages):
        assert ("engine" in message) == (number == 0)
        made["engine"] = message.get("engine", made.get("engine"))
        made["texts"] |= message.get("texts", {})
        for facts in message.get("requests", ()):
            place = facts.pop("index")
            if place == len(made["requests"]):
                made["requests"].append({})
            made["requests"][place] |= facts
        made["steps"] += message.get("steps", ())
        made["dropped_steps"] = message.get("dropped_steps", made["dropped_steps"])
    return made


def shown(recording):
    """What of a recording a page that watched has been sent."""
    return {name: recording[name] for name in ("engine", "texts", "requests", "steps", "dropped_steps")}


class Reader(threading.Thread):
    """Reads the events of an engine until they end."""

    def __init__(self, llm):
        super().__init__(daemon=True)
        live = server_of(llm)
        self.connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=SECONDS)
        self.connection.request("GET", "/events")
        self.response = self.connection.getresponse()
        assert self.response.getheader("Content-Type") == "text/event-stream"
        self.messages = []
        self.start()

    def run(self):
        for line in self.response:
            if line.startswith(b"data: "):
                self.messages.append(json.loads(line[6:]))


def server_of(llm):
    recorder = next(each for each in llm.llm_engine.observers if isinstance(each, Recorder))
    return recorder._deliver.__self__.live


def get(live, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=SECONDS)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


def generate(llm, number, seed=0):
    prompts = [[(7 * place + seed + each) % 250 for each in range(9 + place)] for place in range(number)]
    return llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, seed=1, logprobs=2), use_tqdm=False)


def test_messages_joined_are_the_recording_whenever_a_viewer_came(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    llm = open_llm(trace=str(target), live=0, max_num_seqs=4, num_gpu_blocks_override=20)
    early = Reader(llm)
    for seed in range(4):
        generate(llm, 6, seed)
        time.sleep(0.15)  # more than one message
    late = Reader(llm)
    generate(llm, 2, seed=9)
    llm.close()
    recording = shown(json.loads(target.read_text()))
    for reader in (early, late):
        reader.join(SECONDS)
        assert not reader.is_alive(), "the stream ends with the engine"
        assert joined(reader.messages) == recording
    assert len(early.messages) > 3 and recording["steps"] and recording["texts"]


@pytest.mark.parametrize("seed", range(30))
def test_a_follower_of_any_workload_tells_what_the_recording_says(workload, seed):
    run = workload(seed)
    follower, messages = Follower(run.recorder), []
    plain = run.recorder.on_step

    def on_step(output, times):
        plain(output, times)
        if len(run.recorder.steps) % 3 == 0 and (message := follower.news()):
            messages.append(json.loads(message))

    run.recorder.on_step = on_step
    recording = run.serve()
    if message := follower.news():
        messages.append(json.loads(message))
    assert joined(messages) == shown(json.loads(json.dumps(recording)))
    assert follower.news() == "", "nothing is told twice"


def test_who_may_see_it(open_llm):
    llm = open_llm(live=0)
    live = server_of(llm)
    for host in (None, f"127.0.0.1:{live.port}", f"localhost:{live.port}"):
        status, page = get(live, "/", host)
        assert status == 200 and 'data-live="/events"' in page
    for host in ("example.org", f"example.org:{live.port}", "127.0.0.1", ""):
        assert get(live, "/", host)[0] == 403
        assert get(live, "/events", host)[0] == 403
    assert get(live, "/../config.json")[0] == 404
    assert live.address.startswith("http://127.0.0.1:")


def test_a_viewer_that_reads_nothing_or_leaves_holds_nobody_up(open_llm):
    llm = open_llm(live=0)
    live = server_of(llm)
    stuck = socket.create_connection(("127.0.0.1", live.port))
    stuck.sendall(f"GET /events HTTP/1.0\r\nHost: 127.0.0.1:{live.port}\r\n\r\n".encode())
    gone = Reader(llm)
    gone.connection.sock and gone.connection.sock.shutdown(socket.SHUT_RDWR)
    began = time.monotonic()
    for seed in range(3):
        generate(llm, 4, seed)
    llm.close()
    assert time.monotonic() - began < SECONDS
    stuck.close()


def test_too_many_viewers_are_told_so(open_llm):
    llm = open_llm(live=0)
    readers = [Reader(llm) for _ in range(MOST_VIEWERS)]
    assert get(server_of(llm), "/events")[0] == 503
    llm.close()
    for reader in readers:
        reader.join(SECONDS)
        assert not reader.is_alive()


def test_top_says_that_there_is_no_place(open_llm, capsys):
    llm = open_llm(live=0)
    readers = [Reader(llm) for _ in range(MOST_VIEWERS)]
    assert cli.main(["top", str(server_of(llm).port)]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert f"{MOST_VIEWERS} are watching already" in said and "no engine" not in said
    llm.close()
    for reader in readers:
        reader.join(SECONDS)


def test_top_tells_an_engine_that_is_closed_from_one_that_is_gone(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b'HTTP/1.0 200 OK\r\n\r\ndata: {"engine":{}}\n\n')
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        assert cli.main(["top", str(server.getsockname()[1])]) == cli.BAD_INPUT
    printed = capsys.readouterr().err
    assert "gone without a word" in printed and "the engine is closed" not in printed


def test_top_counts_no_block_of_requests_that_have_ended(open_llm):
    llm = open_llm(live=0)
    pinned = llm.cache_prefix(list(range(20)))
    reader = Reader(llm)
    generate(llm, 2)
    llm.close()
    reader.join(SECONDS)
    screen = top.Screen()
    for message in reader.messages:
        screen.read(message)
    assert pinned and "running 0  waiting 0  ended 3" in screen.text() and "blocks 2 of 32" in screen.text()
    assert reader.messages[-1]["tail"], "the blocks that were given back last"


@pytest.mark.parametrize("seed", range(40))
def test_top_counts_the_blocks_that_the_replay_does(workload, seed):
    found = workload(seed).serve()
    replay, screen = Replay(found), top.Screen()
    rows = [row | {"index": place, "ended": None} for place, row in enumerate(found["requests"])]
    screen.read({"engine": found["engine"], "requests": rows})
    while replay.forward():
        screen.read({"steps": [found["steps"][replay.step]]})
        assert f"blocks {replay.num_held} of {replay.num_blocks} " in screen.text()


def test_top_shows_that_nothing_happens():
    engine, recorder = decoding(2, 40)
    engine.close()
    screen = top.Screen()
    for message in told(Follower(recorder)):
        screen.read(message)
    assert " 0 tokens/s" not in f" {screen.text()}".replace("\n", " ") and "full" not in screen.text()
    screen.read({})
    assert "\n0 tokens/s" in screen.text()


def test_top_goes_on_when_the_recording_is_full():
    engine, recorder = decoding(3, 40, max_steps=10)
    follower, screen = Follower(recorder), top.Screen()
    for message in told(follower):
        screen.read(message)
    lines = screen.text().splitlines()
    assert lines[1] == "running 3  waiting 0  steps 40" and " blocks 9 of 435 (2%), 0 cached" in lines[2]
    assert lines[-1] == "the recording is full: 30 steps are not in it, and nobody knows by name who runs"
    screen.read({})
    screen.read({"now": screen._now})
    for _ in range(50):
        engine.step()
    now = json.loads(follower.news())
    screen.read({**now, "now": now["now"] | {"seconds": screen._now["seconds"] + 0.5}})
    assert "steps 90\n300 tokens/s" in screen.text(), "150 in half a second"
    screen.read({"now": screen._now | {"seconds": screen._now["seconds"] + live_module.STILL_SECONDS}})
    assert "\n0 tokens/s" in screen.text()
    engine.close()


def test_who_watches_a_full_recording_is_told_what_the_engine_does(monkeypatch):
    engine, recorder = decoding(3, 10, max_steps=10)
    follower = Follower(recorder)
    assert not any("now" in message for message in told(follower)), "it is not full yet"
    engine.add_request(None, list(range(7)), SamplingParams(max_tokens=2))
    engine.add_request(None, [1], SamplingParams(max_tokens=5))
    engine.step()
    (message,) = told(follower)
    now = message["now"]
    seconds = now.pop("seconds")
    assert message["dropped_steps"] == 1 and 0 < seconds < SECONDS
    assert now == {"running": 4, "waiting": 1, "held": 4, "cached": 0, "prompt_tokens": 7, "drawn_tokens": 4}
    assert follower.news() == "", "nothing has changed"
    engine.step()
    engine.step()
    (message,) = told(follower)
    assert message["now"]["seconds"] >= seconds and message["dropped_steps"] == 3
    assert [message["now"][name] for name in ("running", "waiting", "prompt_tokens", "drawn_tokens")] == [4, 0, 8, 12]
    for request_id in list(engine._requests):
        engine.abort(request_id)
    (message,) = told(follower)
    assert [message["now"][name] for name in ("running", "waiting", "held", "drawn_tokens")] == [0, 0, 0, 12]
    monkeypatch.setattr(live_module, "STILL_SECONDS", 0.0)
    (again,) = told(follower)
    assert again["now"]["seconds"] >= message["now"].pop("seconds") and again.keys() == {"now"}
    assert again["now"] == message["now"] | {"seconds": again["now"]["seconds"]}, "that it rests"
    assert follower.news() == "", "which is said once"
    engine.close()


def test_who_comes_late_is_told_what_was_before_what_is():
    engine, recorder = decoding(20, 300, max_steps=250)
    messages = told(Follower(recorder))
    assert len(messages) > 2 and ["now" in message for message in messages] == [False] * (len(messages) - 1) + [True]
    engine.close()


def test_top_shows_samples_apart_and_names_as_they_can_be_shown():
    row = {"id": "a", "sample": 0, "prompt": [1], "max_tokens": 5, "ended": None}
    spans = [[place, 0, 1, 2] for place in range(3)]
    screen = top.Screen()
    screen.read({
        "engine": {"num_blocks": 4, "model": "m\x1b]0;title\x07"},
        "requests": [row | {"index": 0}, row | {"index": 1, "sample": 1}, row | {"index": 2, "id": "\x1b[2J" * 9}],
        "steps": [{"t": [0] * 6, "spans": spans, "preempted": [], "blocks": []}],
    })  # fmt: skip
    lines = screen.text().splitlines()
    assert [line.split()[0] for line in lines[-3:-1]] == ["a", "a/1"] and "\x1b" not in screen.text()
    assert len({len(line) for line in lines[-4:]}) == 1, "columns stay in line"


def test_a_port_that_cannot_be_had_is_refused_before_anything_is_loaded(open_llm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"live is {port}; it must be a port .* that is free") as error:
            TraceFile(None, port)
        assert error.value.parameter == "live"
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match="0 for any"):
            Live(port)


def test_a_port_is_given_back_when_there_is_no_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path), live=port)
    Live(port).close()


def test_a_port_is_free_again_when_the_engine_is_closed(open_llm):
    llm = open_llm(live=0)
    port = server_of(llm).port
    reader = Reader(llm)
    llm.close()
    reader.join(SECONDS)
    llm = open_llm(live=port)
    assert get(server_of(llm), "/")[0] == 200


def test_top_shows_what_runs_and_waits(open_llm, capsys):
    llm = open_llm(live=0, max_num_seqs=2, num_gpu_blocks_override=20, block_size=16)
    port = server_of(llm).port
    shown = []
    watching = threading.Thread(target=lambda: shown.extend(top.messages(port)), daemon=True)
    watching.start()
    generate(llm, 3)
    llm.close()
    watching.join(SECONDS)
    screen, texts = top.Screen(), []
    for message in shown:
        for step in message.get("steps", [None]):  # as if each had come by itself
            now = {name: value for name, value in message.items() if name != "steps"}
            now["requests"] = [row | {"ended": None} for row in message.get("requests", ())]
            screen.read(now if step is None else now | {"steps": [step]})
            texts.append(screen.text())
    assert any("running 2  waiting 1  ended 0" in text for text in texts)
    assert "blocks 2 of 20 (10%)" in texts[-1], "the last of the three, with 11 and 12 tokens in blocks of 16"
    assert texts[-1].splitlines()[-1].split() == ["2", "11", "12", "12"]
    assert cli.main(["top", str(port)]) == cli.BAD_INPUT
    assert f"Start one with live={port}" in capsys.readouterr().err


def test_top_ends_with_the_engine(open_llm, capsys):
    llm = open_llm(live=0)
    ended = []
    watching = threading.Thread(target=lambda: ended.append(cli.main(["top", str(server_of(llm).port)])), daemon=True)
    watching.start()
    generate(llm, 2)
    time.sleep(0.3)
    llm.close()
    watching.join(SECONDS)
    printed = capsys.readouterr()
    assert ended == [0] and "the engine is closed" in printed.err and "ended 2" in printed.out


def told(follower):
    """All messages that a follower has now."""
    messages = []
    while message := follower.news():
        messages.append(json.loads(message))
    return messages


def test_who_comes_late_is_told_in_messages_that_are_soon_made():
    """One long message would keep Python from the engine for as long as it takes to write."""
    engine, recorder = decoding(300, 40, prompt=100)
    recorder.flush()
    messages = told(Follower(recorder))
    assert len(messages) > 300 * 40 / MOST_SPANS
    for message in messages:
        assert sum(len(step["spans"]) for step in message.get("steps", ())) < MOST_SPANS + 300
        rows = message.get("requests", ())
        assert len(rows) <= MOST_ROWS and sum(len(row["prompt"]) for row in rows) < MOST_TOKENS + 100
    assert [message.pop("behind", False) for message in messages] == [True] * (len(messages) - 1) + [False]
    engine.close()
    recording = recorder.recording()
    found = joined(messages)
    for name in ("texts", "steps"):
        assert found[name] == recording[name]
    assert [row["prompt"] for row in found["requests"]] == [row["prompt"] for row in recording["requests"]]


def test_steps_are_told_after_the_requests_that_they_speak_of():
    engine, recorder = decoding(2 * MOST_ROWS + 1, 3)
    recorder.flush()
    known = 0
    for message in told(Follower(recorder)):
        known += len(message.get("requests", ()))
        assert all(span[0] < known for step in message.get("steps", ()) for span in step["spans"])
    assert known == 2 * MOST_ROWS + 1
    engine.close()


def test_a_viewer_waits_for_nobody_and_nobody_for_it():
    """While the engine writes, which here it never ends to do, a viewer is told what there is."""
    engine, recorder = decoding(3, 40)
    found = []

    def watch():
        recorder.flush()
        found.extend(told(Follower(recorder)))

    with recorder._writing():
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        watching.join(SECONDS)
        assert not watching.is_alive() and found[0]["steps"]
    engine.close()


def test_what_is_settled_is_shown_though_no_other_step_comes(monkeypatch):
    monkeypatch.setattr(recorder_module, "SECONDS", 1000)
    engine, recorder = decoding(2, 5)
    assert recorder.steps == [None] * 5, "they are written down when there are more"
    live = Live(0)
    live.begin(recorder)
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=SECONDS)
    connection.request("GET", "/events")
    steps = []
    for line in connection.getresponse():  # raises if nothing comes
        if line.startswith(b"data: "):
            steps += json.loads(line[6:]).get("steps", ())
        if len(steps) == 5:
            break
    connection.close()
    engine.close()
    live.close()


ENDS_AT_ONCE = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from test_live import Live, SamplingParams, decoding

engine, recorder = decoding(20, 3)
live = Live(0)
recorder._deliver = lambda recorder: live.close()
live.begin(recorder)
print(live.port, flush=True)
sys.stdin.readline()
for _ in range(400):
    engine.step()
recorder.decode = lambda token: time.sleep(0.5) or "slow"  # the last message takes its time
engine.add_request(None, [77777], SamplingParams(max_tokens=9))
engine.step()
engine.close()
os._exit(0)
"""


def test_the_end_is_sent_though_the_process_ends_at_once():
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_AT_ONCE, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=SECONDS)
        connection.request("GET", "/events")
        response = connection.getresponse()  # it is connected
        process.stdin.write("\n")
        process.stdin.close()
        messages = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
        assert process.wait(SECONDS) == 0
    found = joined(messages)
    assert (
        len(found["steps"]) == 404
        and found["texts"]["77777"] == "slow"
        and all(row["gone_step"] is None for row in found["requests"])
    )
    assert "behind" not in messages[-1]


def test_who_does_not_take_the_end_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(live_module, "CLOSE_SECONDS", 0.2)
    engine, recorder = decoding(300, 3)
    recorder.decode = lambda token: "x" * 100_000  # 30 MB, more than a socket holds
    live = Live(0)
    live.begin(recorder)
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", live.port))
        stuck.sendall(f"GET /events HTTP/1.0\r\nHost: 127.0.0.1:{live.port}\r\n\r\n".encode())
        assert stuck.recv(10), "it is watching, and reads no more"
        began = time.monotonic()
        engine.close()
        live.close()
        assert time.monotonic() - began < live_module.WRITE_SECONDS / 2
    assert "a viewer has not taken the end of the recording" in caplog.text


def test_half_a_surrogate_pair_reaches_the_viewer():
    engine, recorder = decoding(1, 2)
    engine._runner.submit = broken
    with pytest.raises(EngineError):
        engine.step()
    live = Live(0)
    live.begin(recorder)
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=SECONDS)
    connection.request("GET", "/events")
    lines = iter(connection.getresponse())
    engine.close()
    live.close()
    found = joined(json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
    assert found["steps"][-1]["failed"] == "OSError: \ud800"


def broken(output):
    raise OSError("\ud800")


def test_top_shows_a_state_and_not_the_way_to_it(monkeypatch, capsys):
    _, recorder = decoding(300, 40)
    recorder.flush()
    messages = told(Follower(recorder))
    monkeypatch.setattr(top, "messages", lambda port: messages)
    assert len(messages) > 3 and cli.main(["top", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == 1 and "running 300" in printed
