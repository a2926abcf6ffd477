"""Recorded decode steps without a GPU: what is replayed runs here, as late as a device may be, on the same messages.

A stand-in for CUDA graphs keeps the step that was to be recorded, and ``replay`` puts it into a queue. Nothing of the
queue runs before somebody waits for it: so a message that is overwritten while a step may still read it shows, and so
do tokens that are overwritten before the host has read them. Attention is the reference, by the lists of a message.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nanovllm import SamplingParams, cuda_graphs, model_runner
from nanovllm.errors import EngineError
from nanovllm.layers import attention
from nanovllm.ops.attention import paged, reference, sdpa
from nanovllm.ops.rotate_and_store import rotate_and_store
from nanovllm.ops.take_tokens import take_tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same with graphs")
FACTS = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=1 << 20)
PROMPTS = ([5, 6, 7], [9], list(range(40, 75)), [11, 12], [13])
KINDS = (
    dict(temperature=0.0), dict(temperature=0.9, seed=3), dict(temperature=0.8, top_k=5, seed=4),
    dict(temperature=1.0, top_p=0.8, seed=5), dict(temperature=0.0),
)  # fmt: skip


class Device:
    """A queue of steps that were replayed."""

    def __init__(self):
        self.queue, self.done, self.busy, self.fault = [], 0, False, None

    @property
    def replays(self):
        return self.done + len(self.queue)

    def run(self, until=None):
        """Run the first ``until`` of all replays, or all."""
        while self.queue and not self.busy and (until is None or self.done < until):
            self.busy = True
            self.queue.pop(0)()
            self.busy = False
            self.done += 1

    def graph(self):
        return SimpleNamespace(replay=None)

    def record(self, graph, **_):
        """Stand for ``torch.cuda.graph``: what is within is the local function ``step`` of the caller."""
        step, logits = sys._getframe(1).f_locals["step"], []

        def run():
            made = step()
            if made is not None:
                logits[0].copy_(made)

        def replay():
            fault, self.fault = self.fault, None
            if fault == "before":
                raise RuntimeError("could not be launched")
            self.queue.append(run)
            if fault == "after":
                raise KeyboardInterrupt

        graph.replay = replay
        return Recording(self, logits)


class Recording:
    """Within it the step runs once, and leaves no trace but its logits."""

    def __init__(self, device, logits):
        self.device, self.logits = device, logits

    def __enter__(self):
        self.device.run()
        self.graphs = sys._getframe(1).f_locals["self"]
        self.before = [part.clone() for part in self.parts()]

    def __exit__(self, *_):
        for part, kept in zip(self.parts(), self.before, strict=True):
            part.copy_(kept)
        made = sys._getframe(1).f_locals.get("logits")
        if made is not None:
            self.logits.append(made)

    def parts(self):
        graphs = self.graphs
        return graphs._turn, graphs._message, graphs._outbox, graphs.drawn.tokens, graphs.cache.data


class Event:
    """A place in the queue."""

    def __init__(self, device):
        self.device = device

    def record(self):
        self.place = self.device.replays

    def synchronize(self):
        self.device.run(self.place)


def attend(query, keys, values, plan, scale, window=None, *, softcap=None):
    """Attend to what the lists of a recorded step say, or as the CPU does."""
    if isinstance(plan, sdpa.Plan):
        return sdpa.attend(query, keys, values, plan, scale, window, softcap=softcap)
    out = torch.full_like(query, torch.nan)
    for row, context, table, *_ in plan.decodes.tolist():
        if context:
            blocks = plan.tables[table : table + -(-context // keys.shape[1])][None]
            facts = torch.tensor([0, 1]), torch.tensor([context]), blocks, scale, window
            out[row : row + 1] = reference.attend(query[row : row + 1], keys, values, *facts, softcap=softcap)
    return out


BACKEND = SimpleNamespace(**{**vars(paged), "plan": sdpa.plan, "attend": attend, "attends_fresh": lambda _: False})


def store_some(qkv, norms, cos, sin, keys, values, slots, *scales):
    """Leave out what has no slot, as the kernels do."""
    parts = [(cache, cache[-1].clone()) for cache in (keys, values)] if (slots < 0).any() else []
    query = rotate_and_store(qkv, norms, cos, sin, keys, values, slots.where(slots >= 0, len(keys) - 1), *scales)
    for cache, last in parts:
        cache[-1] = last
    return query


class Turn(torch.Tensor):
    """Memory of the device: the host waits before it reads it."""

    device_queue: Device

    def __int__(self):
        self.device_queue.run()
        return super().__int__()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    zeros, build = torch.zeros, model_runner.build_batch
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options))
    monkeypatch.setattr(attention, "rotate_and_store", store_some)
    for name, stand_in in (
        ("get_device_properties", lambda _: FACTS), ("current_stream", lambda _: None), ("CUDAGraph", made.graph),
        ("graph_pool_handle", lambda: None), ("graph", made.record), ("Event", lambda: Event(made)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graphs, "_let_go", lambda *_: None)

    def build_late(output, block_size, backend, drawn, **options):
        made.run()
        batch = build(output, block_size, backend, drawn, **options)
        return replace(batch, token_ids=take_tokens(batch.token_ids, drawn.tokens))  # as on a GPU

    monkeypatch.setattr(model_runner, "build_batch", build_late)
    sample = cuda_graphs.sample
    monkeypatch.setattr(cuda_graphs, "sample", lambda *given, **more: made.run() or sample(*given, **more))
    return made


@pytest.fixture
def opened(open_llm, device):
    """An engine whose decodes are recorded, and whose steps overlap."""
    llm = open_llm(max_num_seqs=8)
    runner = llm.llm_engine._runner
    runner.backend, runner.lookahead = BACKEND, 1
    runner._graphs = cuda_graphs.DecodeGraphs(
        runner.model, runner.cache, BACKEND, max_requests=8, max_model_len=256, ahead=False
    )
    runner._graphs._turn = runner._graphs._turn.as_subclass(Turn)
    runner._graphs._turn.device_queue = device
    runner._drawn = drawn = runner._graphs.drawn
    keep = drawn.keep

    def keep_late(spans, tokens):  # a graph's tokens are the host's, which has no other device here
        from_graph = tokens.untyped_storage().data_ptr() == runner._graphs._outbox.data_ptr()
        keep(spans, tokens.to("meta") if from_graph else tokens)

    drawn.keep = keep_late
    return llm


def given(**more):
    return [
        SamplingParams(max_tokens=7 - place % 3, ignore_eos=True, **kind, **more) for place, kind in enumerate(KINDS)
    ]


def answers(llm, params, at=(), fault=None, device=None):
    """Return each prompt's tokens; before some steps a fault is set, and what it raises is let go."""
    engine = llm.llm_engine
    names = [engine.add_request(None, prompt, param).request_id for prompt, param in zip(PROMPTS, params, strict=True)]
    found, number = {}, 0
    while engine.has_unfinished_requests:
        number += 1
        if number in at:
            device.fault = fault
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        except EngineError as error:
            outputs = error.outputs
        found |= {output.request_id: output.outputs[0].token_ids for output in outputs}
    return [found[name] for name in names]


