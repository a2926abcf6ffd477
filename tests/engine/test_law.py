"""The law, with everything switched at random: a request gives in any company, to the last token, what it gives alone.

``test_equivalence.py`` turns one thing at a time. Here each seed draws a pool of 3 to 14 blocks, a budget, a policy,
whether steps overlap and whether prefixes are found, and requests that come while others run, some with stops,
penalties, banned words, biases, grammars, log-probabilities of the prompt or several samples, some streamed, some
aborted; and steps that fail. What each should have given is computed by itself: one request at a time, in one piece, on
a pool that is never short, with nothing cached.

Before each workload the cache is filled with NaN: whoever reads a place that its own request did not write, be it only
to add 0 times of it, ends with "error".
"""

import inspect
import random
import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count as running

import jaxtyping
import pytest
import torch

from nanovllm import SamplingParams, StructuredOutputsParams, engine, sampler
from nanovllm import batch as batches
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine, sample_seed
from nanovllm.errors import EngineError
from nanovllm.ops.attention import sdpa
from nanovllm.ops.take_tokens import take_tokens
from nanovllm.outputs import Logprob
from nanovllm.request import Request
from nanovllm.scheduler import Scheduler
from nanovllm.scoring import prompts
from nanovllm.structured.matcher import GrammarMatcher

pytest.importorskip("llguidance")

SEEDS = range(50)
ATOL = 1e-5
FAMILIES = ("llama", "qwen3", "mistral")
GARBAGE = float("nan")
MOST_BLOCKS = 16


@dataclass(frozen=True)
class Job:
    """One prompt of a workload."""

    arrival: int
    """The step before which it comes."""
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: str
    stream: bool
    abort: int | None
    """How many steps later it is aborted, if it has not ended by then."""


