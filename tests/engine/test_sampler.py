"""The sampler as requests see it: each row by its own rules, in vLLM's order, blind to the other rows."""

import math
import random

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.batch import Drawn
from nanovllm.request import Request, Sampled
from nanovllm.sampler import adjusted, plain, sample
from nanovllm.scheduler import Span

VOCAB = 50
INF = math.inf


def make_request(
    place: int, *, eos: tuple[int, ...] = (), length: int = 3, output: list[int] | None = None,
    words: tuple[tuple[int, ...], ...] = (), **params,
) -> Request:  # fmt: skip
    """A request with a prompt of 3 tokens, and an output, else one as long as makes ``length`` tokens."""
    params = SamplingParams(**params)
    request = Request(
        request_id=str(place), prompt_token_ids=[1, 2, 3], params=params, max_tokens=99, arrival=place,
        seed=place if params.seed is None else params.seed, eos_token_ids=frozenset(eos), bad_words=words,
    )  # fmt: skip
    for token in [4] * (length - 3) if output is None else output:
        request.append(Sampled(token))
    return request


def spans(requests: list[Request]) -> list[Span]:
    """Each request's last known token, after which the next one is drawn."""
    return [Span(request, len(request.token_ids) - 1, len(request.token_ids), True) for request in requests]


def drawn_by(logits: torch.Tensor, requests: list[Request]) -> list[Sampled]:
    return sample(logits, spans(requests)).sampled()