def test_recorded_steps_change_no_token(opened, open_llm, device):
    plain = open_llm(max_num_seqs=8)
    expected = answers(plain, given())
    assert answers(opened, given()) == expected
    assert device.replays > 4
    # of some steps the host wants more than tokens: these end with logits
    params = given()
    params[1].logprobs, params[4].repetition_penalty = 2, 1.7
    assert answers(opened, params) == answers(plain, params)
    assert {key.samples for key in opened.llm_engine._runner._graphs._recorded} == {True, False}
    assert answers(opened, given()) == expected


@pytest.mark.parametrize("at", [(3,), (4, 5)])
def test_ctrl_c_behind_a_replay_loses_no_step(opened, device, at):
    """The device has counted a step that the host has not."""
    expected = answers(opened, given())
    assert answers(opened, given(), at, "after", device) == expected
    assert answers(opened, given()) == expected


def test_a_replay_that_fails_ends_its_requests_alone(opened, device):
    expected = answers(opened, given())
    found = answers(opened, given(), (4,), "before", device)
    assert found != expected and all(one == other[: len(one)] for one, other in zip(found, expected, strict=True))
    assert answers(opened, given()) == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_ctrl_c_in_front_of_the_wait_leaves_no_more_steps_under_way(lookahead, opened, open_llm, monkeypatch):
    """One more would be under way for good; and where none may be, a token is missing when the next one is decided."""
    llm = opened if lookahead else open_llm(max_num_seqs=8)
    expected = answers(llm, given())
    engine, most = llm.llm_engine, []
    settle, times = engine._settle, iter(range(100))

    def interrupted():
        most.append(len(engine._under_way))
        if next(times) in (4, 6, 8, 10):
            raise KeyboardInterrupt
        settle()

    monkeypatch.setattr(engine, "_settle", interrupted)
    assert answers(llm, given()) == expected
    assert max(most) == 1 + lookahead