@dataclass(frozen=True)
class Work:
    """A pool, limits, and who comes when."""

    family: str
    block_size: int
    num_blocks: int
    budget: int
    seats: int
    policy: str
    caching: bool
    collisions: bool
    """All blocks have one digest, so only their tokens and parents tell them apart."""
    overlap: bool
    jobs: tuple[Job, ...]
    failures: tuple[int, ...]
    """Steps that fail: those of even number when they are submitted, the others when they are fetched."""

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass
class Answer:
    """All that came of one sample."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    """Of the first sample."""


def draw_params(dice: random.Random, room: int) -> SamplingParams:
    """Draw what a request asks for; each option by itself, and none of them often."""

    def now_and_then(share: float, **options):
        return options if dice.random() < share else {}

    structured = dice.random() < 0.2
    few = [dice.randrange(256) for _ in range(dice.randint(20, 60))]
    temperature = dice.choice((0.0, 0.7, 1.3))
    options = dict(temperature=temperature, seed=dice.randrange(2**40), max_tokens=room)
    if temperature:
        options |= now_and_then(0.3, n=dice.randint(2, 3))
        options |= now_and_then(0.3, top_k=dice.randint(1, 40))
        options |= now_and_then(0.3, top_p=dice.choice((0.5, 0.9)))
        options |= now_and_then(0.2, min_p=0.05)
    options |= now_and_then(0.3, logprobs=dice.randint(0, 3))
    options |= now_and_then(0.15, logprob_token_ids=few[:3])
    options |= now_and_then(0.3, presence_penalty=dice.uniform(-2, 2), frequency_penalty=dice.uniform(-1, 2))
    options |= now_and_then(0.3, repetition_penalty=dice.choice((0.8, 1.3)))
    options |= now_and_then(0.3, logit_bias={token: dice.uniform(-5, 5) for token in few[:4]})
    options |= now_and_then(0.3, stop_token_ids=few[4:14])
    options |= now_and_then(0.3, min_tokens=dice.randint(1, min(4, room)))
    options |= now_and_then(0.5, ignore_eos=True)
    if structured:
        form = dice.choice(
            (dict(regex="[a-f]{3,20}"), dict(choice=["yes", "no", "yesterday"]), dict(regex="(日本|x){2,9}"))
        )
        return SamplingParams(**options, structured_outputs=StructuredOutputsParams(**form))
    if dice.random() < 0.3:  # of four letters each pair comes soon
        pairs = [one + other for one in "abcd" for other in "abcd"]
        letters = dict(allowed_token_ids=[ord(letter) - 33 for letter in "abcd"], bad_words=dice.sample(pairs, 5))
        ends = dict(stop_token_ids=[dice.choice((64, 65))], min_tokens=dice.randint(1, min(6, room)))
        return SamplingParams(**options | letters | (ends if dice.random() < 0.5 else {}))
    options |= now_and_then(0.3, bad_words=[chr(dice.randint(97, 122)) for _ in range(3)] + ["ab", "xyz"])
    options |= now_and_then(0.4, stop=[chr(dice.randint(33, 90)) for _ in range(4)] + ["\ufffd\ufffd"])
    options |= now_and_then(0.3, include_stop_str_in_output=True)
    return SamplingParams(**options)


def draw_work(seed: int) -> Work:
    """Draw a workload that its pool is too small for."""
    dice = random.Random(seed)
    block_size = dice.choice((4, 8))
    num_blocks = dice.randint(3, 14)
    pool = block_size * num_blocks
    stem = [dice.randrange(256) for _ in range(40)]
    longest = pool // dice.choice((2, 5))  # short prompts are all admitted, and then there is no room to grow
    jobs = []
    for _ in range(dice.randint(3, 7)):
        shared = dice.choice((0, block_size, 2 * block_size, dice.randint(0, 40)))
        own = [dice.randrange(256) for _ in range(dice.choice((0, 1, 3, dice.randint(0, 20))))]
        prompt = ((stem[:shared] + own) or [dice.randrange(256)])[:longest]
        room = pool - len(prompt) + 1  # the last token needs no place
        over = dice.random() < 0.1  # or it would outgrow the pool all by itself
        params = draw_params(dice, room + 9 if over else dice.randint(1, min(room, 32)))
        if dice.random() < 0.2:
            start = dice.choice((None, dice.randrange(len(prompt))))
            params = replace(params, prompt_logprobs=dice.randint(0, 3), prompt_logprob_start=start)
        jobs.append(
            Job(
                arrival=dice.choice((0, 0, dice.randint(0, 15))),
                prompt=tuple(prompt),
                params=params,
                priority=dice.randint(0, 2),
                salt=dice.choice(("", "", "", "s")),
                stream=dice.random() < 0.4,
                abort=dice.randint(0, 20) if dice.random() < 0.2 else None,
            )
        )
    return Work(
        family=dice.choice(FAMILIES), block_size=block_size, num_blocks=num_blocks, budget=dice.choice((3, 7, 16, 256)),
        seats=dice.choice((2, 8, 8)), policy=dice.choice(("fcfs", "priority")), caching=dice.random() < 0.75,
        collisions=seed % 5 == 0,
        overlap=dice.random() < 0.5, jobs=tuple(jobs),
        failures=tuple(dice.sample(range(2, 40), 2)) if dice.random() < 0.3 else (),
    )  # fmt: skip


class Late:
    """The real runner, as a GPU looks from outside: a step's tokens are known one step after its submission."""

    lookahead = 1

    def __init__(self, runner):
        self.runner = runner

    def submit(self, output):
        sampled = self.runner.submit(output)()
        if drawn := [(span, each) for span, each in zip(output.spans, sampled, strict=True) if span.samples]:
            tokens = torch.tensor([each.token_id for _, each in drawn])
            self.runner._drawn.keep([span for span, _ in drawn], tokens)
        return lambda: sampled


class Failing:
    """A runner whose steps fail now and then, before they are computed or behind that."""

    def __init__(self, runner, failures):
        self.runner, self.failures, self.steps = runner, failures, running(1)
        self.lookahead = runner.lookahead

    def submit(self, output):
        number = next(self.steps)
        if number in self.failures and number % 2 == 0:
            raise ValueError("planted")
        fetch = self.runner.submit(output)

        def fail():
            raise ValueError("planted")

        return fail if number in self.failures else fetch


