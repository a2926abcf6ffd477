"""Penalties: the arithmetic by hand, what transformers makes of it, and the kernel beside its reference."""

import pytest
import torch

from nanovllm.ops.penalize import penalize, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = 2**40
"""No token is pending."""

# of each row: words as (token, count), the pending token, (repetition, frequency, presence)
Row = tuple[list[tuple[int, int]], int, tuple[float, float, float]]


def arguments(histories: dict[int, Row]) -> tuple[torch.Tensor, ...]:
    words, edges = [], [0]
    for counts, _, _ in histories.values():
        words += [count << 32 | token for token, count in counts]
        edges.append(len(words))
    ints = (list(histories), words, edges, [pending for _, pending, _ in histories.values()])
    strengths = torch.tensor([strength for *_, strength in histories.values()], device=DEVICE).reshape(-1, 3)
    return *(torch.tensor(each, dtype=torch.int64, device=DEVICE) for each in ints), strengths.T.contiguous()


def by_hand(logits: torch.Tensor, histories: dict[int, Row]) -> torch.Tensor:
    expected = logits.tolist()
    for row, (counts, pending, (repetition, frequency, presence)) in histories.items():
        count = dict(counts)
        if pending != NONE:
            count[pending] = count.get(pending, 0) + 1
        for token, number in count.items():
            x = expected[row][token]
            x = x / repetition if x > 0 else x * repetition
            expected[row][token] = x - frequency * number - presence * (number > 0)
    return torch.tensor(expected, device=logits.device)


def histories_of(vocab: int, rows: int) -> dict[int, Row]:
    """Every other row holds something: nothing at all, one token, or a part of the vocabulary, some of it pending."""
    drawn: dict[int, Row] = {}
    for row in range(0, rows, 2):
        tokens = torch.randperm(vocab)[: (0, 1, vocab // 2 + 1, vocab)[row // 2 % 4]].tolist()
        pending = NONE if row % 3 == 0 else (tokens[0] if tokens and row % 3 == 1 else row % vocab)
        counts = [(token, place % 4) for place, token in enumerate(tokens)]
        drawn[row] = (counts, pending, [(1.3, 0.0, 0.0), (1.0, 0.5, -1.5), (0.7, 2.0, 1.0)][row // 2 % 3])
    return drawn


def test_by_hand():
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0, 5.0]], device=DEVICE)
    row = ([(0, 0), (1, 2), (2, 1)], 1, (2.0, 0.5, 0.25))
    penalize(logits, *arguments({0: row}))
    assert logits.tolist() == [[1.0, -4.0 - 1.5 - 0.25, -0.75, 1.0, 5.0]]
    row = ([], 4, (2.0, 0.5, 0.25))
    penalize(logits, *arguments({0: row}))
    assert logits.tolist() == [[1.0, -5.75, -0.75, 1.0, 2.5 - 0.75]]


def doors():
    yield "reference", reference.penalize
    pytest.importorskip("triton")
    from nanovllm.ops.penalize import kernel

    yield "kernel", kernel.penalize


# one rounding to the type, of logits of spread 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1.3e-1}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (9, 31), (14, 1025), (5, 2500)])
def test_every_row_gets_its_own_penalties(rows, vocab, dtype):
    plain = (torch.randn(rows, vocab + 5, device=DEVICE) * 4).to(dtype)
    histories = histories_of(vocab, rows)
    expected = by_hand(plain[:, 2 : vocab + 2].float(), histories)
    for name, door in doors():
        padded = plain.clone()
        logits = padded[:, 2 : vocab + 2]
        door(logits, *arguments(histories))
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=TOLERANCE[dtype], msg=name)
        assert torch.equal(logits[1::2], plain[1::2, 2 : vocab + 2]), "rows without penalties"
        assert torch.equal(padded[:, :2], plain[:, :2]) and torch.equal(padded[:, vocab + 2 :], plain[:, vocab + 2 :])


def test_nothing_to_penalize():
    for _, door in doors():
        logits = torch.randn(2, 7, device=DEVICE)
        before = logits.clone()
        door(logits, *arguments({}))
        assert torch.equal(logits, before)


def test_missing_tokens_stay_missing():
    for _, door in doors():
        logits = torch.full((1, 3), -torch.inf, device=DEVICE)
        door(logits, *arguments({0: ([(0, 1), (1, 0)], 2, (0.5, -2.0, -2.0))}))
        assert logits.tolist() == [[-torch.inf] * 3]


def test_the_repetition_penalty_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([[3, 3, 8, 1, 3]])
    logits = torch.randn(1, 12)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    found = logits.to(DEVICE)
    penalize(found, *arguments({0: ([(3, 1), (8, 1)], 1, (1.7, 0.0, 0.0))}))
    torch.testing.assert_close(found.cpu(), expected)
