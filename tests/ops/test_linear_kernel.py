"""The kernels for few rows mean what the reference says; beyond their limit the front door goes without them."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops import overlap
from nanovllm.ops.activation import ACTIVATIONS, gate_times_up
from nanovllm.ops.linear import few_rows, kernel, reference
from nanovllm.ops.linear.kernel import FEW, FEW_ROWS, MAX_ROWS, Tile
from nanovllm.ops.linear.product import Product
from nanovllm.ops.rms_norm import add_rms_norm, whole

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6

# Inputs are drawn so that results have unit size. float32: sums of up to 3000 products in another order. 16 bits: the
# result is rounded once on each side, and an input that the norm rounds to the other side moves the sum by less.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
if DEVICE == "cpu":  # Triton's interpreter cuts bfloat16 where it should round: sum, norm, scaled norm and result
    TOLERANCE[torch.bfloat16] = 8 * 2**-7

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_residual = pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "none"])

# rows, inputs, outputs: every number of rows where the kernels differ, every size that leaves a rest
FEW_SHAPES = [(1, 576, 7), (1, 1000, 1), (1, 96, 1009), (1, 5, 3), (2, 1536, 7), (3, 1000, 7), (4, 96, 33)]
SHAPES = [
    *FEW_SHAPES, (4, 1536, 1), (5, 96, 576), (8, 1000, 7), (9, 5, 3), (16, 3100, 33), (17, 1024, 9),
    (MAX_ROWS, 96, 1009), (MAX_ROWS, 1000, 7), (MAX_ROWS - 1, 40, 2100),
]  # fmt: skip


def supported(rows, dtype, limit=FEW_ROWS):
    """Skip what has no kernel, and what the interpreter gets wrong: tl.dot of bfloat16. ``limit``: rows without it."""
    if rows > kernel.most_rows(dtype):
        pytest.skip("float32 has no matrix units: a call has fewer rows")
    if rows > limit and dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("tl.dot is wrong for bfloat16 in Triton's interpreter")


def draw(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def apart(rows, width, dtype):
    """Rows that lie apart, with NaN between them: one that is read beyond its end shows."""
    padded = torch.full((rows, width + 11), torch.nan, device=DEVICE, dtype=dtype)
    padded[:, 3 : width + 3] = draw(rows, width, dtype=dtype)
    return padded[:, 3 : width + 3]


def arguments(rows, inputs, outputs, dtype):
    """Rows, what may be added to a result, the gain of a norm in front, a weight."""
    x, residual = apart(rows, inputs, dtype), apart(rows, outputs, dtype)
    return x, residual, draw(inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)


def norm_linear(x, gain, weight, bias=None):
    """The reference, less its rounding between the norm and the product, which the kernels do not have."""
    wide = None if bias is None else bias.float()
    return reference.norm_linear(x.float(), None, gain.float(), EPS, weight.float(), wide)[0].to(x.dtype)


def close(actual, expected, factor=1):
    assert actual.dtype is expected.dtype and actual.is_contiguous()
    tolerance = factor * TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same_total(actual, expected):
    """One addition and one rounding: nothing is left to differ."""
    if actual.dtype is torch.bfloat16 and DEVICE == "cpu":
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(actual, expected)


@each_dtype
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear(rows, inputs, outputs, dtype):
    supported(rows, dtype)
    x, _, _, weight = arguments(rows, inputs, outputs, dtype)
    bias = draw(outputs, dtype=dtype) if rows % 2 else None
    close(kernel.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("rows", range(3, MAX_ROWS + 1))
def test_all_numbers_of_rows(rows):
    x, _, _, weight = arguments(rows, 200, 18, torch.float16)
    close(kernel.linear(x, weight), reference.linear(x, weight))
    close(kernel.gated(x, weight, None, "silu"), reference.gated(x, weight, None, "silu"), factor=4)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inputs", "width"), [(1, 576, 7), (2, 1000, 1), (3, 96, 33), (8, 576, 5), (16, 1100, 9), (MAX_ROWS, 96, 7)]
)
def test_gated(rows, inputs, width, activation, dtype):
    supported(rows, dtype)
    x, _, _, weight = arguments(rows, inputs, 2 * width, dtype)
    bias = draw(2 * width, dtype=dtype) if rows % 2 else None
    out = kernel.gated(x, weight, bias, activation)
    close(out, reference.gated(x, weight, bias, activation), factor=4)  # gate and up are a rounding off each


@each_dtype
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [shape for shape in SHAPES if shape[2] < 600])
def test_plus(rows, inputs, outputs, dtype):
    supported(rows, dtype)
    x, residual, _, weight = arguments(rows, inputs, outputs, dtype)
    bias = draw(outputs, dtype=dtype) if rows % 2 else None
    before = residual.clone()
    out = kernel.plus(x, residual, weight, bias)
    close(out, reference.linear(x, weight, bias) + residual, factor=2)
    assert torch.equal(residual, before) and out.is_contiguous()


@each_dtype
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [shape for shape in SHAPES if shape[2] < 600])
def test_norm_linear(rows, inputs, outputs, dtype):
    supported(rows, dtype)
    if rows > kernel.norm_rows(dtype):
        pytest.skip("this type has no room for it")
    x, _, gain, weight = arguments(rows, inputs, outputs, dtype)
    bias = draw(outputs, dtype=dtype) if rows % 2 else None
    before = x.clone()
    close(kernel.norm_linear(x * 7, gain, EPS, weight, bias), norm_linear(x * 7, gain, weight, bias), factor=2)
    assert torch.equal(x, before)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inputs", "width"), [(1, 576, 7), (2, 1000, 1), (3, 96, 33), (4, 1100, 5), (8, 576, 9), (16, 1100, 3)]
)
def test_norm_gated(rows, inputs, width, activation, dtype):
    supported(rows, dtype)
    if rows > kernel.norm_rows(dtype):
        pytest.skip("this type has no room for it")
    x, _, gain, weight = arguments(rows, inputs, 2 * width, dtype)
    bias = draw(2 * width, dtype=dtype) if rows % 2 else None
    out = kernel.norm_gated(x, gain, EPS, weight, bias, activation)
    # gate and up are a rounding off each, times numbers of up to 4
    close(out, gate_times_up(norm_linear(x, gain, weight, bias), activation), factor=4)


@pytest.mark.gpu
def test_bfloat16_has_the_room_for_a_norm_behind():
    x, _, gain, weight = arguments(8, 1024, 64, torch.bfloat16)
    close(kernel.norm_linear(x * 1e6, gain * 1e3, EPS, weight), norm_linear(x * 1e6, gain * 1e3, weight), factor=2000)


@pytest.mark.parametrize("tile", [Tile(4, 256, 1), Tile(1, 64, 2), Tile(8, 1024, 8)], ids=str)
def test_tiles_without_matrix_units(tile):
    x, residual, gain, weight = arguments(2, 600, 22, torch.float32)
    all_that_surrounds_it(x, residual[:, :22], gain, weight, tile)


@pytest.mark.parametrize("rows", [1, 7, 17])
@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, 2, 1), Tile(16, 256, 4, 3), Tile(32, 128, 1, 2), Tile(16, 1024, 8, 1), Tile(8, 128, 4, 9)],
    ids=str,
)
def test_tiles_of_the_matrix_units(rows, tile):
    x, residual, gain, weight = arguments(rows, 600, 22, torch.float16)
    all_that_surrounds_it(x, residual[:, :22], gain, weight, tile)


def all_that_surrounds_it(x, residual, gain, weight, tile):
    close(kernel.linear(x, weight, None, tile), reference.linear(x, weight))
    close(kernel.plus(x, residual, weight, None, tile), reference.linear(x, weight) + residual, factor=2)
    close(kernel.gated(x, weight, None, "silu", tile), reference.gated(x, weight, None, "silu"), factor=4)
    expected = norm_linear(x, gain, weight)
    close(kernel.norm_linear(x, gain, EPS, weight, None, tile), expected, factor=2)
    gated = kernel.norm_gated(x, gain, EPS, weight, None, "silu", tile)
    close(gated, gate_times_up(expected, "silu"), factor=4)


@pytest.mark.parametrize("gated", [False, True])
def test_every_product_has_a_tile(gated):
    for rows in range(1, MAX_ROWS + 1):
        for outputs in (1, 576, 2048, 6144, 151_936):
            for inputs in (1, 40, 576, 3072, 12_288):
                tile = kernel.choose(rows, outputs, inputs, gated)
                assert tile.inputs % (32 * tile.warps) == 0 if tile.held else rows <= FEW


def test_nothing_is_computed_for_no_rows():
    x, gain, weight = torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), torch.ones(6, 8, device=DEVICE)
    assert kernel.linear(x, weight).shape == (0, 6)
    assert kernel.norm_gated(x, gain, EPS, weight, None, "silu").shape == (0, 3)
    assert kernel.plus(x, x[:, :6], weight, None).shape == (0, 6)


def test_nan_keeps_to_its_row():
    for rows, dtype in ((3, torch.float32), (7, torch.float16)):
        x, residual, gain, weight = arguments(rows, 40, 6, dtype)
        x[1, 7] = torch.nan
        for out in (kernel.norm_linear(x, gain, EPS, weight), kernel.plus(x, residual, weight, None)):
            assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def count_calls(monkeypatch):
    """Note the rows of each call of a kernel; where there is no GPU, let the front door take it all the same."""
    if DEVICE == "cpu":
        monkeypatch.setattr(few_rows, "kernels_run_on", lambda *tensors: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    calls = []

    def note(name):
        plain = getattr(kernel, name)

        def noting(x, *rest):
            calls.append((name, x.shape[0]))
            return plain(x, *rest)

        monkeypatch.setattr(kernel, name, noting)

    for name in ("linear", "plus", "gated", "norm_linear", "norm_gated"):
        note(name)
    return calls


@each_residual
def test_the_kernels_stop_at_their_limits(monkeypatch, with_residual):
    monkeypatch.setattr(few_rows, "ROWS", 3)
    calls = count_calls(monkeypatch)
    weight, bias = draw(14, 40, dtype=torch.float32, scale=0.2), draw(14, dtype=torch.float32)
    product = few_rows.FewRows(weight, bias)
    for rows in range(5):
        x, behind, gain, _ = arguments(rows, 40, 14, torch.float32)
        residual = apart(rows, 40, torch.float32) if with_residual else None
        close(product(x), reference.linear(x, weight, bias))
        added, rest = product.plus(x, behind)
        assert (rest is None) == (0 < rows <= 3)
        close(added if rest is None else added + rest, reference.linear(x, weight, bias) + behind)
        for (out, total), (expected, expected_total) in (
            (product.after_norm(x, residual, gain, EPS), reference.norm_linear(x, residual, gain, EPS, weight, bias)),
            (
                product.gated_after_norm(x, residual, gain, EPS, "gelu"),
                reference.norm_gated(x, residual, gain, EPS, weight, bias, "gelu"),
            ),
        ):
            close(out, expected, factor=4)
            same_total(total, expected_total)
    # what is still to be added has a norm of its own in front
    around = ("linear", "gated") if with_residual else ("norm_linear", "norm_gated")
    assert sorted(calls) == sorted((name, rows) for name in ("linear", "plus", *around) for rows in (1, 2, 3))


def test_long_rows_have_limits_of_their_own(monkeypatch):
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(few_rows, "LONG", 3)
    weight = torch.ones(3, 4, device=DEVICE)
    for rows in (1, 2, 3):
        x = torch.ones(rows, 4, device=DEVICE)
        few_rows.FewRows(weight, None).after_norm(x, None, x[0], EPS)
    assert calls == [("norm_linear", 1)]


def test_float16_has_no_room_for_a_norm_behind_many_rows(monkeypatch):
    calls = count_calls(monkeypatch)
    for rows in (FEW, FEW + 1):
        x, _, gain, weight = arguments(rows, 96, 7, torch.float16)
        out, _ = few_rows.FewRows(weight, None).after_norm(x * 500, None, gain * 1000, EPS)
        close(out, norm_linear(x, gain * 1000, weight), factor=2000)
    assert calls == [("norm_linear", FEW), ("linear", FEW + 1)]


def test_float32_has_kernels_for_few_rows_alone(monkeypatch):
    calls = count_calls(monkeypatch)
    product = few_rows.FewRows(torch.ones(2, 8, device=DEVICE), None)
    for rows in (FEW, FEW + 1):
        product(torch.ones(rows, 8, device=DEVICE))
    assert calls == [("linear", FEW)]


def test_too_many_inputs_for_a_norm_take_the_product_alone(monkeypatch):
    calls = count_calls(monkeypatch)
    x = torch.ones(1, kernel.WIDEST + 8, device=DEVICE)
    few_rows.FewRows(torch.ones_like(x).fill_(1), None).after_norm(x, None, x[0], EPS)
    assert calls == [("linear", 1)]


@each_residual
def test_without_kernels_a_product_is_the_reference(with_residual):
    x, behind, gain, weight = arguments(3, 40, 14, torch.float32)
    residual = apart(3, 40, torch.float32) if with_residual else None
    product = Product(lambda rows: reference.linear(rows, weight), lambda: (weight, None))
    added, rest = product.plus(x, behind)
    assert rest is behind
    close(added, reference.linear(x, weight))
    out, total = product.after_norm(x, residual, gain, EPS)
    expected, expected_total = reference.norm_linear(x, residual, gain, EPS, weight)
    close(out, expected)
    assert torch.equal(total, expected_total)
    out, total = product.gated_after_norm(x, residual, gain, EPS, "silu")
    close(out, reference.norm_gated(x, residual, gain, EPS, weight, None, "silu")[0])
    assert torch.equal(total, expected_total)


def test_where_kernels_cannot_overlap_nothing_is_asked_for():
    assert overlap.launch_options(torch.zeros(1)) == {"WAITS": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [1024, 3072, 4096])
def test_both_sides_of_the_limit_are_equally_right(inputs, dtype):
    weight = draw(2 * inputs, inputs, dtype=dtype, scale=inputs**-0.5)
    product = few_rows.FewRows(weight, None)
    for rows in (1, FEW, FEW + 1, few_rows.ROWS, few_rows.ROWS + 1):
        x, behind, gain, _ = arguments(rows, inputs, 2 * inputs, dtype)
        exact = reference.linear(x.double(), weight.double())
        assert (product(x).double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 4
        added, rest = product.plus(x, behind)
        exact += behind.double()
        added = added if rest is None else whole(added, dtype) + rest
        assert (added.double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 4
        for residual in (None, apart(rows, inputs, dtype) * 3):
            total = x if residual is None else x + residual
            exact = reference.norm_linear(total.double(), None, gain.double(), EPS, weight.double())[0]
            out, sums = product.after_norm(x, residual, gain, EPS)
            assert torch.equal(sums, total)
            assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 2
            exact = reference.gate_times_up(exact, "silu")
            out, _ = product.gated_after_norm(x, residual, gain, EPS, "silu")
            assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, MAX_ROWS])
def test_kernels_that_overlap_wait_for_each_other(rows, monkeypatch):
    """A chain in a graph, where each kernel may start before the last has ended: the same bits as one by one."""
    monkeypatch.setattr(torch, "empty_like", torch.ops.aten.empty_like.default)  # poisoning would stand in between
    width, layers, dtype = 1024, 24, torch.bfloat16
    gain = torch.ones(width, device="cuda", dtype=dtype)
    up = [draw(2 * width, width, dtype=dtype, scale=width**-0.5) for _ in range(layers)]
    down = [draw(width, width, dtype=dtype, scale=width**-0.5) for _ in range(layers)]

    def chain(x):
        for first, second in zip(up, down, strict=True):
            residual = x = kernel.plus(kernel.norm_gated(x, gain, EPS, first, None, "silu"), x, second, None)
            x = kernel.norm_linear(x, gain, EPS, second)
            normed, residual = add_rms_norm(x, residual, gain, EPS)
            x = kernel.linear(gate_times_up(kernel.linear(normed, first), "silu"), second)
            normed, residual = add_rms_norm(x, residual, gain, EPS)
            x = kernel.linear(kernel.gated(normed, first, None, "silu"), second) + residual
        return x

    inputs = [draw(rows, width, dtype=dtype) for _ in range(20)]
    monkeypatch.setattr(overlap, "OVERLAP", 0)
    expected = [chain(x) for x in inputs]
    for level in (1, 2):
        monkeypatch.setattr(overlap, "OVERLAP", level)
        place = inputs[0].clone()
        chain(place)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(place)
        for x, one_by_one in zip(inputs, expected, strict=True):
            place.copy_(x)
            graph.replay()
            assert torch.equal(out, one_by_one)
