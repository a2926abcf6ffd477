"""Paged attention: the reference means the formula, and the backends mean the reference.

A case is a step as the scheduler makes it: requests with old tokens and new ones, blocks anywhere in the pool, and
a pool whose unused places hold what earlier requests left there (finite numbers, never NaN: the cache begins as
zeros).
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.ops import attention
from nanovllm.ops.attention import find_backend, reference

BACKENDS = ("sdpa",)
"""Those that run on a CPU as they are. ``test_attention_kernel`` has Triton's, ``test_attention_flash`` the others with
stand-ins for their libraries; ``test_every_backend_that_this_machine_has`` takes them all as they are, on its GPU."""

# Probabilities times values of unit size, summed in float32 in another order; the 16-bit types round the scores or
# the probabilities once more than the reference does (vLLM allows its kernels 1.5e-2 in bfloat16).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    tables: list[list[int]]

    def by_reference(self, scale: float, window: int | None, softcap: float | None = None) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()], dtype=torch.int32)
        longest = max(map(len, self.tables))
        table = torch.tensor([row + [-1] * (longest - len(row)) for row in self.tables], dtype=torch.int32)
        contexts = torch.tensor(self.context_lens, dtype=torch.int32)
        return reference.attend(self.query, self.keys, self.values, starts, contexts, table, scale, window, softcap)

    def by_backend(self, name: str, scale: float, window: int | None, plan: object = None) -> torch.Tensor:
        backend = find_backend(name, "cpu")
        plan = self.plan(name) if plan is None else plan
        return backend.attend(self.query, self.keys, self.values, plan, scale, window)

    def plan(self, name: str) -> object:
        return find_backend(name, "cpu").plan(
            self.query_lens, self.context_lens, self.tables, self.keys.shape[1], torch.device("cpu")
        )


def make_case(
    query_lens, context_lens, *, block_size, kv_heads=2, group=2, head_dim=16, dtype=torch.float32, seed=0,
    layout="scattered", garbage=100.0,
):  # fmt: skip
    """Draw a case. ``layout``: blocks "scattered" over the pool, or each request's "neighbours" in order.

    Places that no request has written hold ``garbage`` or minus it, at random.
    """
    torch.manual_seed(seed)
    # every second table has a block more than its tokens need yet, as while a prompt is computed in chunks
    sizes = [-(-context // block_size) + place % 2 for place, context in enumerate(context_lens)]
    num_blocks = sum(sizes) + 3
    ids = list(range(num_blocks))
    if layout == "scattered":
        random.Random(seed).shuffle(ids)
    tables, used = [], 2
    for size in sizes:
        tables.append(ids[used : used + size])
        used += size
    shape = (num_blocks, block_size, kv_heads, head_dim)
    keys, values = (torch.where(torch.rand(shape) < 0.5, garbage, -garbage) for _ in range(2))
    for context, table in zip(context_lens, tables, strict=True):
        for place in range(context):
            for cache in (keys, values):
                cache[table[place // block_size], place % block_size] = torch.randn(kv_heads, head_dim)
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim)
    return Case(query.to(dtype), keys.to(dtype), values.to(dtype), list(query_lens), list(context_lens), tables)


def check(case: Case, *, window: int | None = None, scale: float | None = None) -> None:
    scale = case.query.shape[2] ** -0.5 if scale is None else scale
    expected = case.by_reference(scale, window)
    for name in BACKENDS:
        out = case.by_backend(name, scale, window)
        assert out.dtype is case.query.dtype
        bound = TOLERANCE[out.dtype]
        torch.testing.assert_close(out, expected, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


def by_hand(case: Case, scale: float, window: int | None) -> torch.Tensor:
    """The formula, one number at a time."""
    block_size, heads = case.keys.shape[1], case.query.shape[1]
    group = heads // case.keys.shape[2]
    keys, values, query = (tensor.double().tolist() for tensor in (case.keys, case.values, case.query))
    out, row = [], 0
    for size, context, table in zip(case.query_lens, case.context_lens, case.tables, strict=True):
        for offset in range(size):
            place = context - size + offset
            seen = range(0 if window is None else max(0, place - window + 1), place + 1)
            for head in range(heads):
                lines = [(table[other // block_size], other % block_size, head // group) for other in seen]
                weights = [
                    math.exp(scale * sum(a * b for a, b in zip(query[row][head], keys[i][j][k], strict=True)))
                    for i, j, k in lines
                ]
                mixed = [
                    sum(weight * values[i][j][k][channel] for weight, (i, j, k) in zip(weights, lines, strict=True))
                    for channel in range(case.query.shape[2])
                ]
                out.append([value / sum(weights) for value in mixed])
            row += 1
    return torch.tensor(out, dtype=torch.float64).view(case.query.shape)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "block_size", "kv_heads", "group"),
    [([1], [1], 4, 1, 1), ([3, 1, 4], [3, 6, 9], 4, 2, 1), ([1, 2], [5, 2], 1, 1, 3), ([5], [5], 16, 3, 2)],
)
def test_the_reference_means_the_formula(query_lens, context_lens, block_size, kv_heads, group, window):
    case = make_case(query_lens, context_lens, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=4)
    torch.testing.assert_close(case.by_reference(0.4, window).double(), by_hand(case, 0.4, window), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_scores(softcap, window):
    """The reference caps each score before its softmax; a backend means the same, whatever else is in the step."""
    case = make_case([3, 1, 4, 1], [3, 6, 9, 1], block_size=4)
    found = case.by_reference(0.9, window, softcap)
    keys = case.keys[case.tables[1]].flatten(0, 1)[:6].repeat_interleave(2, dim=1)
    values = case.values[case.tables[1]].flatten(0, 1)[:6].repeat_interleave(2, dim=1)
    scores = torch.einsum("hd,chd->hc", case.query[3], keys) * 0.9
    weights = (softcap * torch.tanh(scores / softcap))[:, -(window or 6) :].softmax(-1)
    by_formula = torch.einsum("hc,chd->hd", weights, values[-(window or 6) :])
    torch.testing.assert_close(found[3], by_formula, rtol=1e-5, atol=1e-5)
    for name in BACKENDS:
        out = find_backend(name, "cpu").attend(
            case.query, case.keys, case.values, case.plan(name), 0.9, window, softcap=softcap
        )
        torch.testing.assert_close(out, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_mean_the_formula(name):
    case = make_case([3, 1, 1, 4], [3, 6, 2, 9], block_size=4, head_dim=4)
    torch.testing.assert_close(case.by_backend(name, 0.4, 3).double(), by_hand(case, 0.4, 3), rtol=0, atol=1e-6)


STEPS = {
    "one decode": ([1], [9]),
    "first token": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [3, 17, 1, 40]),
    "short decodes": ([1, 1, 1, 1, 1], [3, 4, 1, 2, 4]),
    "equal decodes": ([1, 1, 1], [4, 4, 4]),
    "fresh prefill": ([13], [13]),
    "fresh prefills": ([1, 5, 16, 33], [1, 5, 16, 33]),
    "chunk": ([6], [21]),
    "chunks": ([2, 8, 31], [21, 9, 32]),
    "mixed": ([1, 7, 1, 12, 1, 3, 1], [2, 7, 33, 30, 16, 3, 128]),
}


@pytest.mark.parametrize("layout", ["scattered", "neighbours"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_every_kind(step, block_size, layout):
    check(make_case(*STEPS[step], block_size=block_size, layout=layout, seed=block_size))


@pytest.mark.parametrize("window", [1, 2, 5, 7, 8, 16, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_windows(window, block_size):
    for step in ("decodes", "short decodes", "equal decodes", "fresh prefills", "chunks", "mixed"):
        for layout in ("scattered", "neighbours"):
            check(make_case(*STEPS[step], block_size=block_size, layout=layout, seed=window), window=window)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_heads(kv_heads, group, head_dim):
    case = make_case(*STEPS["mixed"], block_size=16, kv_heads=kv_heads, group=group, head_dim=head_dim, seed=group)
    check(case)
    check(case, window=6, scale=0.3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_types(dtype, window):
    for step in ("short decodes", "decodes", "fresh prefills", "mixed"):
        check(make_case(*STEPS[step], block_size=16, dtype=dtype, garbage=10.0), window=window)


@pytest.mark.parametrize("block_size", [4, 16])
def test_contexts_at_the_edges_of_blocks(block_size):
    for context in (block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1):
        for query in {1, 2, block_size, context - 1, context}:
            if query <= context:
                for window in (None, block_size, block_size + 1):
                    check(make_case([query, 1, query], [context, 2, context], block_size=block_size), window=window)


@pytest.mark.parametrize("seed", range(25))
def test_random_steps(seed):
    draw = random.Random(seed)
    contexts = [draw.choice((1, 2, 3, 4, 5, 15, 16, 17, 40, 64, 65)) for _ in range(draw.randint(1, 9))]
    queries = [draw.choice((1, 1, context, draw.randint(1, context))) for context in contexts]
    case = make_case(
        queries, contexts, block_size=draw.choice((1, 4, 16, 128)), kv_heads=draw.choice((1, 2)),
        group=draw.choice((1, 2, 3)), layout=draw.choice(("scattered", "neighbours")), seed=seed,
    )  # fmt: skip
    check(case, window=draw.choice((None, 1, 4, 17)))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_plan_serves_layers_with_and_without_a_window(name):
    case = make_case(*STEPS["mixed"], block_size=16)
    plan = case.plan(name)
    for window in (None, 5, None, 3, 5):
        torch.testing.assert_close(
            case.by_backend(name, 0.25, window, plan), case.by_reference(0.25, window), rtol=5e-6, atol=5e-6
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_block_and_a_row_of_one_number_are_not_mixed_up(name):
    """A batch of decodes that begins at block 2 and a chunk that begins at row 2 each need a mask of their own."""
    case = make_case([1, 1, 3], [4, 2, 4], block_size=4, layout="neighbours")
    assert case.tables[0] == [2]
    torch.testing.assert_close(case.by_backend(name, 0.25, None), case.by_reference(0.25, None), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 5])
def test_what_lies_in_unused_places_does_not_matter(name, window):
    outs = [
        make_case(*STEPS["mixed"], block_size=16, garbage=garbage).by_backend(name, 0.25, window)
        for garbage in (0.0, 1e4, -1e30)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", BACKENDS)
def test_the_arguments_are_left_alone(name):
    """But for places behind the last token of a request, in a block of its own."""
    case = make_case(*STEPS["mixed"], block_size=4)
    before = [tensor.clone() for tensor in (case.query, case.keys, case.values)]
    case.by_backend(name, 0.25, None)
    for context, table in zip(case.context_lens, case.tables, strict=True):
        if context % 4:
            for tensor in (case.keys, case.values, *before[1:]):
                tensor[table[context // 4], context % 4 :] = 0
    for tensor, copy in zip((case.query, case.keys, case.values), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_nan_left_behind_in_a_block_is_not_read_by_who_gets_it_next(name, window, chunk):
    """Prompts in chunks, and then decodes to the end of a block and beyond it: nobody writes all of a block first."""
    lengths = [3, 8, 17, 30, 1]
    case = make_case(lengths, lengths, block_size=8, garbage=torch.nan)
    written = [(tensor.clone(), tensor.fill_(torch.nan))[0] for tensor in (case.keys, case.values)]
    done = [0] * len(lengths)
    while any(now < length for now, length in zip(done, lengths, strict=True)):
        turns = [place for place, length in enumerate(lengths) if done[place] < length]
        sizes = [min(chunk, lengths[place] - done[place]) if done[place] < 2 * chunk else 1 for place in turns]
        for place, size in zip(turns, sizes, strict=True):
            for token in range(done[place], done[place] + size):
                slot = case.tables[place][token // 8], token % 8
                for tensor, whole in zip((case.keys, case.values), written, strict=True):
                    tensor[slot] = whole[slot]
            done[place] += size
        step = replace(
            case, query=torch.randn(sum(sizes), 4, 16), query_lens=sizes, context_lens=[done[place] for place in turns],
            tables=[case.tables[place] for place in turns],
        )  # fmt: skip
        torch.testing.assert_close(step.by_backend(name, 0.25, window), step.by_reference(0.25, window))


@pytest.mark.parametrize("name", BACKENDS)
def test_query_rows_may_be_a_slice_of_the_projection(name):
    case = make_case(*STEPS["mixed"], block_size=4)
    wide = torch.randn(case.query.shape[0], 9, 16)
    wide[:, 2:6] = case.query
    sliced = Case(wide[:, 2:6], case.keys, case.values, case.query_lens, case.context_lens, case.tables)
    assert torch.equal(sliced.by_backend(name, 0.25, None), case.by_backend(name, 0.25, None))


@pytest.mark.parametrize("name", attention.BACKENDS)
def test_every_backend_that_this_machine_has(name):
    """On the GPU if there is one, in its own favourite block size. The others are skipped with the reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backend = find_backend(name, device.type, (64, None, torch.float16))
    except ConfigError as error:
        pytest.skip(str(error))
    for step in ("decodes", "fresh prefills", "chunks", "mixed"):
        case = make_case(*STEPS[step], block_size=backend.PREFERRED_BLOCK_SIZE, head_dim=64, dtype=torch.float16)
        query, keys, values = (tensor.to(device) for tensor in (case.query, case.keys, case.values))
        plan = backend.plan(case.query_lens, case.context_lens, case.tables, keys.shape[1], device)
        for window in (None, 1, 5, 16):
            out = backend.attend(query, keys, values, plan, 0.2, window).cpu()
            torch.testing.assert_close(out, case.by_reference(0.2, window), rtol=4e-3, atol=4e-3)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"attention_backend is 'flash'.*flash_attn.*sdpa"):
        find_backend("flash", "cpu")


@pytest.mark.parametrize("window", [None, 9])
def test_a_decode_has_the_same_bits_alone_and_in_company(window):
    """Each row's sums run over one block, so neither the number of rows nor the neighbours' lengths change them."""
    torch.manual_seed(3)
    keys, values = torch.randn(2, 24, 16, 3, 64).unbind()
    contexts = [1, 15, 16, 17, 40, 64, 65, 33]
    blocks = iter(torch.randperm(24).tolist() * 2)
    tables = [[next(blocks) for _ in range(-(-context // 16))] for context in contexts]
    query = torch.randn(len(contexts), 9, 64)

    sdpa = find_backend("sdpa", "cpu")

    def decode(rows: list[int]) -> torch.Tensor:
        device = torch.device("cpu")
        step = sdpa.plan([1] * len(rows), [contexts[row] for row in rows], [tables[row] for row in rows], 16, device)
        return sdpa.attend(query[rows], keys, values, step, 0.125, window)

    together = decode(list(range(len(contexts))))
    for row in range(len(contexts)):
        assert torch.equal(decode([row])[0], together[row])
    assert torch.equal(decode([5, 2, 7])[1], together[2])