class Lab:
    """The models, opened once for each block size, and what their requests give alone."""

    def __init__(self, open_llm, monkeypatch, known):
        self.open_llm = open_llm
        self.known = known
        self.opened = {}
        self.counts = Counter()
        plain = batches.Batch

        def resolved(ids, *rest):  # a CPU's batch takes ids as they are; look up those that stand for rows
            return plain(ids if self.late is None else take_tokens(ids, self.late.runner._drawn.tokens), *rest)

        self.late = None
        monkeypatch.setattr(batches, "Batch", resolved)
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # half of the time; others check shapes

    def model(self, family, block_size):
        key = family, block_size
        if key not in self.opened:
            self.opened[key] = self.open_llm(family, block_size=block_size, num_gpu_blocks_override=80)
        return self.opened[key]

    def engine(self, work):
        """An engine over the opened model, with this workload's own scheduler and a cache full of garbage."""
        whole = self.model(work.family, work.block_size).llm_engine
        whole._runner.cache.data.fill_(GARBAGE)
        blocks = BlockManager(
            work.num_blocks,
            work.block_size,
            enable_prefix_caching=work.caching,
            hash_function=(lambda data: b"") if work.collisions else None,
        )
        scheduler = Scheduler(blocks, max_num_seqs=work.seats, max_num_batched_tokens=work.budget, policy=work.policy)
        self.late = Late(whole._runner) if work.overlap else None
        return LLMEngine(
            scheduler, Failing(self.late or whole._runner, work.failures), replace(whole.limits, by_priority=True),
            make_builder=whole._make_builder, decode_token=whole._decode_token, make_matcher=whole._make_matcher,
            encode=whole._encode,
        )  # fmt: skip

    def run(self, work):
        """Serve a workload; return the answers of each job, by sample."""
        served = self.engine(work)
        scheduler, blocks = served.scheduler, served.scheduler.blocks
        answers = [[Answer() for _ in range(job.params.n)] for job in work.jobs]
        counts = self.counts

        def deliver(output):
            for new in output.outputs:
                answer = answers[int(output.request_id)][new.index]
                assert answer.reason is None, "output after the end"
                answer.tokens += new.token_ids
                answer.text += new.text
                answer.logprobs += new.logprobs or ()
                answer.reason, answer.stop = new.finish_reason, new.stop_reason
            answers[int(output.request_id)][0].prompt_logprobs = output.prompt_logprobs or []
            if output.finished:
                counts["hits"] += output.num_cached_tokens > 0

        pending, step = set(range(len(work.jobs))), 0
        while pending or served.has_unfinished_requests:
            for place in sorted(pending):
                job = work.jobs[place]
                if job.arrival <= step:
                    pending.remove(place)
                    served.add_request(
                        str(place), job.prompt, job.params, priority=job.priority, cache_salt=job.salt,
                        stream=job.stream,
                    )  # fmt: skip
            for place, job in enumerate(work.jobs):
                if job.abort is not None and job.arrival + job.abort == step and (found := served.abort(str(place))):
                    deliver(found)
                    counts["aborts"] += 1
            try:
                outputs = served.step()
            except EngineError as error:
                outputs = error.outputs
                counts["failed steps"] += 1
            for output in outputs:
                deliver(output)
            for request in scheduler.running:
                counts["chunks"] += 0 < request.num_computed_tokens < len(request.prompt_token_ids)
            held = Counter(block for request in scheduler.running for block in request.block_ids)
            counts["blocks in common"] += any(number > 1 for number in held.values())
            blocks.check()
            step += 1
            assert step < 3000, "the work does not end"
        assert blocks.num_held == 0 and not scheduler.running and not scheduler.waiting
        counts["preemptions"] += scheduler.num_preemptions
        counts["evictions"] += blocks.num_evictions
        self.late = None
        return answers

    def expected(self, seed, work):
        """What the samples of each job give alone; the workloads are few, and many tests ask."""
        if seed not in self.known:
            counts, self.counts = self.counts, Counter()
            self.known[seed] = [[self.alone(work, job, index) for index in range(job.params.n)] for job in work.jobs]
            self.counts = counts
        return self.known[seed]

    def alone(self, work, job, index):
        """What one sample of a job gives with nothing else in the world."""
        seed = sample_seed(job.params.seed, index)
        # what outgrows the pool ends there: the last token needs no place
        room = min(job.params.max_tokens, work.pool_tokens + 1 - len(job.prompt))
        params = replace(job.params, n=1, seed=seed, max_tokens=room)
        solo = replace(job, arrival=0, params=params, priority=0, salt="", stream=False, abort=None)
        quiet = replace(
            work, num_blocks=80, budget=4096, seats=1, policy="fcfs", caching=False, overlap=False, jobs=(solo,),
            failures=(),
        )  # fmt: skip
        ((answer,),) = self.run(quiet)
        return answer


