"""Scheduler, block manager and engine together, without a model.

The shadow runner computes nothing. It keeps in each place of the cache the prefix that a real key would depend on,
and draws the next token as a hash of the whole history. So a block handed out twice, reused too early or not
written, a token lost or computed at a wrong place, shows as a wrong prefix or a wrong token. The random workloads
are small on purpose: pools of a few blocks, so that requests are preempted, cut and served from the cache all the
time (``test_the_workloads_do_what_they_are_for`` counts).
"""

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from zlib import crc32

import pytest

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError, RequestError
from nanovllm.request import Request, Sampled, Status
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerOutput

VOCAB, END = 7, 6
SEEDS = range(300)


def next_token(tokens):
    return crc32(bytes(tokens)) % VOCAB


def roll_out(prompt, *, max_tokens, pool_tokens, ignore_eos):
    """What a request gets when nothing else exists: (output, finish reason)."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        output = tokens[len(prompt) :]
        if tokens[-1] == END and not ignore_eos:
            return output, "stop"
        if len(output) == max_tokens or len(tokens) > pool_tokens:
            return output, "length"


class ShadowMatcher:
    """Remembers what it accepted, and ends nothing."""

    def __init__(self):
        self.accepted = []

    def accept(self, token_id):
        self.accepted.append(token_id)


class Broken(Exception):
    """What a runner raises when it is told to fail."""


class ShadowRunner:
    """Remembers, for each place of the cache, the prefix that a real key would depend on; see above.

    It computes a step when the step is submitted, but gives the tokens out when it is settled, ``lookahead`` steps
    later; until then it alone knows them, as a device does.
    """

    def __init__(self, scheduler, lookahead=0):
        self.scheduler = scheduler
        self.lookahead = lookahead
        self.drawn = defaultdict(list)
        """Tokens of each request that the engine does not know yet."""
        self.slots = {}
        self.outputs: list[SchedulerOutput] = []
        self.lengths = {}
        """Running requests and their tokens, when the last step began."""
        self.meanwhile = []
        """Functions to be called while the next step runs."""
        self.fail_with = None
        """Raise this at the end of the next step."""
        self.interrupt_fetch = False
        """Ctrl-C while the engine waits for the next step that is settled."""

    def submit(self, output):
        self.outputs.append(output)
        drawing = {span.request for span in output.spans if span.samples}
        self.lengths = {
            request: request.num_tokens - (request in drawing)
            for request in self.scheduler.running
            if request in drawing or request.num_uncomputed_tokens
        }
        for span in output.spans:
            self.check(span)
            self.read(span.request, 0, span.start)  # before anything of this step is written
        for span in output.spans:
            for place in range(span.start, span.stop):
                self.slots[self.slot(span.request, place)] = self.prefix(span.request, place)
        for span in output.spans:
            self.read(span.request, 0, span.stop)
        while self.meanwhile:
            self.meanwhile.pop()()
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        tokens = [next_token(self.tokens(s.request)) if s.samples else None for s in output.spans]
        for span, token in zip(output.spans, tokens, strict=True):
            if span.samples:
                self.drawn[span.request].append(token)

        def fetch():
            if self.interrupt_fetch:
                self.interrupt_fetch = False
                raise KeyboardInterrupt
            for span in output.spans:
                if span.samples:
                    self.drawn[span.request].pop(0)
            return [None if token is None else Sampled(token) for token in tokens]

        return fetch

    def tokens(self, request):
        return request.token_ids + self.drawn[request]

    def check(self, span):
        request = span.request
        known = len(self.tokens(request))
        before = {s.request for s in self.outputs[-2].spans if s.samples} if len(self.outputs) > 1 else set()
        if span.stop > len(request.token_ids):
            assert span.stop == span.start + 1 and request in before, "only the last step's tokens are on the device"
        assert request.status is Status.RUNNING, "it has ended, or waits"
        assert request.num_pending_tokens == len(self.drawn[request]) + span.samples
        assert known - len(request.prompt_token_ids) < request.max_tokens, "computed, and nothing can come of it"
        assert 0 <= span.start < span.stop <= known, "nothing to compute, so nothing to draw from"
        assert len(request.block_ids) * self.scheduler.blocks.block_size >= span.stop, "tokens without a block"
        assert span.samples == (span.stop == known)
        if request.matcher is not None and span.samples:
            output = self.tokens(request)[len(request.prompt_token_ids) :]
            assert request.matcher.accepted == output, "drawn before the matcher knows all tokens"

    def read(self, request, start, stop):
        for place in range(start, stop):
            slot = self.slot(request, place)
            assert self.slots.get(slot) == self.prefix(request, place), f"slot {slot} is not this request's"

    def slot(self, request, place):
        size = self.scheduler.blocks.block_size
        return request.block_ids[place // size] * size + place % size

    def prefix(self, request, place):
        return (request.cache_salt, bytes(self.tokens(request)[: place + 1]))


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    name: str
    step: int
    """When it arrives."""
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    priority: int
    salt: str
    stream: bool
    abort: int | None
    """How many steps later it is aborted, if it has not ended by then."""
    abort_inside: bool
    """Abort it while the step runs, not before."""
    structured: bool = False
    """It has a matcher."""


@dataclass(frozen=True)
class Workload:
    """A pool, limits, and who arrives when."""

    num_blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    policy: str
    caching: bool
    interrupts: frozenset[int]
    """Steps that Ctrl-C ends after everything was written."""
    lookahead: int
    """How many steps may be under way when the next one is decided."""
    patience: int
    """Steps of waiting that make up for a level of priority."""
    jobs: tuple[Job, ...]

    @property
    def pool_tokens(self):
        return self.num_blocks * self.block_size


def draw(seed):
    """Draw a workload: prompts share beginnings, and most requests outgrow the pool together, if not alone."""
    dice = random.Random(seed)
    num_blocks, block_size = dice.randint(3, 14), dice.choice([4, 8])
    beginning = [dice.randrange(VOCAB) for _ in range(60)]
    crowded = dice.random() < 0.6  # short prompts, all at once, long outputs: the pool fills while they decode
    jobs = []
    for number in range(dice.choice([1, 2, 3, 4, 5, 6, 6])):
        shared = dice.choice([0, block_size, 2 * block_size, dice.randint(0, 10 if crowded else 40)])
        own = [dice.randrange(VOCAB) for _ in range(dice.choice([0, 1, 3, dice.randint(0, 4 if crowded else 30)]))]
        jobs.append(
            Job(
                name=f"job{number}",
                step=0 if crowded else dice.choice([0, 0, dice.randint(0, 12)]),
                prompt=tuple((beginning[:shared] + own) or [dice.randrange(VOCAB)]),
                max_tokens=dice.randint(20, 60) if crowded else dice.choice([1, 2, 8, dice.randint(1, 60)]),
                ignore_eos=dice.random() < (0.9 if crowded else 0.6),
                priority=dice.randint(0, 2),
                salt=dice.choice(["", "", "", "s"]),
                stream=dice.random() < 0.3,
                abort=dice.randint(0, 25) if dice.random() < 0.2 else None,
                abort_inside=dice.random() < 0.5,
                structured=random.Random(1000 * seed + number).random() < 0.3,
            )
        )
    return Workload(
        num_blocks=num_blocks,
        block_size=block_size,
        budget=dice.choice([4, 7, 16, 64]),
        max_num_seqs=dice.choice([1, 3, 8, 8]),
        policy=dice.choice(["fcfs", "priority"]),
        caching=dice.random() < 0.8,
        interrupts=frozenset(dice.randint(1, 30) for _ in range(dice.choice([0, 0, 2]))),
        lookahead=seed % 2,
        patience=random.Random(seed).choice([1, 1, 3, 1000]),
        jobs=tuple(jobs),
    )


@dataclass
class Record:
    """What came of a workload."""

    outputs: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    trace: list[tuple] = field(default_factory=list)
    """Each decision, in plain values."""
    counts: Counter = field(default_factory=Counter)


class Run:
    """Serves one workload step by step, and checks each step as it goes (B2 - B9 below)."""

    def __init__(self, work, manager=BlockManager, scheduler=Scheduler):
        self.work = work
        self.blocks = manager(work.num_blocks, work.block_size, enable_prefix_caching=work.caching)
        self.scheduler = scheduler(
            self.blocks, max_num_seqs=work.max_num_seqs, max_num_batched_tokens=work.budget, policy=work.policy,
            patience=work.patience,
        )  # fmt: skip
        self.came: dict[Request, int] = {}
        """After how many decisions each request came."""
        self.ever_passed: set[Request] = set()
        self.decisions, schedule = 0, self.scheduler.schedule

        def counted():
            self.decisions += 1
            return schedule()

        self.scheduler.schedule = counted
        self.runner = ShadowRunner(self.scheduler, work.lookahead)
        limits = Limits(max_model_len=1000, vocab_size=VOCAB, eos_token_ids=frozenset({END}))
        self.engine = LLMEngine(self.scheduler, self.runner, limits, make_matcher=lambda params: ShadowMatcher())
        self.requests: dict[str, Request] = {}
        self.streamed: dict[str, list[int]] = {}
        self.record = Record()

    def order(self, request):
        priority = request.priority if self.work.policy == "priority" else 0
        return (priority * self.work.patience + self.came[request], request.arrival)

    def serve(self):
        pending = list(self.work.jobs)
        step = 0
        while pending or self.engine.has_unfinished_requests:
            for job in [job for job in pending if job.step <= step]:
                pending.remove(job)
                self.add(job)
            for job in self.work.jobs:
                if job.abort is not None and job.step + job.abort == step and job.name in self.requests:
                    if job.abort_inside:
                        self.runner.meanwhile.append(lambda job=job: self.abort(job))
                    else:
                        self.abort(job)
            if self.engine.has_unfinished_requests:
                self.step(interrupted=step in self.work.interrupts)
            while self.runner.meanwhile:  # a step without spans does not run
                self.runner.meanwhile.pop()()
            step += 1
            assert step <= self.most_steps(), "the work does not end"
        assert self.blocks.num_free == self.work.num_blocks, "blocks leaked"
        assert not self.scheduler.running and not self.scheduler.waiting
        self.record.counts["evictions"] = self.blocks.num_evictions
        self.record.counts["preemptions"] = self.scheduler.num_preemptions
        return self.record

    def most_steps(self):
        """B3: every step computes a token or ends a request, and a token is computed once between preemptions."""
        work = sum(
            request.num_tokens * (request.num_preemptions + (1 if request.matcher is None else 2))
            for request in self.requests.values()
        )
        return 15 + work + 2 * len(self.work.jobs) + len(self.work.interrupts)

    def add(self, job):
        params = SamplingParams(
            max_tokens=job.max_tokens, ignore_eos=job.ignore_eos, structured_outputs={} if job.structured else None
        )
        fits = len(job.prompt) <= self.work.pool_tokens
        try:
            self.requests[job.name] = self.engine.add_request(
                job.name, job.prompt, params, priority=job.priority, cache_salt=job.salt, stream=job.stream
            )
            self.came[self.requests[job.name]] = self.decisions
            assert fits, "admitted, and can never be served"  # B7
        except RequestError:
            assert not fits
            self.record.refused.add(job.name)

    def abort(self, job):
        """B8: an abort takes effect at once, whatever the request is doing."""
        request = self.requests[job.name]
        ended = request.is_finished  # by a decision, and not given out yet
        state = (request.status.value, request.num_preemptions > 0, request.num_computed_tokens > 0)
        output = self.engine.abort(job.name)
        if output is not None:
            assert output.finished and request.status is Status.FINISHED and not request.block_ids
            assert ended or output.outputs[0].finish_reason == "abort"
            self.record.counts["aborts"] += 1
            self.record.counts[f"abort {state}"] += 1
            self.deliver(output)
        assert self.engine.abort(job.name) is None
        self.blocks.check()

    def deliver(self, output):
        """E3: a request ends once, and nothing comes after."""
        name = output.request_id
        assert name not in self.record.outputs, "output after the end"
        if self.requests[name].stream:
            self.streamed.setdefault(name, []).extend(output.token_ids)
        if output.finished:
            tokens = self.streamed.get(name, output.token_ids)
            self.record.outputs[name] = (list(tokens), output.outputs[0].finish_reason)

    def step(self, *, interrupted):
        scheduler, runner = self.scheduler, self.runner
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        decoding = [request for request in running if request.num_uncomputed_tokens == 1]
        under_way = bool(self.engine._under_way)
        if self.engine._stalled:  # what was under way is settled before anything is decided
            self.engine._settle_all()
            decoding = [request for request in scheduler.running if request.num_uncomputed_tokens == 1]
            running, waiting = list(scheduler.running), list(scheduler.waiting)
        steps = len(runner.outputs)
        inside = steps % 2 == 0
        if interrupted and inside:
            runner.fail_with = KeyboardInterrupt()
        elif interrupted:
            runner.interrupt_fetch = True
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
            self.record.counts["interrupts" if inside else "interrupted waits"] += 1
            if inside:
                self.check_undone(runner.outputs[-1])
        except EngineError as error:
            raise AssertionError(str(error.__cause__)) from error  # what the shadow runner had to say
        runner.fail_with, runner.interrupt_fetch = None, False
        for output in outputs:
            self.deliver(output)
        decided = runner.outputs[-1] if len(runner.outputs) > steps else SchedulerOutput(())
        if decided.spans:
            self.check_decision(decided, running, decoding, waiting)
        else:
            assert under_way or any(output.finished for output in outputs), "a step that does nothing"  # B3
        self.check_books()

    def check_undone(self, output):
        """Ctrl-C: nothing of the step counts as computed, and nothing is lost."""
        for span in output.spans:
            assert span.request.is_finished or span.request.num_computed_tokens == span.start
            assert span.request.num_pending_tokens == len(self.runner.drawn[span.request])

    def check_decision(self, decided, running, decoding, waiting):
        work, scheduler, order = self.work, self.scheduler, self.order
        scheduled = [span.request for span in decided.spans]
        assert len(set(scheduled)) == len(scheduled)
        # B2: within the limits, in every step
        assert 0 < decided.num_tokens <= work.budget
        assert len(scheduled) <= work.max_num_seqs and len(scheduler.running) <= work.max_num_seqs
        # B4: whoever needs one token gets it now, and no budget is left while someone could use it
        spans = {span.request: span for span in decided.spans}
        admitted = [request for request in scheduled if request in waiting]
        assert all(request in spans for request in decoding if request not in decided.preempted + decided.finished)
        for request, length in self.runner.lengths.items():
            if request not in spans or spans[request].stop < length:
                assert decided.num_tokens == scheduler.max_num_batched_tokens, (
                    "budget left, and a request that could have used it"
                )
        # B5: admitted in order, and nobody overtakes
        assert [order(request) for request in admitted] == sorted(order(request) for request in admitted)
        passed_over = [request for request in waiting if request not in admitted + list(decided.finished)]
        assert len(scheduler.running) + len(decided.passed) <= work.max_num_seqs, "their places are taken"
        for request in decided.passed:
            assert request in passed_over
            self.check_passed(request, {*running, *scheduled})
        self.ever_passed.update(decided.passed)
        self.record.counts["passed"] += len(decided.passed)
        for request in (each for each in passed_over if each not in decided.passed):
            assert all(order(ahead) < order(request) for ahead in admitted), "it was overtaken"
            for ahead in admitted:  # the bound, in its own words
                levels = request.priority - ahead.priority if work.policy == "priority" else 0
                later = self.came[ahead] - self.came[request]
                assert ahead.arrival < request.arrival or later < levels * work.patience, "overtaken by a latecomer"
        self.record.counts["overtaken"] += sum(
            ahead.arrival > request.arrival for ahead in admitted for request in passed_over
        )
        self.record.counts["aged"] += sum(
            ahead.priority > request.priority for ahead in admitted for request in passed_over
        ) * (work.policy == "priority")
        # B5: the victims are the last of those that ran
        victims = list(decided.preempted)
        assert not set(victims) & set(scheduled)
        alive = sorted((r for r in running if r not in decided.finished), key=order, reverse=True)
        assert victims == alive[: len(victims)], "the wrong ones were preempted"
        assert not (victims and admitted), "preempted for the sake of a newcomer"
        self.record.counts["hits"] += sum(spans[request].start > 0 for request in admitted)
        self.record.counts["chunks"] += sum(not span.samples for span in decided.spans)
        self.record.counts["mixed"] += len({span.samples for span in decided.spans}) == 2
        self.record.trace.append(
            tuple((s.request.request_id, s.start, s.stop, tuple(s.request.block_ids)) for s in decided.spans)
        )

    def check_passed(self, request, running):
        """Whom others pass waits for somebody before it, who computes half or more of what it lacks."""
        size, tokens = self.blocks.block_size, request.token_ids

        def shared_blocks(other):
            pairs = zip(tokens[:-1], other.prompt_token_ids, strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) // size

        before = [other for other in running if self.order(other) < self.order(request)]
        shared = [shared_blocks(other) for other in before if other.cache_salt == request.cache_salt]
        assert 2 * max(shared) * size >= len(tokens), "what it could find is too little to wait for"

    def check_books(self):
        scheduler, blocks = self.scheduler, self.blocks
        blocks.check()
        held = Counter(block for request in scheduler.running for block in request.block_ids)
        assert {block.index: block.ref_count for block in blocks._blocks if block.ref_count} == held
        for request in scheduler.waiting:  # B9: whoever waits holds nothing
            assert request.status is Status.WAITING and not request.block_ids and request.num_computed_tokens == 0
        for request in scheduler.running:
            assert request.status is Status.RUNNING and request.num_computed_tokens < request.num_tokens
        for queue in (scheduler.waiting, scheduler.running):
            assert queue == sorted(queue, key=self.order)
        if self.work.policy == "fcfs" and scheduler.waiting and scheduler.running:
            first = next((each for each in scheduler.waiting if each not in self.ever_passed), None)
            assert first is None or self.order(scheduler.running[-1]) < self.order(first), "a newcomer overtook"


def check_outputs(work, record):
    """B1, B7, B10: every request got what it would have got alone; an aborted one, the beginning of it."""
    for job in work.jobs:
        if job.name in record.refused:
            continue
        expected, reason = roll_out(
            job.prompt, max_tokens=job.max_tokens, pool_tokens=work.pool_tokens, ignore_eos=job.ignore_eos
        )
        output, found = record.outputs[job.name]
        if found == "abort":
            assert output == expected[: len(output)]
            outgrown = len(job.prompt) + len(output) > work.pool_tokens  # which only the next step would notice
            assert len(output) < len(expected) or outgrown
        else:
            assert (output, found) == (expected, reason), job.name


def check(seed, **parts):
    """Serve the workload of a seed with these parts, and check everything about it."""
    work = draw(seed)
    record = Run(work, **parts).serve()
    check_outputs(work, record)
    return record


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_gets_the_tokens_it_would_get_alone(seed):
    check(seed)


def test_the_workloads_do_what_they_are_for():
    """Without preemptions, hits and so on, the test above would prove nothing."""
    total = Counter()
    for seed in SEEDS:
        record = check(seed)
        total += record.counts
        total["refused"] += len(record.refused)
        for _, reason in record.outputs.values():
            total[f"end {reason}"] += 1
    least = {
        "preemptions": 100, "hits": 200, "evictions": 200, "chunks": 500, "mixed": 100, "aborts": 40, "interrupts": 40,
        "overtaken": 100, "aged": 5, "passed": 40,
        "interrupted waits": 40,
        "refused": 20, "end stop": 50, "end length": 200,
    }  # fmt: skip
    assert {name: total[name] for name in least if total[name] < least[name]} == {}, total
    states = {name.partition(" ")[2] for name in total if name.startswith("abort ")}
    assert {"('waiting', False, False)", "('waiting', True, False)", "('running', False, True)"} <= states


def test_the_same_arrivals_give_the_same_schedule():
    """B11."""
    for seed in SEEDS[:60]:
        assert check(seed).trace == check(seed).trace


# --- one thing at a time ----------------------------------------------------------------------------------------


class Bench:
    """An engine over the shadow runner, for tests that say each step."""

    def __init__(
        self,
        num_blocks,
        *,
        size=4,
        budget=64,
        seqs=8,
        policy="fcfs",
        limit=1000,
        eos=(),
        manager=BlockManager,
        scheduler=Scheduler,
        patience=1000,
        **options,
    ):
        self.blocks = manager(num_blocks, size, **options)
        self.scheduler = scheduler(
            self.blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy, patience=patience
        )
        self.runner = ShadowRunner(self.scheduler)
        limits = Limits(max_model_len=limit, vocab_size=VOCAB, eos_token_ids=frozenset(eos))
        self.engine = LLMEngine(self.scheduler, self.runner, limits)

    def add(self, name, prompt, max_tokens=64, **options):
        return self.engine.add_request(name, list(prompt), SamplingParams(max_tokens=max_tokens), **options)

    def step(self):
        """One step; what it computed, as {name: (start, stop)}."""
        self.outputs = {output.request_id: output for output in self.engine.step()}
        self.blocks.check()
        return {span.request.request_id: (span.start, span.stop) for span in self.runner.outputs[-1].spans}

    def finish(self):
        """Step until nobody is left; every output, by name."""
        found = {}
        for _ in range(1000):
            if not self.engine.has_unfinished_requests:
                assert self.blocks.num_held == 0 and not self.scheduler.running
                return found
            self.step()
            found |= self.outputs
        raise AssertionError("the work does not end")

    def names(self):
        return (
            [request.request_id for request in self.scheduler.running],
            [request.request_id for request in self.scheduler.waiting],
        )


def alone(prompt, max_tokens, pool_tokens=10**6):
    return roll_out(prompt, max_tokens=max_tokens, pool_tokens=pool_tokens, ignore_eos=True)[0]


def test_a_decode_gains_a_token_in_every_step_under_a_stream_of_prefills():
    """B4. The bound: one token a step, whatever arrives."""
    bench = Bench(400, budget=8, seqs=16, enable_prefix_caching=False)
    bench.add("steady", [1], max_tokens=200)
    bench.step()
    for step in range(1, 200):
        bench.add(f"new{step}", [step % VOCAB] * 20, max_tokens=2)
        assert bench.step()["steady"] == (step, step + 1)
    assert bench.outputs["steady"].token_ids == alone([1], 200)
    assert len(bench.scheduler.waiting) > 50  # more came than could be served, so there was competition


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("urgency", [0, -5])
def test_nor_does_anybody_more_urgent_keep_a_token_from_it(lookahead, urgency):
    """B4, with steps that overlap, and with newcomers that go before it wherever there is a choice."""
    bench = Bench(400, budget=8, seqs=6, policy="priority", enable_prefix_caching=False)
    bench.runner.lookahead = lookahead
    bench.add("steady", [1], max_tokens=200)
    bench.step()
    for step in range(1, 200):
        bench.add(f"new{step}", [step % VOCAB] * 20, max_tokens=2, priority=urgency)
        spans = bench.step()
        assert spans["steady"] == (step, step + 1) and sum(stop - start for start, stop in spans.values()) == 8
    assert len(bench.scheduler.waiting) > 50


@pytest.mark.parametrize("budget", [512, 8192])
def test_prompts_of_32k_tokens_cost_a_running_request_a_step_of_the_budget_at_most(budget):
    """B4, in tokens: between two tokens of a request that decodes there is one step, and its tokens are bounded.

    Three prompts at once, of 32,768 tokens each, beside 16 that decode: without chunks a token would wait for 98,304.
    """
    blocks = BlockManager(1000, 256, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, max_num_seqs=32, max_num_batched_tokens=budget)

    def request(number, length):
        return Request(
            request_id=str(number), prompt_token_ids=[1] * length, params=SamplingParams(), max_tokens=10**6,
            arrival=number,
        )  # fmt: skip

    def step():
        output = scheduler.schedule()
        scheduler.update(output, [Sampled(3) if span.samples else None for span in output.spans])
        return {span.request: span.stop - span.start for span in output.spans}

    steady = [request(number, 4) for number in range(16)]
    for each in steady:
        scheduler.add(each)
    step()
    long = [request(16 + number, 32_768) for number in range(3)]
    for each in long:
        scheduler.add(each)
    steps = 0
    while any(each.num_output_tokens == 0 for each in long):
        sizes = step()
        assert all(sizes[each] == 1 for each in steady) and sum(sizes.values()) <= budget
        steps += 1
    # nothing of the budget is lost meanwhile: prompts get all that decodes leave, and the first to be done decode too
    assert -(-3 * 32_768 // (budget - 16)) <= steps <= -(-3 * 32_768 // (budget - 18))


def serve_a_stream(bench, *, arrivals, steps, **low):
    """Add one request, and more urgent ones in every step; after how many steps the first had ended, if it had."""
    bench.add("low", [1] * 4, **low)
    for step in range(steps):
        for number in range(arrivals):
            bench.add(f"{step}.{number}", [2], max_tokens=bench.length, priority=0)
        bench.step()
        if "low" in bench.outputs:
            return step
    return None


@pytest.mark.parametrize(
    ("patience", "priority", "arrivals"), [(5, 3, 1), (5, 3, 2), (1, 1, 1), (20, 1, 3), (1, 60, 1)]
)
def test_a_stream_of_urgent_requests_holds_a_patient_one_for_so_long_and_no_longer(patience, priority, arrivals):
    """One at a time, a step each: those of the first ``patience * priority`` steps go before it, and no other."""
    bench = Bench(100, seqs=1, policy="priority", patience=patience)
    bench.length = 1
    ahead = patience * priority * arrivals
    assert serve_a_stream(bench, arrivals=arrivals, steps=ahead + 9, max_tokens=1, priority=priority) == ahead


def test_a_patient_request_is_admitted_and_preempted_but_not_for_ever():
    """A pool that is always too small, and always somebody more urgent: it ends all the same, and not so by itself."""
    for patience, ends in ((10, True), (10**6, False)):
        bench = Bench(6, seqs=4, policy="priority", patience=patience, enable_prefix_caching=False)
        bench.length = 14
        step = serve_a_stream(bench, arrivals=1, steps=500, max_tokens=16, priority=2)
        assert (step is not None) is ends
        if ends:
            assert step < 20 * bench.length  # 20 came at most that go before it
            assert bench.outputs["low"].token_ids == alone([1] * 4, 16)
        assert bench.scheduler.num_preemptions > 10


def test_chunks_fill_what_the_decodes_leave():
    bench = Bench(20, budget=6)
    bench.add("decode", [1], max_tokens=9)
    assert bench.step() == {"decode": (0, 1)}
    bench.add("long", range(7), max_tokens=1)
    bench.add("next", [2] * 9, max_tokens=1)
    assert bench.step() == {"decode": (1, 2), "long": (0, 5)}
    assert bench.step() == {"decode": (2, 3), "long": (5, 7), "next": (0, 3)}
    assert bench.outputs["long"].token_ids == alone(range(7), 1)
    assert bench.step() == {"decode": (3, 4), "next": (3, 8)}
    assert bench.step() == {"decode": (4, 5), "next": (8, 9)}


def test_cached_tokens_cost_no_budget():
    bench = Bench(20, budget=10)
    bench.add("first", [1] * 9, max_tokens=1)
    bench.step()
    second = bench.add("second", [1] * 8 + [2] * 9, max_tokens=1)
    assert bench.step() == {"second": (8, 17)}
    assert second.num_cached_tokens == 8 == bench.outputs["second"].num_cached_tokens


def test_no_more_run_than_the_limit_or_the_budget_allows():
    for seqs, budget in ((3, 64), (8, 3)):
        bench = Bench(40, seqs=seqs, budget=budget)
        for number in range(6):
            bench.add(f"{number}", [number], max_tokens=4)
        bench.step()
        assert bench.names() == (["0", "1", "2"], ["3", "4", "5"])
        assert bench.step() == {"0": (1, 2), "1": (1, 2), "2": (1, 2)}
        assert len(bench.finish()) == 6


def test_the_victim_is_the_latest_and_resumes_before_later_arrivals():
    bench = Bench(4)
    for number in range(2):
        bench.add(f"{number}", [number] * 4, max_tokens=7)
    bench.step()  # each fills one block; the next token needs a second one
    bench.step()
    bench.add("late", [5], max_tokens=1)
    bench.step()
    assert bench.names() == (["0", "1"], ["late"])  # no block to spare for a newcomer
    bench.step()
    bench.step()
    assert bench.step() == {"0": (8, 9)}
    assert bench.names() == (["0"], ["1", "late"])
    victim = bench.scheduler.waiting[0]
    assert (victim.num_preemptions, victim.num_output_tokens) == (1, 5)
    outputs = bench.finish()
    assert list(outputs) == ["0", "1", "late"]
    assert [outputs[name].token_ids for name in "01"] == [alone([number] * 4, 7) for number in range(2)]
    assert bench.scheduler.num_preemptions == 1 == victim.num_preemptions


def test_under_priorities_the_least_urgent_is_preempted_whenever_it_came():
    for policy, victim in (("priority", "0"), ("fcfs", "2")):
        bench = Bench(7, policy=policy)
        for number, priority in enumerate((5, -1, 3)):
            bench.add(f"{number}", [number] * 4, max_tokens=12, priority=priority)
        while not bench.scheduler.num_preemptions:
            bench.step()
        assert bench.names()[1] == [victim]
        outputs = bench.finish()
        assert all(outputs[f"{number}"].token_ids == alone([number] * 4, 12) for number in range(3))


def test_under_priorities_the_more_urgent_is_admitted_first():
    bench = Bench(40, seqs=1, policy="priority")
    for name, priority in (("c", 2), ("b", 0), ("d", 2), ("a", -3)):
        bench.add(name, [1], max_tokens=1, priority=priority)
    assert list(bench.finish()) == ["a", "b", "c", "d"]


def test_a_victim_keeps_its_count_of_cached_tokens():
    """What it finds of its own work when it resumes was not cached when it came."""
    bench = Bench(4)
    for number in range(2):
        bench.add(f"{number}", [number] * 4, max_tokens=9)
    outputs = bench.finish()
    assert bench.scheduler.num_preemptions and outputs["1"].num_cached_tokens == 0


@pytest.mark.parametrize(("length", "fits"), [(11, True), (12, True), (13, False), (40, False)])
def test_a_prompt_that_can_never_fit_is_refused_at_once(length, fits):
    """B7, exact at the pool's size."""
    bench = Bench(3)
    bench.add("other", [1, 2], max_tokens=5)
    if fits:
        bench.add("big", [3] * length, max_tokens=9)
    else:
        with pytest.raises(RequestError, match=rf"{length} tokens long.*3 blocks of 4 tokens") as caught:
            bench.add("big", [3] * length, max_tokens=9)
        assert caught.value.parameter == "prompt"
    outputs = bench.finish()
    assert outputs["other"].token_ids == alone([1, 2], 5)
    if fits:
        assert outputs["big"].token_ids == alone([3] * length, 9, pool_tokens=12)
        assert outputs["big"].outputs[0].finish_reason == "length"
        assert len(outputs["big"].token_ids) == 13 - length


