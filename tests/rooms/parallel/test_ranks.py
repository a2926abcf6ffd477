"""Engines of several processes give what one process gives."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from nanovllm import ConfigError, RequestError, SamplingParams
from nanovllm.build import matchers
from nanovllm.parallel.messages import Describer, Mirror

PROMPTS = [[1, 2, 3, 4, 5], [7] * 30, [9, 8], list(range(100, 160)), [255, 0]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def told(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def logprobs(outputs):
    return [
        {token: entry.logprob for token, entry in step.items()}
        for output in outputs for sample in output.outputs for step in sample.logprobs
    ]  # fmt: skip


def assert_same(found, expected):
    assert told(found) == told(expected)
    for ours, theirs in zip(logprobs(found), logprobs(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.fixture(scope="module")
def alone(open_llm):
    with open_llm("qwen3", 1) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(open_llm):
    """Few blocks, and steps of few tokens: prompts are cut, and requests preempted."""
    with open_llm("qwen3", 2, num_gpu_blocks_override=11, max_num_batched_tokens=24) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(open_llm):
    with open_llm("llama", 2) as llm:
        yield llm


def test_two_ranks_give_the_tokens_of_one(open_llm, llama):
    with open_llm("llama", 1) as one:
        assert_same(llama.generate(PROMPTS, GREEDY, use_tqdm=False), one.generate(PROMPTS, GREEDY, use_tqdm=False))


def listeners(pid):
    """Return the addresses on which a process listens, as the kernel writes them: hexadecimal, and a port."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(link)}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


def test_nobody_listens_beyond_this_machine(llama):
    """Whoever could reach a rank's port could speak for another rank."""
    llama.generate([[1]], GREEDY, use_tqdm=False)
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("0.0.0.0", 0)) as open_to_all:
        found = listeners(os.getpid())
        assert f"0100007F:{own.getsockname()[1]:04X}" in found, "a listener on loopback is found"
        everywhere = f"00000000:{open_to_all.getsockname()[1]:04X}"
        assert everywhere in found, "and so is one that is open to all"
    group = llama.llm_engine._runner._group
    processes = [os.getpid(), *(worker.process.pid for worker in group._workers)]
    found = set().union(*map(listeners, processes))
    assert found, "gloo's ranks listen for each other"
    local = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    assert {address for address in found if not address.startswith(local)} == set()


def test_rank_0_counts_for_both(llama):
    names = ("nanovllm:generation_tokens", "nanovllm:num_steps")

    def counted():
        return {each.name: each.value for each in llama.get_metrics() if each.name in names}

    before = counted()
    llama.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    grown = {name: value - before[name] for name, value in counted().items()}
    assert grown == {"nanovllm:generation_tokens": 10, "nanovllm:num_steps": 5}