def check(lab: Lab, seed: int, fault: "Fault | None" = None) -> None:
    """Serve the workload of a seed, with a planted fault if there is one, and compare everything that came of it."""
    work = draw_work(seed)
    expected = lab.expected(seed, work)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault.plant(patch)
        answers = lab.run(work)
    for job, samples, references in zip(work.jobs, answers, expected, strict=True):
        for index, (found, alone) in enumerate(zip(samples, references, strict=True)):
            where = f"seed {seed}, prompt {job.prompt}, sample {index} of {job.params}"
            failed = bool(work.failures) and found.reason == "error" != alone.reason
            if cut := failed or found.reason == "abort":
                assert found.tokens == alone.tokens[: len(found.tokens)], where
                assert alone.text.startswith(found.text.rstrip("\ufffd")), where
            else:
                assert (found.tokens, found.text) == (alone.tokens, alone.text), where
                assert (found.reason, found.stop) == (alone.reason, alone.stop), where
            check_logprobs(found, alone, where)
            if not index:
                check_prompt_logprobs(job, found, alone, where, cut=cut)
            count(lab.counts, job, found)


def check_logprobs(found: Answer, expected: Answer, where: str) -> None:
    """The same tokens in the same places, and numbers that differ by rounding alone."""
    assert len(found.logprobs) in (0, len(found.tokens)), where
    for one, other in zip(found.logprobs, expected.logprobs, strict=False):
        assert next(iter(one)) == next(iter(other)), where
        for token in set(one) & set(other):
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=ATOL), where
        assert len(set(one) & set(other)) >= len(one) - 1, where  # the last of the best may tie with the next one


def check_prompt_logprobs(job: Job, found: Answer, expected: Answer, where: str, *, cut: bool) -> None:
    """All of them, but for a prompt that was not computed to its end."""
    one, other = found.prompt_logprobs, expected.prompt_logprobs
    assert len(one) == len(other) or (cut and not found.tokens), where
    for token, known, alone in zip(job.prompt, one, other, strict=False):
        assert (known is None) == (alone is None), where
        if known is not None:
            assert next(iter(known)) == token, where
            assert known[token].logprob == pytest.approx(alone[token].logprob, abs=ATOL), where


def count(counts: Counter, job: Job, found: Answer) -> None:
    params = job.params
    counts[f"end {found.reason}"] += 1
    counts["streamed"] += job.stream
    counts["samples"] += params.n > 1
    counts["grammar"] += params.structured_outputs is not None
    counts["stop string"] += isinstance(found.stop, str)
    counts["stop id"] += isinstance(found.stop, int)
    counts["log-probabilities"] += len(found.logprobs)
    counts["of prompts"] += sum(entry is not None for entry in found.prompt_logprobs)
    counts["penalties"] += params.penalizes
    counts["bad words"] += bool(params.bad_words)
    counts["bias"] += bool(params.logit_bias)
    counts["outgrown"] += found.reason == "length" and len(found.tokens) < params.max_tokens
    counts["tokens"] += len(found.tokens)


LEAST = {
    "preemptions": 30, "hits": 25, "evictions": 100, "chunks": 100, "aborts": 15, "blocks in common": 100,
    "streamed": 60, "samples": 40, "grammar": 30, "stop string": 15, "stop id": 15, "log-probabilities": 500,
    "of prompts": 100, "penalties": 60, "bad words": 40, "bias": 40, "outgrown": 4, "end stop": 60, "end length": 60,
    "end abort": 15, "tokens": 2000, "failed steps": 12, "end error": 15,
}  # fmt: skip
"""Without these, the test would prove nothing."""


