"""Whatever happens to a rank: every request gets one kind of error, nothing is left, and a new engine starts."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nanovllm import EngineError, SamplingParams
from nanovllm.parallel import guard

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SECONDS = 10.0
ROOT = Path(__file__).parents[3]


def ranks(llm):
    return llm.llm_engine._runner._group


def gone(pid):
    """Whether a process has ended and nobody has to wait for it."""
    return not Path(f"/proc/{pid}").exists()


def after(seconds, act):
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def lose(llm, act, reason):
    """Run ``act`` during a generation; check what the caller gets, and that the engine refuses more."""
    timer = after(0.3, act)
    started = time.monotonic()
    with pytest.raises(EngineError, match=reason) as error:
        llm.generate([[1, 2, 3], [4, 5]], LONG, use_tqdm=False)
    assert time.monotonic() - started < SECONDS
    timer.join()
    assert [output.outputs[0].finish_reason for output in error.value.outputs] == ["error", "error"]
    with pytest.raises(EngineError, match="the engine is lost"):
        llm.generate([[1]], SHORT, use_tqdm=False)


def test_a_rank_that_is_frozen(open_llm, traces, monkeypatch):
    """Its threads, and this process's, are its share."""
    monkeypatch.setattr(guard, "PATIENCE", 1.0)
    torch.set_num_threads(3)
    llm = open_llm("llama", 2)
    assert torch.get_num_threads() == 1
    (worker,) = ranks(llm)._workers
    lose(llm, lambda: os.kill(worker.process.pid, signal.SIGSTOP), "rank 1 has not answered for 1 s")
    llm.close()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    traces()


def test_two_engines_at_once_and_one_that_is_dropped(open_llm, folders, traces):
    first, second = open_llm("llama", 2), open_llm("qwen2", 2)
    (worker,) = ranks(first)._workers
    expected = second.generate([[1, 2]], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    lose(first, worker.process.kill, r"rank 1 died \(status -9\)")
    assert second.generate([[1, 2]], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected
    first.close()
    third = open_llm("llama", 2)
    assert len(third.generate([[1, 2]], SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 4
    pids = [worker.process.pid for llm in (second, third) for worker in ranks(llm)._workers]
    del second, third, worker  # nobody closes them
    assert all(map(gone, pids))
    traces()


def test_an_exception_on_rank_1(open_llm, traces, plant):
    plant("nanovllm.model_runner.ModelRunner", "submit", 5, "raise ValueError('planted')")
    llm = open_llm("llama", 2)
    lose(llm, lambda: None, "rank 1 failed with ValueError: planted")
    llm.close()
    traces()


def test_an_exception_on_rank_1_while_it_loads(open_llm, traces, plant):
    plant("nanovllm.loader", "_prepare", 3, "raise MemoryError('planted')")
    started = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 failed with MemoryError: planted"):
        open_llm("llama", 2)
    assert time.monotonic() - started < SECONDS
    traces()


def test_an_exception_on_rank_0(open_llm, traces, monkeypatch):
    llm = open_llm("llama", 2)
    runner, calls = ranks(llm).runner, []
    plain = runner.model.logits

    def fail(*_):
        calls.append(1)
        if len(calls) > 5:
            raise ValueError("planted")
        return plain(*_)

    monkeypatch.setattr(runner.model, "logits", fail)
    lose(llm, lambda: None, "ValueError: planted")
    del runner
    llm.close()
    traces()


def test_an_exception_on_rank_0_while_it_loads(open_llm, traces, monkeypatch):
    def fail(*_):
        raise MemoryError("planted")

    monkeypatch.setattr("nanovllm.loader._prepare", fail)
    with pytest.raises(MemoryError, match="planted"):
        open_llm("llama", 2)
    traces()


PARENT = """
import sys, tempfile
from nanovllm import LLM, SamplingParams
tempfile.tempdir = sys.argv[2]
llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", num_gpu_blocks_override=64, use_tqdm_on_load=False)
print(*(worker.process.pid for worker in llm.llm_engine._runner._group._workers), flush=True)
if sys.argv[3] == "run":
    llm.generate([[1, 2]] * 8, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
if sys.argv[3] != "end":
    sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["run", "end"])
def test_a_parent_that_is_killed_or_ends_without_closing(folders, tmp_path, monkeypatch, plant, state):
    """No ``if __name__ == "__main__"``: workers do not run the user's main module. The worker is in mid-step."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if state == "run":
        plant("nanovllm.model_runner.ModelRunner", "submit", 5, "__import__('time').sleep(60)")
    script = tmp_path / "main.py"
    script.write_text(PARENT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, str(script), str(folders["llama"]), str(temporary), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 1
        if state == "run":
            time.sleep(0.5)
            assert not any(map(gone, pids))
            parent.kill()
        assert parent.wait(SECONDS) == (-9 if state == "run" else 0)
    deadline = time.monotonic() + 5
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(gone, pids)) and not list(temporary.iterdir())
