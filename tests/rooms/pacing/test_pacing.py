"""The paced scheduler on a device whose time is a known function of the work: no model, and a clock that we turn.

A step takes ``Device.seconds(work)``; the device runs steps one after the other, as a GPU does with one step under way
while the next is decided, or as a CPU does. So what is tested is exact but for the noise that a test asks for.
"""

import importlib.util
import json
import logging
import random
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError
from nanovllm.llm import LLM
from nanovllm.pacing import SELDOM, PacedScheduler
from nanovllm.pacing.cost import Cost, Work
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler


def shadow():
    """The workloads of the unit tests."""
    path = Path(__file__).parents[2] / "unit" / "test_scheduler.py"
    spec = importlib.util.spec_from_file_location("paced_workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GPU = {"step": 3e-3, "decode": 1e-5, "context": 4e-9, "mixed": 3e-3, "prompt": 2.5e-6, "pair": 2e-10}
"""Seconds; about what a model of 0.6 billion parameters costs on a large device."""

CPU = {"step": 2e-2, "decode": 1e-3, "context": 1e-7, "mixed": 0.0, "prompt": 5e-4, "pair": 1e-8}


class Device:
    """A runner with a clock of its own."""

    def __init__(self, costs, *, lookahead=0, noise=0.0, host=2e-4, seed=0):
        self.costs, self.lookahead, self.noise, self.host = costs, lookahead, noise, host
        self.now = 100.0
        self.free = 0.0
        """When the device will have done all that it has got."""
        self.factor = 1.0
        self.pauses = 0.0
        """How often a step takes a hundred times as long."""
        self.dice = random.Random(seed)
        self.outputs = []
        self.fail = False

    def seconds(self, work):
        names = ("step", "decode", "context", "mixed", "prompt", "pair")
        exact = sum(self.costs[name] * term for name, term in zip(names, work.terms(), strict=False))
        pause = 100 if self.dice.random() < self.pauses else 1
        return exact * self.factor * pause * self.dice.lognormvariate(0, self.noise)

    def submit(self, output):
        if self.fail:
            self.fail = False
            raise ValueError("the device says no")
        self.now += self.host + self.costs.get("launch", 0.0) * bool(Work.of(output.spans).prompt)
        self.outputs.append(output)
        self.free = done = max(self.free, self.now) + self.seconds(Work.of(output.spans))

        def fetch():
            self.now = max(self.now, done)
            return [Sampled(3) if span.samples else None for span in output.spans]

        return fetch


class Load:
    """An engine over a device, and the times at which tokens came."""

    def __init__(self, device, target_ms=None, *, seqs=64, budget=8192, blocks=40_000, **options):
        self.device = device
        manager = BlockManager(blocks, 16, enable_prefix_caching=False)
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": budget} | options
        if target_ms is None:
            self.scheduler = Scheduler(manager, **limits)
        else:
            self.scheduler = PacedScheduler(manager, target_itl_ms=target_ms, clock=lambda: device.now, **limits)
        self.engine = LLMEngine(self.scheduler, device, Limits(max_model_len=200_000, vocab_size=10))
        self.last = {}
        self.gaps = []
        """(when, seconds) between two tokens of one request."""
        self.first = {}

    def add(self, prompt, output):
        return self.engine.add_request(None, [1] * prompt, SamplingParams(max_tokens=output), stream=True)

    def step(self):
        for output in self.engine.step():
            name = output.request_id
            if name in self.last:
                self.gaps.append((self.device.now, self.device.now - self.last[name]))
            self.first.setdefault(name, self.device.now)
            self.last[name] = self.device.now

    def run(self, steps, *, every=None, prompt=4096, output=20):
        """Take steps; a prompt arrives before each step whose number ``every`` divides."""
        for step in range(steps):
            if every and step % every == 0:
                self.add(prompt, output)
            if self.engine.has_unfinished_requests:
                self.step()

    def finish(self, most=100_000):
        for _ in range(most):
            if not self.engine.has_unfinished_requests:
                assert not self.scheduler.blocks.num_held
                return
            self.step()
        raise AssertionError("the work does not end")

    def percentile(self, part, since=0.0):
        """Milliseconds between tokens, in the last part of the gaps."""
        gaps = sorted(gap for when, gap in self.gaps if when >= since)
        return 1e3 * gaps[int(part * len(gaps))]


SETTINGS = [
    pytest.param(GPU, 1, 13.0, 8192, 8, id="gpu"),
    pytest.param(CPU, 0, 90.0, 512, 80, id="cpu"),
]


def busy(costs, lookahead, budget, every, target=None, *, noise=0.05, **options):
    """16 requests decode, and prompts of 4,096 tokens come faster than a small share of the device computes them."""
    load = Load(Device(costs, lookahead=lookahead, noise=noise), target, budget=budget, **options)
    for _ in range(16):
        load.add(100, 5000)
    load.run(100)
    load.run(1500, every=every, output=20)
    return load


@pytest.mark.parametrize(("costs", "lookahead", "target", "budget", "every"), SETTINGS)
def test_the_target_is_held_under_a_load_that_breaks_it_otherwise(costs, lookahead, target, budget, every):
    free = busy(costs, lookahead, budget, every)
    assert free.percentile(0.95) > 1.3 * target, "without a target this load is no trouble"
    paced = busy(costs, lookahead, budget, every, target)
    assert paced.percentile(0.95) <= target
    assert paced.percentile(0.999) <= 1.35 * target
    # nor is it held by doing nothing: prompts get what the target leaves
    chunks = [work for output in paced.device.outputs[200:] if (work := Work.of(output.spans)).prompt]
    used = [paced.device.seconds(work) for work in chunks]
    assert 1e3 * statistics.median(used) > 0.75 * target


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("late", [{"mixed": 12e-3}, {"mixed": 1e-3, "launch": 12e-3}], ids=["device", "host"])
def test_where_every_step_with_a_prompt_is_over_the_target_there_are_few_and_large_ones(late, lookahead):
    """Steps of decodes are replayed in 2 ms, and 12 go into one with a prompt, however short: there, or to launch it.

    While it is launched the step before waits to be settled, and is late in its place.
    """
    costs = GPU | {"step": 2e-3} | late
    paced, free = (busy(costs, lookahead, 16_384, 60, target) for target in (6.3, None))
    assert paced.percentile(0.95) <= 6.3
    works = [Work.of(output.spans) for output in paced.device.outputs[200:]]
    places = [place for place, work in enumerate(works) if work.prompt]
    apart = [after - before for before, after in pairwise(places)]
    assert min(apart) > SELDOM and statistics.median(apart) <= 2 * SELDOM
    assert max(work.prompt for work in works) > 4000
    done = [sum(Work.of(output.spans).prompt for output in load.device.outputs) for load in (paced, free)]
    assert done[0] > 0.9 * done[1]
    assert paced.scheduler.margin > 0.95, "steps without a prompt are within any target, and say nothing of the margin"
    paced.finish()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_without_a_competitor_a_prompt_is_not_cut(lookahead):
    """Nobody waits for a token while nothing decodes."""
    load = Load(Device(GPU, lookahead=lookahead), 4.0)
    load.add(8192 * 3, 2)
    load.finish()
    assert [output.num_tokens for output in load.device.outputs[:3]] == [8192] * 3


def test_as_many_run_as_the_target_allows_and_no_more():
    """200 requests wait; a step of decodes may take three quarters of 40 ms: 10 ms, and 1 ms for each."""
    costs = dict.fromkeys(CPU, 0.0) | {"step": 1e-2, "decode": 1e-3, "prompt": 1e-5}
    load = Load(Device(costs, noise=0.02), 40.0, seqs=100, budget=2048)
    for _ in range(200):
        load.add(20, 100)
    load.run(150)
    running = []
    for _ in range(150):
        load.run(1)
        running.append(len(load.scheduler.running))
    assert 17 <= statistics.mean(running) <= 21
    load.finish()
    assert load.percentile(0.95) <= 40.0
    free = Load(Device(costs, noise=0.02), seqs=100, budget=2048)
    for _ in range(200):
        free.add(20, 100)
    free.finish()
    assert free.percentile(0.95) > 100.0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_after_the_machine_has_changed_the_target_is_held_again(lookahead, factor):
    def tokens(load):
        """Of prompts, in a step that has some."""
        return statistics.mean(w.prompt for o in load.device.outputs[-100:] if (w := Work.of(o.spans)).prompt)

    costs = GPU | {"mixed": 0.0}
    load = Load(Device(costs, lookahead=lookahead, noise=0.05), 14.0)
    for _ in range(16):
        load.add(100, 5000)
    load.run(200, every=1)
    before = tokens(load)
    load.device.factor = factor
    load.run(20, every=1)
    now = load.device.now
    load.run(200, every=1)
    assert load.percentile(0.95, since=now) <= 14.0
    after = tokens(load)
    assert after < 0.5 * before if factor > 1 else after > 1.3 * before


def test_a_pause_does_not_hold_up_what_follows():
    """One step in fifty takes a hundred times as long: pauses are no reason to compute less."""
    calm, paused = (Load(Device(GPU, lookahead=1, noise=0.05), 15.0) for _ in range(2))
    for load in (calm, paused):
        for _ in range(16):
            load.add(100, 5000)
        load.run(200, every=3)
        load.device.pauses = 0.02 if load is paused else 0.0
        load.run(1000, every=3)
    done = [sum(Work.of(output.spans).prompt for output in load.device.outputs[200:]) for load in (calm, paused)]
    assert done[1] > 0.6 * done[0]
    assert paused.percentile(0.95) <= 15.0


def test_first_steps_that_take_seconds_are_forgotten():
    """A graph is recorded, a kernel compiled: the first steps of each kind are no measure."""
    load = Load(Device(GPU, lookahead=1), 15.0)
    load.device.factor = 1000.0
    for _ in range(16):
        load.add(100, 5000)
    load.run(4, every=1)
    load.device.factor = 1.0
    load.run(60, every=1)
    sizes = [Work.of(output.spans).prompt for output in load.device.outputs[-20:]]
    assert statistics.median(sizes) > 1000


@pytest.mark.parametrize("target", [0.001, 1.0])
def test_a_target_out_of_reach_stops_nobody_and_is_said_once(target, caplog):
    load = Load(Device(GPU, noise=0.05), target, budget=640, seqs=128)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            load.add(200, 80)
        load.run(20)
        load.add(6_400, 3)
        load.finish(3000)
    assert len(load.first) == 7
    warnings = [record.message for record in caplog.records if "cannot be held" in record.message]
    assert len(warnings) == 1 and f"target_itl_ms={target:g}" in warnings[0] and "raise the target" in warnings[0]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_goes_on_in_every_step_however_slow_they_are(lookahead):
    load = Load(Device(CPU, lookahead=lookahead), 0.5, budget=64, seqs=1000, blocks=4000)
    steady = load.add(4, 5000)
    load.run(5)
    long = load.add(300, 2)
    load.run(2)  # admitted
    while long.num_output_tokens == 0:
        before = long.num_computed_tokens, steady.num_tokens
        load.run(1)
        assert long.num_computed_tokens > before[0] and steady.num_tokens > before[1]
    load.finish()


def test_whoever_is_too_dear_for_company_runs_alone():
    """A context of 20,000 tokens costs 20 ms of 24: more than a step of decodes should, and yet it must go on."""
    costs = dict.fromkeys(GPU, 0.0) | {"step": 1e-3, "context": 1e-6, "prompt": 1e-6}
    load = Load(Device(costs), 24.0)
    for prompt in (10, 20_000, 10, 20_000, 20_000):
        load.add(prompt, 30)
        load.finish(500)
    assert len(load.first) == 5 and load.scheduler.cost.of(Work(1, 20_000)) > 0.75 * 24e-3


def test_one_runs_at_least():
    load = Load(Device(CPU), 1e-3, seqs=2, budget=4)
    for _ in range(5):
        load.add(9, 5)
    load.finish(1000)
    assert len(load.first) == 5


WORK = shadow()


@pytest.mark.parametrize("seed", range(0, 120))
def test_every_request_gets_the_tokens_it_would_get_alone(seed):
    """The shadow workloads, with a clock that jumps: whatever steps take, limits change and outputs do not."""
    dice = random.Random(seed)
    now = [0.0]

    def clock():
        now[0] += dice.choice([1e-6, 1e-3, 5e-3, 0.2]) * dice.random()
        return now[0]

    def paced(*parts, **options):
        return PacedScheduler(*parts, target_itl_ms=dice.choice([0.01, 1.0, 5.0, 50.0]), clock=clock, **options)

    WORK.check(seed, scheduler=paced)


def test_what_is_learned_is_what_a_step_costs():
    dice, device = random.Random(1), Device(GPU, noise=0.05)
    cost = Cost(0.015)

    def some():
        decodes, prompt = dice.randint(1, 64), dice.choice([0, dice.randint(1, 4000)])
        start = dice.randint(0, 30_000)
        return Work(decodes, decodes * dice.randint(100, 2000), prompt, prompt * (start + prompt / 2))

    for _ in range(300):
        work = some()
        cost.learn(work, device.seconds(work))
    device.noise = 0.0
    errors = [abs(cost.of(work) / device.seconds(work) - 1) for work in (some() for _ in range(100))]
    assert statistics.mean(errors) < 0.05 and max(errors) < 0.2


def test_the_most_of_a_prompt_is_what_costs_the_time_that_is_left():
    device, cost = Device(GPU), Cost(0.015)
    for decodes, prompt, start in [(d, p, s) for d in (1, 20) for p in (0, 100, 2000) for s in (0, 9000)] * 9:
        work = Work(decodes, decodes * 500, prompt, prompt * (start + prompt / 2))
        cost.learn(work, device.seconds(work))
    decoding = Work(16, 8000)
    for start in (0, 5000, 30_000):
        fits = cost.most_prompt(decoding, start, 0.012)
        whole = Work(16, 8000, int(fits), int(fits) * (start + int(fits) / 2))
        assert cost.of(whole) == pytest.approx(0.012, rel=0.01)
    assert cost.most_prompt(decoding, 30_000, 0.012) < cost.most_prompt(decoding, 0, 0.012)
    assert cost.most_prompt(decoding, 0, 0.003) == 0.0
    assert Cost(0.015).most_prompt(decoding, 0, 0.01) == float("inf"), "nothing is known yet"


def test_terms_that_no_step_has_for_a_while_stay_as_they_were():
    device, cost = Device(GPU), Cost(0.015)
    mixed = Work(16, 8000, 1500, 1500 * 750)
    for number in range(40):
        work = mixed if number % 2 else Work(16, 8000)
        cost.learn(work, device.seconds(work))
    for number in range(3000):
        work = Work(16, 8000 + 16 * number)
        cost.learn(work, device.seconds(work))
    assert cost.of(mixed) == pytest.approx(device.seconds(mixed), rel=0.2)


def test_time_spent_elsewhere_is_not_a_steps():
    """A caller who does something else between two calls of ``step`` does not make steps slow."""
    load = Load(Device(CPU), 90.0, budget=512)
    load.add(10, 1000)
    for _ in range(50):
        load.run(1)
        load.device.now += 5.0
    assert load.scheduler.cost.of(Work(1, 50)) == pytest.approx(0.021, rel=0.1)


def test_a_step_that_fails_is_not_measured():
    load = Load(Device(CPU), 90.0, budget=512)
    load.add(10, 100)
    load.run(30)
    load.device.fail = True
    load.device.now += 50.0
    with pytest.raises(EngineError):
        load.step()
    load.add(10, 100)
    load.finish()
    assert load.scheduler.cost.of(Work(1, 50)) == pytest.approx(0.021, rel=0.1)
    assert not load.scheduler._under_way


TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 256,
}  # fmt: skip


def test_with_a_model_the_tokens_are_the_same_and_without_a_target_it_is_the_plain_scheduler(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu"}
    prompts = [[number % 61 for number in range(start, start + 30)] for start in range(3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = {}
    for target in (None, 0.01, 5):
        with LLM(str(tmp_path), target_itl_ms=target, max_num_batched_tokens=64, **options) as llm:
            assert type(llm.llm_engine.scheduler) is (Scheduler if target is None else PacedScheduler)
            found[target] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            if target:
                assert llm.llm_engine.scheduler.target == target / 1e3 and llm.llm_engine.scheduler.cost.of(Work(1)) > 0
    assert found[None] == found[0.01] == found[5]