def test_a_request_that_outgrows_the_pool_ends_and_the_others_finish():
    bench = Bench(3)
    bench.add("grows", [1] * 4, max_tokens=64)
    bench.add("short", [2] * 3, max_tokens=3)
    bench.add("later", [3] * 6, max_tokens=4)
    outputs = bench.finish()
    grown = outputs["grows"]
    assert (grown.outputs[0].finish_reason, grown.token_ids) == ("length", alone([1] * 4, 64, pool_tokens=12))
    assert len(grown.token_ids) == 9  # twelve tokens in the cache, and the one drawn after them
    assert outputs["short"].token_ids == alone([2] * 3, 3)
    assert outputs["later"].token_ids == alone([3] * 6, 4)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_last_token_that_a_pool_can_give(over):
    """Room for 12 tokens: after a prompt of 4, nine can be drawn, the last of them never stored."""
    bench = Bench(3)
    bench.add("a", [1] * 4, max_tokens=9 + over)
    assert len(bench.finish()["a"].token_ids) == min(9, 9 + over)


def test_one_token_only():
    bench = Bench(3, budget=2)
    bench.add("a", [1] * 5, max_tokens=1)
    assert [bench.step(), bench.step(), bench.step()] == [{"a": (0, 2)}, {"a": (2, 4)}, {"a": (4, 5)}]
    assert bench.outputs["a"].token_ids == alone([1] * 5, 1)
    assert not bench.engine.has_unfinished_requests