@pytest.mark.parametrize(("name", "size"), [("qwen2", 2), ("llama", 4)])
def test_key_value_heads_on_several_ranks(open_llm, name, size):
    with open_llm(name, 1) as one:
        expected = one.generate(PROMPTS, GREEDY, use_tqdm=False)
    with open_llm(name, size) as llm:
        assert_same(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
        assert len(llm.llm_engine._runner._group._workers) == size - 1


def test_tied_heads_an_odd_vocabulary_cut_prompts_and_preemptions(alone, pair):
    assert_same(pair.generate(PROMPTS, GREEDY, use_tqdm=False), alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    many, long = [[token, 2] for token in range(8)], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert told(pair.generate(many, long, use_tqdm=False)) == told(alone.generate(many, long, use_tqdm=False))
    assert pair.llm_engine.scheduler.num_preemptions > 0


def test_prompts_are_scored_by_all_ranks_together(alone, pair):
    """The head is gathered for the same rows everywhere, in cut prompts too; rank 0 alone knows what has been told."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    for found, expected in zip(
        pair.generate(PROMPTS, params, use_tqdm=False), alone.generate(PROMPTS, params, use_tqdm=False), strict=True
    ):
        assert found.token_ids == expected.token_ids
        assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(found.prompt_token_ids)
        for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            numbers = [{token: entry.logprob for token, entry in step.items()} for step in (ours, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
    pairs = [(llm.score([[1, 2, 3], [7] * 30], [[[4], [5, 6]], [[8, 9]]])) for llm in (pair, alone)]
    for ours, theirs in zip(*pairs, strict=True):
        assert [score.logprob for score in ours] == pytest.approx([score.logprob for score in theirs], abs=1e-4)


DRAWS = [
    dict(temperature=1.0, seed=5),
    dict(temperature=0.8, top_p=0.8, top_k=9, min_p=0.01),
    dict(temperature=1.0, seed=1, n=2, repetition_penalty=1.5, frequency_penalty=0.3),
    dict(temperature=0.9, logit_bias={3: 4.0, 5: -100.0}, bad_words=["a", "bc"], min_tokens=6, seed=2),
    dict(temperature=1.0, allowed_token_ids=[4, 6, 250, 258], logprob_token_ids=[4], seed=3),
    dict(temperature=0.7, structured_outputs={"regex": "[a-f]{3}(,[0-9]{2}){2}"}, seed=9),
]
each_draw = pytest.mark.parametrize("options", DRAWS, ids=lambda options: ",".join(options))


@each_draw
def test_ranks_draw_what_one_does(alone, pair, options):
    params = SamplingParams(max_tokens=10, **options)
    expected = [llm.generate(PROMPTS[:3], params, use_tqdm=False) for llm in (alone, pair)]
    assert told(expected[0]) == told(expected[1])


class Twice:
    """Computes each step a second time, as a worker reads it."""

    lookahead = 0

    def __init__(self, llm):
        self.plain = llm.llm_engine._runner
        self.describer = Describer()
        self.mirror = Mirror(lambda: matchers(llm.get_tokenizer(), llm.llm_engine.limits.eos_token_ids))
        self.drawn = 0

    def submit(self, output):
        read = self.mirror.read(self.describer.describe(output))
        first, second = (self.plain.submit(each)() for each in (output, read))
        assert [sampled and sampled.token_id for sampled in first] == [
            sampled and sampled.token_id for sampled in second
        ]
        self.drawn += sum(sampled is not None for sampled in first)
        return lambda: first


@each_draw
def test_a_worker_draws_the_tokens_itself(alone, options, monkeypatch):
    twice = Twice(alone)
    monkeypatch.setattr(alone.llm_engine, "_runner", twice)
    alone.generate(PROMPTS[:3], SamplingParams(max_tokens=10, **options), use_tqdm=False)
    assert twice.drawn >= 18


def test_a_stream_that_is_left_leaves_nothing(alone, pair):
    expected = told(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    for _ in range(3):
        stream = pair.stream(PROMPTS, GREEDY)
        next(stream)
        stream.close()
        assert told(pair.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert pair.llm_engine.scheduler.blocks.num_held == 0


def test_a_request_that_is_refused_leaves_the_ranks_as_they_were(alone, pair):
    with pytest.raises(RequestError):
        pair.generate([[1], [10_000]], GREEDY, use_tqdm=False)
    assert told(pair.generate([[1]], GREEDY, use_tqdm=False)) == told(alone.generate([[1]], GREEDY, use_tqdm=False))


def test_weights_cannot_change_below_other_ranks(pair):
    with pytest.raises(ConfigError, match="update_weights needs tensor_parallel_size=1") as error:
        pair.update_weights([])
    assert error.value.parameter == "tensor_parallel_size"


def test_a_size_that_does_not_divide_starts_nothing(open_llm, traces):
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3; .* Sizes for this model: 1, 2, 4"):
        open_llm("llama", 3)
    traces()


def test_compile_and_several_ranks_contradict(open_llm, traces):
    with pytest.raises(ConfigError, match="compile is True; it must be False with tensor_parallel_size=2"):
        open_llm("llama", 2, compile=True)
    traces()


def test_fewer_devices_than_ranks_are_named(monkeypatch):
    import torch

    from nanovllm.parallel.group import _devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="there are 1 with CUDA_VISIBLE_DEVICES='3'") as error:
        _devices(torch.device("cuda"), 2)
    assert error.value.value == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert _devices(torch.device("cuda"), 4) == ["cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="device is 'cuda:1'; with tensor_parallel_size=2 it must be 'cuda'"):
        _devices(torch.device("cuda:1"), 2)


def test_ctrl_c_leaves_the_engine_as_it_was(llama):
    """It is sent to the whole group of processes, as a terminal does; workers are in none of it."""
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = told(llama.generate([[1, 2, 3]], short, use_tqdm=False))
    pids = [os.getpid(), *(worker.process.pid for worker in llama.llm_engine._runner._group._workers)]
    for _ in range(3):
        timer = threading.Timer(0.2, lambda: [os.kill(pid, signal.SIGINT) for pid in pids])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llama.generate([[1, 2, 3], [4]] * 8, long, use_tqdm=False)
            time.sleep(5)
        timer.join()
        assert told(llama.generate([[1, 2, 3]], short, use_tqdm=False)) == expected
    assert llama.llm_engine.scheduler.blocks.num_held == 0
