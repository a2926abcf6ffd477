"""Whatever happens to a replica: every request gets one kind of error, nothing is left, and a new engine starts."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import AsyncLLM, CheckpointError, EngineError, RequestOutputKind, SamplingParams
from nanovllm.parallel import guard

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MANY = [[token, 1] for token in range(40)]
SECONDS = 10.0
ROOT = Path(__file__).parents[3]


def pids(llm):
    """Return the processes of the replicas, and of their ranks."""
    found = [worker.process.pid for worker in llm.llm_engine._fleet._workers]
    return found, [
        int(child)
        for pid in found
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


def all_gone(processes):
    """Wait a moment for processes to end, with nobody who has to wait for them."""
    deadline = time.monotonic() + 5
    while (left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def lose(llm, act, reason):
    """Run ``act`` during a generation; check what the caller gets, and that the engine refuses more."""
    timer = threading.Timer(0.3, act)
    timer.start()
    started = time.monotonic()
    with pytest.raises(EngineError, match=reason) as error:
        for _ in range(100):
            llm.generate([[1, 2, 3], *MANY], [SHORT, *[LONG] * len(MANY)], use_tqdm=False)
    assert time.monotonic() - started < SECONDS
    timer.join()
    outputs = error.value.outputs
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], *MANY] and all(map(finished, outputs))
    with pytest.raises(EngineError, match="the engine is lost: .*Make a new one"):
        llm.generate([[1]], SHORT, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def finished(output):
    return output.finished


def test_a_replica_that_is_frozen(open_replicas, traces, monkeypatch):
    """What was done is kept. Before that, smaller priorities go first: replicas compute one request at a time."""
    options = dict(scheduling_policy="priority", max_num_seqs=1, enable_prefix_caching=False)
    llm = open_replicas("llama", 2, **options)
    engine, replicas, places = llm.llm_engine, pids(llm)[0], []
    place = engine.desk.balancer.place
    monkeypatch.setattr(engine.desk.balancer, "place", lambda *of: places.append(place(*of)) or places[-1])
    some = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for pid in replicas:  # until they have got all of it
        os.kill(pid, signal.SIGSTOP)
    for number in range(16):
        engine.add_request(str(number), MANY[number], some, priority=3 if number < 8 else 1)
    for pid in replicas:
        os.kill(pid, signal.SIGCONT)
    firsts = {}
    while engine.has_unfinished_requests:
        firsts |= {int(output.request_id): output.metrics.first_token_ts for output in engine.step()}
    for replica in (0, 1):
        own = [firsts[number] for number in range(16) if places[number] == replica]
        # each may have begun with the first that came
        assert len(own) == 8 and sorted(own[:4])[1] > max(own[4:])
    monkeypatch.setattr(guard, "PATIENCE", 1.0)
    frozen = replicas[0]
    samples = lose(llm, lambda: os.kill(frozen, signal.SIGSTOP), "replica 0 has not answered for 1 s")
    assert {sample.finish_reason for sample in samples} == {"length", "error"}
    assert all(len(sample.token_ids) == (200 if sample.finish_reason == "length" else 0) for sample in samples[1:])
    assert llm.llm_engine.desk.balancer.queued == [0, 0]
    traces()  # before it is closed
    llm.close()


def test_replicas_with_ranks_and_the_loss_of_one_rank(open_llm, open_replicas, traces):
    with open_llm("llama", 1) as one:
        expected = [output.token_ids for output in one.generate(MANY, SHORT, use_tqdm=False)]
    llm = open_replicas("llama", 2, tensor_parallel_size=2)
    assert [output.token_ids for output in llm.generate(MANY, SHORT, use_tqdm=False)] == expected
    assert all(work.requests for work in llm.llm_engine.work)
    drawn = [each for each in llm.get_metrics() if each.name == "nanovllm:generation_tokens"]
    assert [each.value for each in drawn] == [4 * len(MANY)], "ranks of a replica count once"
    replicas, ranks = pids(llm)
    assert len(replicas) == len(ranks) == 2
    samples = lose(llm, lambda: os.kill(ranks[1], signal.SIGKILL), r"replica 1 failed with .*rank 1 died \(status -9\)")
    assert {sample.finish_reason for sample in samples} <= {"length", "error"}
    assert all_gone([*replicas, *ranks])
    traces()
    llm.close()


def test_many_callers_at_once_and_a_replica_that_is_killed(open_llm, open_replicas, traces):
    last = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    with open_llm("llama", 1) as one:
        expected = [output.token_ids for output in one.generate(MANY, last, use_tqdm=False)]
    llm = open_replicas("llama", 2)
    _, killed = pids(llm)[0]

    async def run():
        async with AsyncLLM(llm) as engine:

            async def ask(prompt, params, name=None):
                prompt = {"prompt_token_ids": prompt}
                return [output async for output in engine.generate(prompt, params, name)][-1]

            outputs = await asyncio.gather(*(ask(prompt, last) for prompt in MANY))
            assert [output.token_ids for output in outputs] == expected
            endless = engine.generate({"prompt_token_ids": [1]}, LONG, "endless")
            pieces = [await anext(endless)]
            engine.abort("endless")
            pieces += [output async for output in endless]
            assert pieces[-1].outputs[0].finish_reason == "abort" and 0 < len(pieces[-1].token_ids) < 200
            asks = [asyncio.ensure_future(ask(prompt, LONG)) for prompt in MANY]
            await asyncio.sleep(0.05)
            os.kill(killed, signal.SIGKILL)
            found = await asyncio.gather(*asks, return_exceptions=True)
            assert all(isinstance(each, EngineError) or each.finished for each in found)
            assert any(f"replica 1 died (status {-signal.SIGKILL})" in str(each) for each in found)
            with pytest.raises(EngineError, match="the engine is lost"):
                for _ in range(2):
                    await ask([1], SHORT)

    asyncio.run(asyncio.wait_for(run(), SECONDS))
    traces()


def test_a_step_that_fails_ends_its_requests_alone_and_what_is_dropped_is_closed(open_replicas, traces, plant):
    """A step with a prompt of seven tokens fails. The requests of the other replica, and new ones, go on."""
    fault = "if any(len(span.request.prompt_token_ids) == 7 for span in args[1].spans): raise ValueError('planted')"
    plant("nanovllm.model_runner.ModelRunner", "submit", 0, fault)
    llm = open_replicas("llama", 2)
    engine = llm.llm_engine
    for name, prompt in (("fails", [1] * 7), ("goes on", [2] * 9)):
        engine.add_request(name, prompt, LONG)
    assert [work.requests for work in engine.work] == [1, 1]
    outputs = []
    with pytest.raises(EngineError, match="a step of 7 tokens failed with ValueError: planted") as error:
        while engine.has_unfinished_requests:
            outputs += engine.step()
    (output,) = error.value.outputs
    assert (output.request_id, output.finished, output.outputs[0].finish_reason) == ("fails", True, "error")
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [("goes on", 200)]
    assert engine.desk.balancer.queued == [0, 0]
    assert all(len(output.token_ids) == 4 for output in llm.generate(MANY, SHORT, use_tqdm=False))
    processes, _ = pids(llm)
    del llm, engine, error  # nobody closes it
    assert all_gone(processes)
    traces()


def test_a_call_is_not_told_of_steps_that_failed_in_the_call_before(open_replicas, traces, plant):
    """Both replicas fail: the caller hears of one, and what the other one failed with goes with the requests."""
    fault = "if any(len(span.request.prompt_token_ids) == 7 for span in args[1].spans): raise ValueError('planted')"
    plant("nanovllm.model_runner.ModelRunner", "submit", 0, fault)
    llm = open_replicas("llama", 2)
    for _ in range(5):
        with pytest.raises(EngineError, match="planted"):
            llm.generate([[token] * 7 for token in range(8)], LONG, use_tqdm=False)
        assert all(len(output.token_ids) == 4 for output in llm.generate(MANY, SHORT, use_tqdm=False))
        assert not llm.llm_engine.has_unfinished_requests
    llm.close()
    traces()


def test_what_came_before_a_failure_is_given_out_before_it(open_replicas, traces, plant):
    """Of three samples in turn the second fails; an abort of another request takes all messages at once."""
    fault = "if any(span.request.index == 1 and span.start > 5 for span in args[1].spans): raise ValueError('planted')"
    plant("nanovllm.model_runner.ModelRunner", "submit", 0, fault)
    llm = open_replicas("llama", 2, max_num_seqs=1)
    engine = llm.llm_engine
    three = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    engine.add_request("three", [1, 2, 3], three, stream=True)
    for name in ("other", "same"):
        engine.add_request(name, [4], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert [engine._sent[key].replica for key in (0, 1, 2)] == [0, 1, 0]
    time.sleep(0.5)  # replica 0 has sent all of it, or most
    engine.abort("same")
    tokens, ends, failures = {0: [], 1: [], 2: []}, {}, 0
    while "three" in engine._requests:
        try:
            outputs = engine.step()
        except EngineError as error:
            outputs, failures = error.outputs, failures + 1
        for sample in (sample for output in outputs if output.request_id == "three" for sample in output.outputs):
            assert sample.index not in ends, "output after the end"
            tokens[sample.index] += sample.token_ids
            if sample.finish_reason is not None:
                ends[sample.index] = sample.finish_reason
    assert failures == 1 and ends == {0: "length", 1: "error", 2: "length"}
    assert list(map(len, tokens.values())) == [8, 4, 8]
    engine.abort("other")
    llm.close()
    traces()


def test_an_exception_while_a_replica_loads(open_replicas, traces, plant):
    plant("nanovllm.loader", "_prepare", 3, "raise MemoryError('planted')")
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"the engine is lost: replica [01] failed with MemoryError: planted"):
        open_replicas("llama", 2)
    assert time.monotonic() - started < SECONDS
    traces()


def test_a_checkpoint_is_refused_with_the_error_that_one_engine_raises(folders, tmp_path, traces):
    from nanovllm import LLM

    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    tensors = load_file(folder / "model.safetensors")
    missing = sorted(tensors)[3]
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=missing):
        LLM(folder, data_parallel_size=2, dtype="float32", num_gpu_blocks_override=8, use_tqdm_on_load=False)
    traces()


PARENT = """
import sys, tempfile
from nanovllm import LLM, SamplingParams
tempfile.tempdir = sys.argv[2]
llm = LLM(sys.argv[1], data_parallel_size=2, dtype="float32", num_gpu_blocks_override=64, use_tqdm_on_load=False)
print(*(worker.process.pid for worker in llm.llm_engine._fleet._workers), flush=True)
llm.generate([[1, 2]] * 8, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
sys.stdin.read()
"""


def test_a_parent_that_is_killed(folders, tmp_path, monkeypatch, plant):
    """No ``if __name__ == "__main__"``: replicas do not run the user's main module. They are in mid-step."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plant("nanovllm.model_runner.ModelRunner", "submit", 5, "__import__('time').sleep(60)")
    script = tmp_path / "main.py"
    script.write_text(PARENT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, str(script), str(folders["llama"]), str(temporary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        processes = list(map(int, parent.stdout.readline().split()))
        assert len(processes) == 2
        time.sleep(0.3)
        assert all(Path(f"/proc/{pid}").exists() for pid in processes)
        parent.kill()
        assert parent.wait(SECONDS) == -9
    assert all_gone(processes) and not list(temporary.iterdir())