@pytest.mark.parametrize("wrong", [0, -1])
def test_no_tokens_at_all_are_refused(wrong):
    with pytest.raises(RequestError, match="max_tokens"):
        Bench(3).add("a", [1], max_tokens=wrong)


def test_the_context_bounds_the_output():
    bench = Bench(30, limit=10)
    request = bench.add("a", [1] * 7, max_tokens=50)
    unbounded = bench.add("b", [2] * 9, max_tokens=None)
    assert (request.max_tokens, unbounded.max_tokens) == (3, 1)
    outputs = bench.finish()
    assert outputs["a"].token_ids == alone([1] * 7, 3) and len(outputs["b"].token_ids) == 1
    with pytest.raises(RequestError, match="max_model_len=10"):
        bench.add("c", [1] * 10)


def test_an_end_token_ends_unless_it_is_ignored():
    prompt = next([p] for p in range(VOCAB) if END in alone([p], 20) and alone([p], 20)[0] != END)
    bench = Bench(30, eos=[END])
    bench.add("stops", prompt, max_tokens=20)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    bench.engine.add_request("goes on", prompt, params)
    outputs = bench.finish()
    full = alone(prompt, 20)
    assert outputs["stops"].token_ids == full[: full.index(END) + 1]
    assert outputs["stops"].outputs[0].finish_reason == "stop"
    assert (outputs["goes on"].token_ids, outputs["goes on"].outputs[0].finish_reason) == (full, "length")


