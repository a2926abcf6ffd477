"""Attention that is told where prompts end: a token's place alone decides its kernel, however spans are cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nanovllm.ops.attention import paged, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 16


def make_plan(query_lens, context_lens, prompt_lens, tables=None):
    tables = tables or [list(range(100)) for _ in query_lens]
    return paged.plan(query_lens, context_lens, tables, BLOCK, DEVICE, prompt_lens=prompt_lens)


def listed(plan):
    """(rows and contexts of decodes, rows and positions of pieces), in the order of rows."""
    decodes = sorted((row, context) for row, context, *_ in plan.decodes.tolist())
    pieces = sorted((row, size, position) for row, size, position, _ in plan.pieces.tolist())
    return decodes, pieces


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "prompt_lens", "decodes", "pieces"),
    [
        ([1], [7], [6], [(0, 7)], []),  # the first drawn token
        ([1], [6], [6], [], [(0, 1, 5)]),  # the last token of a prompt, alone in its span
        ([1], [1], [1], [], [(0, 1, 0)]),
        ([4], [4], [9], [], [(0, 4, 0)]),
        ([5], [8], [6], [(3, 7), (4, 8)], [(0, 3, 3)]),  # preempted with two tokens drawn, resumed behind three
        ([3], [9], [4], [(0, 7), (1, 8), (2, 9)], []),
        ([130], [131], [130], [(129, 131)], [(0, 128, 1), (128, 1, 129)]),
        (
            [1, 2, 1, 4, 1], [5, 2, 9, 6, 30], [5, 9, 3, 4, 29],
            [(3, 9), (6, 5), (7, 6), (8, 30)], [(0, 1, 4), (1, 2, 0), (4, 2, 2)],
        ),
    ],
)  # fmt: skip
def test_routes(query_lens, context_lens, prompt_lens, decodes, pieces):
    plan = make_plan(query_lens, context_lens, prompt_lens)
    assert listed(plan) == (decodes, pieces)
    assert plan.one_tile
    assert plan.longest == max((context for _, context in decodes), default=0)
    assert plan.total == sum(context for _, context in decodes)


def test_decodes_of_one_request_share_its_table():
    plan = make_plan([1, 3], [20, 40], [19, 38], [[7, 8], [1, 2, 3]])
    assert {tuple(row[:3]) for row in plan.decodes.tolist()} == {(0, 20, 0), (2, 39, 2), (3, 40, 2)}
    assert plan.tables.tolist() == [7, 8, 1, 2, 3]


def test_without_prompts_a_span_of_one_is_a_decode():
    plan = make_plan([1, 2], [6, 9], None)
    assert listed(plan) == ([(0, 6)], [(1, 2, 7)])
    assert not plan.one_tile


def case(contexts):
    generator = torch.Generator().manual_seed(3)
    sizes = [-(-context // BLOCK) for context in contexts]
    ids = torch.randperm(sum(sizes), generator=generator).tolist()
    tables = [ids[sum(sizes[:place]) : sum(sizes[: place + 1])] for place in range(len(sizes))]
    shape = (sum(sizes), BLOCK, KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    queries = [torch.randn(context, HEADS, HEAD_DIM, generator=generator).to(DEVICE) for context in contexts]
    return queries, keys, values, tables


def attend(queries, keys, values, tables, starts, stops, prompts, processors=1):
    query = torch.cat([each[start:stop] for each, start, stop in zip(queries, starts, stops, strict=True)])
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    plan = replace(make_plan(sizes, stops, prompts, tables), processors=processors)
    return paged.attend(query, keys, values, plan, HEAD_DIM**-0.5)


def test_spans_with_drawn_tokens_mean_the_reference():
    contexts, prompts, starts = [70, 33, 300, 20], [60, 33, 298, 4], [50, 32, 270, 0]
    queries, keys, values, tables = case(contexts)
    out = attend(queries, keys, values, tables, starts, contexts, prompts)
    most = max(map(len, tables))
    expected = reference.attend(
        torch.cat([each[start:] for each, start in zip(queries, starts, strict=True)]), keys, values,
        torch.tensor([0, *np.cumsum([stop - start for start, stop in zip(starts, contexts, strict=True)]).tolist()]),
        torch.tensor(contexts),
        torch.tensor([table + [-1] * (most - len(table)) for table in tables], device=DEVICE),
        HEAD_DIM**-0.5, None,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=5e-6, atol=5e-6)


def same_bits(out, expected, what):
    """On a GPU. NumPy's products, which the interpreter takes, differ by a row's place on some processors."""
    if DEVICE.type == "cuda":
        assert torch.equal(out, expected), what
    else:
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("processors", [1, 100_000])  # contexts stay whole, or every chunk is a program
def test_cuts_and_company_change_no_bit(processors):
    """One request of 300 tokens, 297 of them its prompt: in one span, token by token, cut anywhere, among others."""
    contexts, prompts = [300, 40, 77], [297, 37, 77]
    queries, keys, values, tables = case(contexts)
    whole = attend(queries[:1], keys, values, tables[:1], [0], [300], prompts[:1])
    for cut in (1, 63, 128, 296, 297, 298, 299) if DEVICE.type == "cuda" else (63, 296, 297, 298):
        first, second = (
            attend(queries[:1], keys, values, tables[:1], [start], [stop], prompts[:1], processors)
            for start, stop in ((0, cut), (cut, 300))
        )
        same_bits(torch.cat((first, second)), whole, cut)
    for place in (0, 31, 295, 296, 297, 299):
        alone = attend(queries[:1], keys, values, tables[:1], [place], [place + 1], prompts[:1], processors)
        same_bits(alone[0], whole[place], place)
    together = attend(queries, keys, values, tables, [280, 0, 76], contexts, prompts, processors)
    same_bits(together[:20], whole[280:], "together")
