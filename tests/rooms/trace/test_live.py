"""The page while the engine runs: what viewers are sent, one by one, is the recording."""

import http.client
import json
import socket
import threading
import time

import pytest

from nanovllm import LLM, SamplingParams, cli
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.trace import top
from nanovllm.trace.file import TraceFile
from nanovllm.trace.live import MOST_VIEWERS, Follower, Live
from nanovllm.trace.recorder import Recorder

SECONDS = 20


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