# --- aborts (B8) ------------------------------------------------------------------------------------------------


def test_abort_while_waiting_running_half_prefilled_or_preempted():
    bench = Bench(4, budget=8)
    bench.add("0", [0] * 4, max_tokens=7)
    bench.add("1", [1] * 4, max_tokens=7)
    bench.add("waits", [2], max_tokens=7)
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.names() == (["0"], ["1", "waits"])
    assert len(bench.engine.abort("1").token_ids) == 5
    assert bench.engine.abort("waits").token_ids == []
    assert bench.engine.abort("0").outputs[0].finish_reason == "abort"
    assert bench.blocks.num_held == 0 and not bench.engine.has_unfinished_requests
    bench.add("half", [3] * 12, max_tokens=2)
    assert bench.step() == {"half": (0, 8)}
    assert bench.engine.abort("half").token_ids == []
    assert bench.blocks.num_held == 0
    bench.blocks.check()


def test_abort_twice_or_of_somebody_unknown_is_nothing():
    bench = Bench(4)
    bench.add("a", [1])
    assert bench.engine.abort("a").finished
    assert bench.engine.abort("a") is None
    assert bench.engine.abort("nobody") is None
    bench.add("b", [1], max_tokens=1)
    assert bench.finish()["b"].token_ids == alone([1], 1)
    assert bench.engine.abort("b") is None