@pytest.fixture(scope="module")
def known():
    """What was computed alone."""
    return {}


@pytest.fixture
def lab(open_llm, monkeypatch, known):
    return Lab(open_llm, monkeypatch, known)


def test_every_request_gives_what_it_gives_alone(lab):
    for seed in SEEDS:
        check(lab, seed)
    assert {name: lab.counts[name] for name in LEAST if lab.counts[name] < LEAST[name]} == {}, lab.counts


@dataclass(frozen=True)
class Fault:
    """A change of one function's source, so that it is the shipped code that runs, but for one line."""

    name: str
    owner: object
    function: str
    old: str
    new: str

    def plant(self, patch):
        found = inspect.getattr_static(self.owner, self.function)
        plain = inspect.unwrap(found.fget if isinstance(found, property) else found)
        source = textwrap.dedent(inspect.getsource(plain))
        assert source.count(self.old) == 1, f"{self.function} has changed; plant this fault anew"
        names = dict(plain.__globals__)
        exec(compile(source.replace(self.old, self.new), self.function, "exec"), names)
        patch.setattr(self.owner, self.function, names[self.function])


FAULTS = [
    # arithmetic that no shadow runner computes
    Fault("a decode sees the rest of its block", sdpa, "_cut", " | (places >= stop)", ""),
    Fault("a begun block keeps what others left there", sdpa, "plan", "0 < context", "context < 0 < context"),
    Fault("a window is a token too long", sdpa, "_cut", "max(0, context - window)", "max(0, context - window - 1)"),
    Fault("a chunk sees its own beginning only", sdpa, "_attend_span", "size == context and", "size > 1 and"),
    Fault("padding counts as a piece", sdpa, "_cut", "bool((parts >= 0).all())", "True"),
    # what a request wants, in company and a step ahead
    Fault("a bias goes to the first row", sampler, "adjusted", "(row, token, bias)", "(0, token, bias)"),
    Fault("draws count known tokens", sampler, "settings", "span.stop for", "len(span.request.token_ids) for"),
    Fault("all rows draw with one seed", sampler, "settings", "span.request.seed for", "spans[0].request.seed for"),
    Fault("penalties do not see a pending token", sampler, "_unknown", "drawn.source(span)", "NO_TOKEN"),
    Fault("bad words do not see a pending token", sampler, "unsettled_bans", "if known(span):", "if True:"),
    Fault("min_tokens counts known tokens", Request, "too_short", "return stop", "return len(self.token_ids)"),
    Fault("the pending token is another row's", batches.Drawn, "source", "self._rows[span.request]", "0"),
    Fault("a grammar goes to the next row", GrammarMatcher, "mask", "torch.tensor(list(matchers))",
          "torch.tensor(list(matchers)).add(1).clamp(max=len(logits) - 1)"),
    Fault("a step that failed is booked", LLMEngine, "_settle", "raise self._failure(output, error) from error",
          "sampled = [None] * len(output.spans)"),
    # what comes back
    Fault("samples share a seed", engine, "sample_seed", "if index else seed", "if index > 1 else seed"),
    Fault("a stream repeats its text", LLMEngine, "_completion", "request.num_sent_chars += len(text)", "pass"),
    Fault("a prompt's log-probabilities are another row's", prompts, "score_prompts",
          "edge + places.start - span.start", "edge"),
    Fault("a piece of a prompt tells of its own first token", Request, "unscored", "max(start, ", "max(start - 1, "),
    Fault("a hit hides what has to be told", BlockManager, "admit", "unscored.start if unscored else ", ""),
    Fault("log-probabilities are the next row's", sampler.Samples, "sampled", "Sampled(token, scores, row)",
          "Sampled(token, scores, max(row - 1, self.first))"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_found(lab, fault):
    with pytest.raises((AssertionError, LookupError, ValueError, RuntimeError)):
        for seed in SEEDS:
            check(lab, seed, fault)