KINDS = [
    dict(temperature=0.0), dict(), dict(temperature=0.3), dict(temperature=2.0, top_k=5), dict(top_p=0.3),
    dict(top_k=9, top_p=0.7, temperature=0.5), dict(temperature=0.0, logprobs=3), dict(logprobs=4, top_k=1),
    dict(min_tokens=5, stop_token_ids=[7, 8]), dict(min_tokens=9, stop_token_ids=[4], temperature=0.0),
    dict(seed=-5), dict(seed=2**63 - 1), dict(seed=-(2**63)),
    dict(presence_penalty=1.5, frequency_penalty=-0.5), dict(repetition_penalty=1.4, temperature=0.0),
    dict(min_p=0.2), dict(logit_bias={3: 2.0, 9: -100}, logprobs=2), dict(allowed_token_ids=[5, 6, 7], logprobs=0),
    dict(words=((4, 4, 8), (9,), (4, 10), (1, 4))), dict(logprob_token_ids=[3, 40]),
    dict(logprob_token_ids=[49], logprobs=3, frequency_penalty=2.0, words=((4, 4),), temperature=0.0),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_a_row_is_drawn_as_if_it_were_alone(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    requests = [
        make_request(place, length=draw.randint(3, 40), **draw.choice(KINDS)) for place in range(draw.randint(1, 20))
    ]
    logits = torch.randn(len(requests), VOCAB)
    before = logits.clone()
    together = drawn_by(logits, requests)
    assert torch.equal(logits, before)
    for row, request in enumerate(requests):
        (alone,) = drawn_by(logits[row : row + 1], [request])
        assert alone.token_id == together[row].token_id
        assert (alone.logprobs is None) == (request.params.num_logprobs is None)
        if alone.logprobs is not None:
            assert list(alone.logprobs) == list(together[row].logprobs)


def test_seed_and_position_decide():
    logits = torch.zeros(1, VOCAB)

    def token(seed: int, length: int, place: int = 0) -> int:
        return drawn_by(logits, [make_request(place, length=length, seed=seed)])[0].token_id

    assert token(5, 10) == token(5, 10, place=3)
    by_seed = [token(seed, 10) for seed in range(200)]
    by_position = [token(5, length) for length in range(3, 203)]
    for tokens in (by_seed, by_position):
        assert len(set(tokens)) > 40  # of 50; 200 fair draws miss one with probability 0.6


def test_the_order_of_the_filters():
    """Temperature before top-p, top-k before top-p: shares of 8 4 2 1 1 at temperature 1."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log()

    def support(**params) -> set[int]:
        return {drawn_by(logits, [make_request(0, seed=seed, **params)])[0].token_id for seed in range(200)}

    assert support(top_p=0.6) == {0, 1}
    assert support(top_p=0.6, top_k=2) == {0}  # 8 of the 12 that are left
    assert support(top_p=0.6, temperature=0.5) == {0}  # 64 of 86
    assert support(top_p=0.6, temperature=2.0) == {0, 1, 2}  # roots: 2.83 2 1.41 1 1 of 8.24
    assert support(top_k=3) == {0, 1, 2}
    assert support(top_k=4) == {0, 1, 2, 3, 4}  # the fifth ties with the fourth
    assert support(top_k=500) == support(top_k=-1) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_ids_are_banned_before_min_tokens(temperature):
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0]) * 20
    rules = dict(temperature=temperature, min_tokens=2, stop_token_ids=[8], logprobs=1)
    (early,) = drawn_by(logits, [make_request(0, eos=(7,), length=4, **rules)])
    assert early.token_id == 9
    assert early.logprobs[9].rank == 3  # as the model sees it: nothing is banned there
    (late,) = drawn_by(logits, [make_request(0, eos=(7,), length=5, **rules)])
    assert late.token_id == 7


def test_greedy_ties_take_the_lowest_id():
    logits = torch.zeros(2, VOCAB)
    logits[1, [30, 10, 20]] = 1.0
    drawn = drawn_by(
        logits, [make_request(0, temperature=0.0, logprobs=0), make_request(1, temperature=0.0, logprobs=0)]
    )
    assert [one.token_id for one in drawn] == [0, 10]
    assert [one.logprobs[one.token_id].rank for one in drawn] == [1, 1]


def test_logprobs_are_the_log_softmax():
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB) * 3
    expected = logits[0].double().log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    (drawn,) = drawn_by(logits, [make_request(0, logprobs=10, temperature=2.0, seed=3)])
    assert next(iter(drawn.logprobs)) == drawn.token_id
    for token, entry in drawn.logprobs.items():
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert entry.rank == order.index(token) + 1
    assert set(drawn.logprobs) == {drawn.token_id, *order[:10]}


def test_more_logprobs_than_tokens():
    (drawn,) = drawn_by(torch.zeros(1, 3), [make_request(0, logprobs=20)])
    assert sorted(drawn.logprobs) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_rows_harm_no_other(temperature):
    torch.manual_seed(2)
    logits = torch.randn(5, VOCAB)
    params = dict(temperature=temperature, top_k=10, top_p=0.9)
    requests = [make_request(place, **params) for place in range(5)]
    clean = drawn_by(logits, requests)
    logits[1] = -torch.inf
    logits[1, 33] = 0.0
    logits[2] = torch.nan
    logits[3, 4] = 1e4
    tokens = [one.token_id for one in drawn_by(logits, requests)]
    assert [tokens[0], tokens[4]] == [clean[0].token_id, clean[4].token_id]
    assert tokens[1] == 33
    assert tokens[2] == -1
    assert tokens[3] == 4


def test_a_request_is_read_as_of_its_span():
    """Tokens that came to be known since, or that are still under way, change nothing."""
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB)
    for params in (dict(seed=4), dict(seed=4, min_tokens=6, stop_token_ids=range(0, VOCAB, 2))):
        known, behind, ahead = (make_request(0, length=length, **params) for length in (8, 7, 10))
        span = Span(known, 7, 8, True)
        expected = sample(logits, [span]).sampled()
        assert sample(logits, [Span(behind, 7, 8, True)]).sampled() == expected
        assert sample(logits, [Span(ahead, 7, 8, True)]).sampled() == expected
        assert span.request.banned(span.stop) == frozenset(params.get("stop_token_ids", ()))
    assert known.banned(9) == frozenset()  # 6 tokens after a prompt of 3


def test_what_may_not_be_drawn_before_min_tokens():
    """Ids that end a request, its own and the model's, until it has its least number of tokens."""
    request = make_request(0, length=9, min_tokens=2, stop_token_ids=[5])
    request.eos_token_ids = frozenset({7})
    prompt = len(request.prompt_token_ids)
    found = [request.banned(prompt + n) for n in range(4)]
    assert found == [{5, 7}, {5, 7}, frozenset(), frozenset()]
    assert make_request(0, length=9).banned(8) == frozenset()


# What changes logits


def by_hand(row: list[float], request: Request) -> list[float]:
    """Allowed ids, bad words, min_tokens, bias, penalties, in that order."""
    params, output = request.params, request.token_ids[len(request.prompt_token_ids) :]
    row = [
        x if not params.allowed_token_ids or token in params.allowed_token_ids else -INF for token, x in enumerate(row)
    ]
    for *start, last in request.bad_words:
        if output[len(output) - len(start) :] == start and len(output) >= len(start):
            row[last] = -INF
    if len(output) < params.min_tokens:
        row = [-INF if token in {*request.eos_token_ids, *params.stop_token_ids} else x for token, x in enumerate(row)]
    row = [x + (params.logit_bias or {}).get(token, 0.0) for token, x in enumerate(row)]
    for token in set(request.token_ids):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    return row


def random_request(draw: random.Random, place: int) -> Request:
    tokens = range(VOCAB)
    rules = {
        "presence_penalty": draw.uniform(-2, 2), "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2), "logit_bias": {draw.choice(tokens): draw.uniform(-5, 5)},
        "allowed_token_ids": draw.sample(tokens, 30), "stop_token_ids": draw.sample(tokens, 5),
        "words": tuple(tuple(draw.choices(range(6), k=draw.randint(1, 3))) for _ in range(40)),
    }  # fmt: skip
    rules = {name: rule for name, rule in rules.items() if draw.random() < 0.4}
    output = draw.choices(range(6), k=draw.choice([0, 1, 2, 5, 30]))
    return make_request(place, eos=(7,), output=output, min_tokens=draw.choice([0, 3]), temperature=0.0, **rules)


@pytest.mark.parametrize("seed", range(20))
def test_logits_are_changed_as_by_hand(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.randn(12, VOCAB) * 3
    before = logits.clone()
    requests = [random_request(draw, place) for place in range(12)]
    expected = torch.tensor([by_hand(row, request) for row, request in zip(logits.tolist(), requests, strict=True)])
    found = adjusted(logits, spans(requests), None)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)
    for row, request in enumerate(requests):
        alone = adjusted(logits[row : row + 1], spans([request]), None)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("seed", range(20))
def test_a_token_that_only_the_device_knows_counts(seed):
    """The last token is in a row of what the step before drew, and the answer is that of one who knows it."""
    draw = random.Random(seed)
    logits = torch.randn(8, VOCAB)
    requests = [random_request(draw, place) for place in range(8)]
    behind, pending = [], []
    for place, request in enumerate(requests):
        output = request.token_ids[len(request.prompt_token_ids) :]
        lags = output and draw.random() < 0.7
        one = Request(
            request_id=str(place), prompt_token_ids=[1, 2, 3], params=request.params, max_tokens=99, arrival=place,
            eos_token_ids=request.eos_token_ids, bad_words=request.bad_words,
        )  # fmt: skip
        for token in output[:-1] if lags else output:
            one.append(Sampled(token))
        behind.append(one)
        pending.append(request.token_ids[-1])
    drawn = Drawn(9, torch.device("cpu"))
    order = draw.sample(range(8), 8)
    both = spans(requests)
    drawn.keep([Span(behind[place], 0, 1, True) for place in order], torch.tensor([pending[place] for place in order]))
    there = [Span(one, span.start, span.stop, True) for one, span in zip(behind, both, strict=True)]
    assert any(span.stop > len(span.request.token_ids) for span in there)
    assert torch.equal(adjusted(logits, there, drawn), adjusted(logits, both, None))


def test_rows_without_rules_cost_nothing():
    logits = torch.randn(3, VOCAB)
    requests = [make_request(place, **kind) for place, kind in enumerate([dict(), dict(top_k=3), dict(logprobs=3)])]
    assert adjusted(logits, spans(requests), None) is logits
    assert [plain(span) for span in spans(requests)] == [True, True, False]
    for rule in (dict(presence_penalty=0.1), dict(logit_bias={1: 1.0}), dict(allowed_token_ids=[1]), dict(min_tokens=1),
                 dict(words=((1,),)), dict(logprob_token_ids=[2])):  # fmt: skip
        assert not plain(*spans([make_request(0, **rule)])), rule


def test_penalties_of_16_bit_logits_are_not_rounded_away():
    logits = torch.full((1, VOCAB), 30.0, dtype=torch.bfloat16)  # whose neighbour is 30.125
    request = make_request(0, output=[5], frequency_penalty=0.01, temperature=0.0)
    found = adjusted(logits, spans([request]), None)
    assert found.dtype is torch.float32 and float(found[0, 5]) == pytest.approx(29.99)


def test_bad_words_and_min_p_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    output, words = [4, 5, 5, 6, 5], ((9,), (5, 6), (6, 5, 7), (5, 5, 8), (6, 5, 5), (6, 6))
    logits = torch.randn(1, VOCAB)
    ids = torch.tensor([[1, 2, 3, *output]])
    processor = transformers.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=49)
    found = adjusted(logits, spans([make_request(0, output=output, words=words)]), None)
    expected = processor(ids, logits.clone())
    assert torch.equal(found, expected) and (expected[0] == -INF).nonzero().flatten().tolist() == [5, 6, 7, 9]
    for min_p in (0.02, 0.1, 0.5):
        expected = transformers.MinPLogitsWarper(min_p)(ids, logits.clone())
        kept = {drawn_by(logits, [make_request(0, min_p=min_p, seed=seed)])[0].token_id for seed in range(400)}
        assert kept <= set((expected[0] > -INF).nonzero().flatten().tolist())


# What log-probabilities are of


def test_the_four_modes_of_log_probabilities():
    logits = torch.randn(3, VOCAB)
    rules = dict(logprobs=4, logprob_token_ids=[8, 9], frequency_penalty=1.0, output=[8, 8, 4])
    requests = [
        make_request(0, temperature=0.5, top_k=3, **rules),
        make_request(1, temperature=0.0, **rules),
        make_request(2),
    ]
    penalized = adjusted(logits, spans(requests), None)
    scaled = penalized / torch.tensor([[0.5], [1.0], [1.0]])
    scaled[0, scaled[0] < scaled[0].topk(3).values[-1]] = -INF
    expected = {
        "raw_logits": logits, "raw_logprobs": logits.log_softmax(-1),
        "processed_logits": scaled, "processed_logprobs": scaled.log_softmax(-1),
    }  # fmt: skip
    tokens = {}
    for mode, values in expected.items():
        drawn = sample(logits, spans(requests), logprobs_mode=mode).sampled()
        tokens[mode] = [one.token_id for one in drawn]
        assert drawn[2].logprobs is None
        for row in (0, 1):
            found = drawn[row].logprobs
            assert next(iter(found)) == drawn[row].token_id and {8, 9} <= set(found)
            best = values[row].topk(4)
            assert {int(token) for token, value in zip(best.indices, best.values, strict=True) if value > -INF} <= set(
                found
            )
            for token, entry in found.items():
                assert entry.logprob == pytest.approx(float(values[row, token]), abs=1e-5)
                if entry.rank is not None and entry.logprob > -INF:
                    assert entry.rank == 1 + int((values[row] > values[row, token]).sum())
    assert len(set(map(tuple, tokens.values()))) == 1, "the mode changes no token"


def test_all_log_probabilities():
    (drawn,) = drawn_by(torch.randn(1, VOCAB), [make_request(0, logprobs=-1)])
    assert set(drawn.logprobs) == set(range(VOCAB))
    assert sorted(entry.rank for entry in drawn.logprobs.values()) == list(range(1, VOCAB + 1))


def test_ids_asked_for_by_name_come_last_and_without_a_rank():
    logits = torch.arange(float(VOCAB))[None]
    (drawn,) = drawn_by(logits, [make_request(0, logprobs=2, logprob_token_ids=[3, 48, 49, 7], temperature=0.0)])
    assert list(drawn.logprobs) == [49, 48, 3, 7]
    assert [entry.rank for entry in drawn.logprobs.values()] == [1, 2, None, None]
    (drawn,) = drawn_by(logits, [make_request(0, logprob_token_ids=[3], temperature=0.0)])
    assert list(drawn.logprobs) == [49, 3]


def test_the_drawn_token_and_the_best_one_have_one_value():
    logits = torch.randn(6, VOCAB) * 8
    for one in drawn_by(logits, [make_request(place, temperature=0.0, logprobs=1) for place in range(6)]):
        assert len(one.logprobs) == 1
    samples = sample(logits, spans([make_request(place, temperature=0.0, logprobs=1) for place in range(6)]))
    assert torch.equal(samples.logprobs[0], samples.logprobs[2][:, 0])


def test_greedy_rows_cost_one_argmax(monkeypatch):
    monkeypatch.setattr("nanovllm.sampler.choose", None)
    monkeypatch.setattr("nanovllm.sampler.send", None)
    assert drawn_by(torch.eye(4, VOCAB), [make_request(place, temperature=0.0) for place in range(4)]) == [
        Sampled(place) for place in range(4)
    ]


def test_a_copy_on_the_host_says_the_same():
    torch.manual_seed(4)
    requests = [make_request(place, logprobs=number) for place, number in enumerate((None, 3, None, 0, 5, None))]
    drawn = sample(torch.randn(6, VOCAB), spans(requests))
    copied = drawn.to_host().sampled()
    assert [(one.token_id, one.logprobs) for one in copied] == [(one.token_id, one.logprobs) for one in drawn.sampled()]
    assert [len(one.logprobs) if one.logprobs else 0 for one in drawn.sampled()][::2] == [
        0,
        0,
        6 - drawn_in_best(drawn),
    ]


def drawn_in_best(drawn) -> bool:
    """Whether the fifth row's token is one of its five best."""
    return bool((drawn.logprobs[3][4 - drawn.first] == drawn.tokens[4]).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits_are_taken_as_they_are(dtype):
    torch.manual_seed(5)
    logits = torch.randn(len(KINDS), VOCAB).to(dtype)
    requests = [make_request(place, **kind) for place, kind in enumerate(KINDS)]
    narrow, wide = drawn_by(logits, requests), drawn_by(logits.float(), requests)
    assert [one.token_id for one in narrow] == [one.token_id for one in wide]
    for one, other in zip(narrow, wide, strict=True):
        if one.logprobs is not None:
            assert [entry.logprob for entry in one.logprobs.values()] == pytest.approx(
                [entry.logprob for entry in other.logprobs.values()], abs=1e-6
            )


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws():
    torch.manual_seed(6)
    logits = torch.randn(len(KINDS) * 20, 151_936) * 3
    requests = [make_request(place, **KINDS[place % len(KINDS)]) for place in range(len(logits))]
    drawn = sample(logits.cuda(), spans(requests)).to_host()
    torch.cuda.synchronize()
    here, there = drawn.sampled(), drawn_by(logits, requests)
    assert sum(one.token_id != other.token_id for one, other in zip(here, there, strict=True)) <= 1
    for one, other in zip(here, there, strict=True):
        if one.token_id == other.token_id and one.logprobs is not None:
            assert list(one.logprobs) == list(other.logprobs)
            for token, entry in one.logprobs.items():
                assert entry.rank == other.logprobs[token].rank
                assert entry.logprob == pytest.approx(other.logprobs[token].logprob, abs=1e-4)


@pytest.mark.gpu
def test_drawing_waits_for_nothing():
    logits = torch.randn(len(KINDS), 151_936, device="cuda", dtype=torch.bfloat16)
    requests = spans([make_request(place, **kind) for place, kind in enumerate(KINDS)])
    sample(logits, requests)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = sample(logits, requests).to_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(drawn.sampled()) == len(KINDS)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_a_gpu_changes_logits_as_a_cpu_does(seed):
    draw = random.Random(seed)
    logits = torch.randn(12, VOCAB) * 3
    both = spans([random_request(draw, place) for place in range(12)])
    torch.testing.assert_close(
        adjusted(logits.cuda(), both, None).cpu(), adjusted(logits, both, None), rtol=0, atol=1e-5
    )