def test_abort_while_the_step_runs():
    bench = Bench(8)
    bench.add("goes", [1] * 5, max_tokens=4)
    bench.add("stays", [2] * 5, max_tokens=4)
    bench.step()
    aborted = []
    bench.runner.meanwhile.append(lambda: aborted.append(bench.engine.abort("goes")))
    assert set(bench.step()) == {"goes", "stays"}  # it was in the step, and its token is dropped
    assert "goes" not in bench.outputs and aborted[0].token_ids == alone([1] * 5, 1)
    assert bench.blocks.num_held == 2
    assert bench.finish()["stays"].token_ids == alone([2] * 5, 4)


def test_abort_in_the_step_that_would_have_finished_it():
    bench = Bench(8)
    bench.add("a", [1], max_tokens=1)
    bench.runner.meanwhile.append(lambda: bench.engine.abort("a"))
    bench.step()
    assert bench.outputs == {} and not bench.engine.has_unfinished_requests
    assert bench.blocks.num_held == 0


def test_abort_of_a_request_that_the_decision_ended_but_the_step_did_not_deliver():
    """It had outgrown the pool when the step failed; its caller gives up, and the engine goes on."""
    for failure, seen in ((KeyboardInterrupt(), KeyboardInterrupt), (Broken(), EngineError)):
        bench = Bench(2)
        bench.add("grows", [1] * 8, max_tokens=9)
        bench.step()
        bench.add("other", [2], max_tokens=2)
        bench.runner.fail_with = failure
        with pytest.raises(seen):
            bench.step()
        bench.engine.abort("grows")
        bench.add("grows", [3], max_tokens=1)  # the name is free again, and means the new one
        outputs = bench.finish()
        assert outputs["grows"].token_ids == alone([3], 1)


def test_a_request_that_the_decision_ended_is_delivered_after_a_failed_step():
    bench = Bench(2)
    bench.add("grows", [1] * 8, max_tokens=9)
    bench.step()
    bench.add("other", [2], max_tokens=2)
    bench.runner.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    outputs = bench.finish()
    assert outputs["grows"].outputs[0].finish_reason == "length"
    assert outputs["other"].token_ids == alone([2], 2)


# --- failures ---------------------------------------------------------------------------------------------------


def test_after_an_interrupt_the_step_is_as_if_it_had_not_begun():
    bench = Bench(12, budget=8)
    bench.add("decodes", [1] * 3, max_tokens=6)
    bench.step()
    bench.add("prefills", [2] * 11, max_tokens=2)
    before = [(r.num_computed_tokens, list(r.token_ids)) for r in (*bench.scheduler.running, *bench.scheduler.waiting)]
    for _ in range(3):
        bench.runner.fail_with = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            bench.step()
        assert [(r.num_computed_tokens, list(r.token_ids)) for r in bench.scheduler.running] == before
        assert len(bench.blocks._cached) == 0
    assert bench.step() == {"decodes": (3, 4), "prefills": (0, 7)}
    outputs = bench.finish()
    assert outputs["decodes"].token_ids == alone([1] * 3, 6)
    assert outputs["prefills"].token_ids == alone([2] * 11, 2)


def test_after_an_interrupt_nothing_unwritten_can_be_found():
    bench = Bench(12)
    bench.add("a", [1] * 9, max_tokens=1)
    bench.runner.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.runner.slots.clear()  # the interrupt came before anything was written
    bench.engine.abort("a")
    bench.add("b", [1] * 9, max_tokens=1)
    assert bench.step() == {"b": (0, 9)}


def test_a_failed_step_ends_its_requests_and_no_others():
    bench = Bench(12, seqs=2)
    for name, token in zip("abc", (1, 4, 3), strict=True):
        bench.add(name, [token] * 5, max_tokens=3)
    cause = Broken("the device is gone")
    bench.runner.fail_with = cause
    with pytest.raises(
        EngineError, match="step of 10 tokens failed with Broken: the device is gone.*2 requests"
    ) as caught:
        bench.step()
    assert caught.value.__cause__ is cause
    assert bench.names() == ([], ["c"]) and bench.blocks.num_held == 0
    assert len(bench.blocks._cached) == 0, "a failed step's blocks must not be found"
    bench.add("a", [2] * 5, max_tokens=3)
    outputs = bench.finish()
    assert outputs["c"].token_ids == alone([3] * 5, 3)
    assert outputs["a"].token_ids == alone([2] * 5, 3)


# --- prompts that begin alike and come together ---------------------------------------------------------------------


def test_prompts_that_begin_alike_are_computed_once_though_they_come_together():
    bench = Bench(100, budget=100)
    prompts = {f"q{number}": [1, 2, 3, 4, 5, 6, 5, 4, number] for number in range(6)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=3)
    assert bench.step() == {"q0": (0, 9)}
    assert bench.step() == {"q0": (9, 10), **{f"q{number}": (8, 9) for number in range(1, 6)}}
    outputs = bench.finish()
    assert {name: outputs[name].token_ids for name in prompts} == {
        name: alone(prompt, 3) for name, prompt in prompts.items()
    }


def test_who_waits_for_a_prefix_is_passed_and_keeps_its_place():
    bench = Bench(100, budget=100, seqs=3)
    for name, prompt in (("first", [1] * 8 + [2]), ("like it", [1] * 8 + [3]), ("other", [4] * 9), ("last", [5] * 9)):
        bench.add(name, prompt, max_tokens=20)
    assert bench.step() == {"first": (0, 9), "other": (0, 9)}
    assert [request.request_id for request in bench.runner.outputs[-1].passed] == ["like it"]
    assert bench.names() == (["first", "other"], ["like it", "last"]), "one place of three is for whom others passed"
    assert bench.step()["like it"] == (8, 9)
    assert not bench.runner.outputs[-1].passed


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        pytest.param([1] * 4 + [2] * 5, {}, id="less than half in common"),
        pytest.param([1] * 8 + [2], {"cache_salt": "mine"}, id="another salt"),
        pytest.param([2] + [1] * 8, {}, id="another beginning"),
    ],
)
def test_who_finds_too_little_waits_for_nobody(prompt, options):
    bench = Bench(100, budget=100)
    bench.add("first", [1] * 12)
    bench.add("second", prompt, **options)
    assert bench.step() == {"first": (0, 12), "second": (0, len(prompt))}


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    bench = Bench(100, budget=100, enable_prefix_caching=False)
    for name in "ab":
        bench.add(name, [1] * 12)
    assert bench.step() == {"a": (0, 12), "b": (0, 12)}


def test_a_prefix_is_waited_for_no_longer_than_until_it_can_be_found():
    """The first prompt takes twenty steps, and what is shared is done after two."""
    bench = Bench(100, budget=8)
    bench.add("long", [1] * 16 + [2] * 144)
    assert bench.step() == {"long": (0, 8)}
    bench.add("short", [1] * 16 + [3])
    assert bench.step() == {"long": (8, 16)}
    assert bench.names() == (["long"], ["short"])
    assert bench.step() == {"long": (16, 24)}, "the budget is spent, by one that came before"
    bench.scheduler.max_num_batched_tokens = 9
    assert bench.step() == {"long": (24, 33)}
    bench.scheduler.max_num_batched_tokens = 200
    assert bench.step() == {"long": (33, 160), "short": (16, 17)}


@pytest.mark.parametrize("reason", ["abort", "failure"])
def test_when_the_one_that_is_waited_for_is_gone_the_next_computes_the_prefix(reason):
    bench = Bench(100, budget=6)
    for name in "abc":
        bench.add(name, [1] * 12)
    assert bench.step() == {"a": (0, 6)}
    if reason == "abort":
        bench.engine.abort("a")
    else:
        bench.runner.fail_with = Broken("the device is gone")
        with pytest.raises(EngineError):
            bench.step()
    assert bench.step() == {"b": (4, 10)}, "from the block that was known"
    assert bench.step() == {"b": (10, 12), "c": (8, 12)}


def check_nobody_waits_for_a_later_one(**parts):
    bench = Bench(100, budget=8, policy="priority", **parts)
    bench.add("patient", [1] * 24, priority=5)
    assert bench.step() == {"patient": (0, 8)}
    bench.scheduler.max_num_batched_tokens = 40
    bench.add("urgent", [1] * 24, priority=0)
    assert bench.step() == {"patient": (8, 24), "urgent": (8, 24)}


def test_nobody_waits_for_a_prefix_of_one_who_comes_later_in_the_order():
    check_nobody_waits_for_a_later_one()


# --- pins, and the engine's door --------------------------------------------------------------------------------


def check_full_of_pins(**parts):
    bench = Bench(4, **parts)
    prompt = bench.add("prefix", [1] * 15, max_tokens=1)
    bench.finish()
    pins = bench.blocks.pin(prompt)
    assert len(pins) == 3
    bench.add("fits", [2] * 4, max_tokens=1)
    bench.add("grows", [3] * 3, max_tokens=9)
    bench.add("never", [4] * 5, max_tokens=9)
    bench.add("sharer", [1] * 12 + [5], max_tokens=2)
    outputs = {}
    for _ in range(50):
        if bench.engine.has_unfinished_requests:
            outputs |= {output.request_id: output for output in bench.engine.step()}
    assert set(outputs) == {"fits", "grows", "never", "sharer"}
    assert outputs["fits"].token_ids == alone([2] * 4, 1)
    assert outputs["grows"].token_ids == alone([3] * 3, 9, pool_tokens=4)
    assert (outputs["never"].token_ids, outputs["never"].outputs[0].finish_reason) == ([], "length")
    assert outputs["sharer"].token_ids == alone([1] * 12 + [5], 2)
    assert outputs["sharer"].num_cached_tokens == 12
    bench.blocks.unpin(pins)
    bench.add("never", [4] * 5, max_tokens=9)
    assert bench.finish()["never"].token_ids == alone([4] * 5, 9)


def test_pins_that_fill_the_pool_do_not_lock_the_engine():
    """B9. With nothing left, a request ends instead of waiting for ever; when the pins go, all is well."""
    check_full_of_pins()


BAD = [
    ({"prompt_token_ids": []}, "prompt"),
    ({"prompt_token_ids": [0, VOCAB]}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [True]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids"),
    ({"prompt_token_ids": ["1"]}, "prompt_token_ids"),
    ({"params": SamplingParams(stop_token_ids=[VOCAB])}, "stop_token_ids"),
    ({"params": SamplingParams(logprobs=6)}, "logprobs"),
    ({"params": SamplingParams(stop="x")}, "stop"),
    ({"priority": 1.5}, "priority"),
    ({"priority": True}, "priority"),
    ({"cache_salt": None}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"request_id": "taken"}, "request_id"),
    ({"request_id": 5}, "request_id"),
]


@pytest.mark.parametrize(("change", "parameter"), BAD, ids=lambda value: str(value)[:40])
def test_what_can_never_be_served_is_refused_and_changes_nothing(change, parameter):
    bench = Bench(8)
    bench.engine.limits = Limits(max_model_len=30, vocab_size=VOCAB, max_logprobs=5)
    bench.add("taken", [1], max_tokens=3)
    asked = {"request_id": "new", "prompt_token_ids": [1, 2], "params": SamplingParams()} | change
    with pytest.raises(RequestError) as caught:
        bench.engine.add_request(asked.pop("request_id"), asked.pop("prompt_token_ids"), asked.pop("params"), **asked)
    assert caught.value.parameter == parameter
    assert isinstance(caught.value, ValueError) and parameter in str(caught.value)
    assert bench.names() == ([], ["taken"])
    assert bench.finish()["taken"].token_ids == alone([1], 3)


def test_a_salt_may_be_any_text():
    bench = Bench(8)
    for name, salt in (("a", "\ud800"), ("b", "\ud800"), ("c", "\udfff")):
        bench.add(name, [1] * 5, max_tokens=1, cache_salt=salt)
        assert bench.step() == {name: (4 if name == "b" else 0, 5)}


def test_a_drawn_name_is_an_unused_one():
    bench = Bench(8)
    taken = {bench.add(name, [1], max_tokens=1).request_id for name in ("1", "2", "3")}
    drawn = {bench.engine.add_request(None, [1], SamplingParams(max_tokens=1)).request_id for _ in range(4)}
    assert len(drawn) == 4 and not drawn & taken
    assert len(bench.finish()) == 7


def test_the_engine_keeps_its_own_parameters():
    bench = Bench(8)
    params = SamplingParams(max_tokens=3)
    bench.engine.add_request("a", [1], params)
    params.max_tokens = 1
    assert len(bench.finish()["a"].token_ids) == 3
    params.temperature = float("nan")
    with pytest.raises(RequestError, match="temperature"):
        bench.engine.add_request("b", [1], params)


def test_seeds_are_the_requests_own_or_drawn_from_the_engines():
    requests = []
    for _ in range(2):
        bench = Bench(8)
        requests += [bench.engine.add_request(None, [1], SamplingParams(seed=seed)) for seed in (None, None, 7)]
    seeds = [request.seed for request in requests]
    assert seeds[:3] == seeds[3:] and seeds[2] == 7
    assert len(set(seeds[:3])) == 3 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_gives_each_token_once_and_only_new_ones():
    bench = Bench(8, budget=4)
    bench.add("s", [1] * 6, max_tokens=4, stream=True)
    pieces = []
    while bench.engine.has_unfinished_requests:
        bench.step()
        pieces += [(output.token_ids, output.finished) for output in bench.outputs.values()]
    expected = alone([1] * 6, 4)
    assert pieces == [([token], place == 3) for place, token in enumerate(expected)]


def test_a_step_of_an_idle_engine_is_nothing():
    bench = Bench(2)
    assert bench.engine.step() == [] and not bench.runner.outputs


@pytest.mark.parametrize(("share", "found"), [(True, 12), (False, 8)])
def test_drawn_tokens_are_found_by_a_later_prompt_only_if_they_may_be(share, found):
    """Prompt of 9 tokens in blocks of 4, 6 drawn: the conversation goes on with all of them."""
    blocks = BlockManager(32, 4, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64, share_outputs=share)

    def request(prompt, arrival):
        return Request(
            request_id=str(arrival), prompt_token_ids=prompt, params=SamplingParams(), max_tokens=6, arrival=arrival
        )

    first = request(list(range(9)), 0)
    scheduler.add(first)
    while not first.is_finished:
        output = scheduler.schedule()
        scheduler.update(output, [Sampled(3) for _ in output.spans])
    second = request([*first.token_ids, 5], 1)
    scheduler.add(second)
    scheduler.schedule()
    assert second.num_cached_tokens == found
