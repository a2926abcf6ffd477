"""The kernels for few rows mean what the reference says; beyond their limit the front door goes without them."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops import overlap
from nanovllm.ops.activation import ACTIVATIONS, gate_times_up
from nanovllm.ops.linear import few_rows, kernel, reference
from nanovllm.ops.linear.kernel import FEW, FEW_ROWS, MAX_ROWS, Tile
from nanovllm.ops.linear.product import Product
from nanovllm.ops.rms_norm import add_rms_norm

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


def arguments(rows, inputs, outputs, dtype, with_residual):
    x = apart(rows, inputs, dtype)
    residual = apart(rows, inputs, dtype) * 3 if with_residual else None
    gain = draw(inputs, dtype=dtype)
    return x, residual, gain, draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)


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
    x, _, _, weight = arguments(rows, inputs, outputs, dtype, False)
    bias = draw(outputs, dtype=dtype) if rows % 2 else None
    close(kernel.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("rows", range(3, MAX_ROWS + 1))
def test_all_numbers_of_rows(rows):
    x, _, _, weight = arguments(rows, 200, 18, torch.float16, False)
    close(kernel.linear(x, weight), reference.linear(x, weight))
    close(kernel.gated(x, weight, None, "silu"), reference.gated(x, weight, None, "silu"), factor=4)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inputs", "width"), [(1, 576, 7), (2, 1000, 1), (3, 96, 33), (8, 576, 5), (16, 1100, 9), (MAX_ROWS, 96, 7)]
)
def test_gated(rows, inputs, width, activation, dtype):
    supported(rows, dtype)
    x, _, _, weight = arguments(rows, inputs, 2 * width, dtype, False)
    bias = draw(2 * width, dtype=dtype) if rows % 2 else None
    out = kernel.gated(x, weight, bias, activation)
    close(out, reference.gated(x, weight, bias, activation), factor=4)  # gate and up are a rounding off each


@each_residual
@each_dtype
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [shape for shape in FEW_SHAPES if shape[2] < 500])
def test_norm_linear(rows, inputs, outputs, dtype, with_residual):
    x, residual, gain, weight = arguments(rows, inputs, outputs, dtype, with_residual)
    bias = draw(outputs, dtype=dtype) if rows % 2 else None
    before = x.clone(), None if residual is None else residual.clone()
    out, total = kernel.norm_linear(x, residual, gain, EPS, weight, bias)
    expected, expected_total = reference.norm_linear(x, residual, gain, EPS, weight, bias)
    close(out, expected)
    assert torch.equal(x, before[0])
    if residual is None:
        assert total is x
    else:
        same_total(total, expected_total)
        assert torch.equal(residual, before[1]) and total.is_contiguous()
        assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "inputs", "width"), [(1, 576, 7), (2, 1000, 1), (3, 96, 33), (4, 1100, 5)])
def test_norm_gated(rows, inputs, width, activation, dtype):
    x, residual, gain, weight = arguments(rows, inputs, 2 * width, dtype, True)
    bias = draw(2 * width, dtype=dtype) if rows % 2 else None
    out, total = kernel.norm_gated(x, residual, gain, EPS, weight, bias, activation)
    expected, expected_total = reference.norm_gated(x, residual, gain, EPS, weight, bias, activation)
    close(out, expected, factor=4)  # gate and up are a rounding off each, times numbers of up to 4
    same_total(total, expected_total)
    out, total = kernel.norm_gated(x, None, gain, EPS, weight, bias, activation)
    close(out, reference.norm_gated(x, None, gain, EPS, weight, bias, activation)[0], factor=4)
    assert total is x


@pytest.mark.parametrize("tile", [Tile(4, 256, 1), Tile(1, 64, 2), Tile(8, 1024, 8)], ids=str)
def test_tiles_without_matrix_units(tile):
    x, residual, gain, weight = arguments(2, 600, 22, torch.float32, True)
    close(kernel.linear(x, weight, None, tile), reference.linear(x, weight))
    close(kernel.gated(x, weight, None, "silu", tile), reference.gated(x, weight, None, "silu"), factor=4)
    pairs = [
        (
            kernel.norm_linear(x, residual, gain, EPS, weight, None, tile),
            reference.norm_linear(x, residual, gain, EPS, weight),
        ),
        (
            kernel.norm_gated(x, residual, gain, EPS, weight, None, "silu", tile),
            reference.norm_gated(x, residual, gain, EPS, weight, None, "silu"),
        ),
    ]
    for (out, total), (expected, expected_total) in pairs:
        close(out, expected, factor=4)
        same_total(total, expected_total)


@pytest.mark.parametrize("rows", [1, 7, 17])
@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, 2, 1), Tile(16, 256, 4, 3), Tile(32, 128, 1, 2), Tile(16, 1024, 8, 1), Tile(8, 128, 4, 9)],
    ids=str,
)
def test_tiles_of_the_matrix_units(rows, tile):
    x, _, _, weight = arguments(rows, 600, 22, torch.float16, False)
    close(kernel.linear(x, weight, None, tile), reference.linear(x, weight))
    close(kernel.gated(x, weight, None, "silu", tile), reference.gated(x, weight, None, "silu"), factor=4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_product_has_a_tile(dtype, gated):
    for rows in range(1, kernel.most_rows(dtype) + 1):
        for outputs in (1, 576, 2048, 6144, 151_936):
            for inputs in (1, 40, 576, 3072, 12_288):
                tile = kernel.choose(rows, outputs, inputs, gated, dtype)
                assert not tile.held or (dtype is not torch.float32 and tile.inputs % (32 * tile.warps) == 0)
                assert tile.held or rows <= FEW


def test_nothing_is_computed_for_no_rows():
    x, gain, weight = torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), torch.ones(6, 8, device=DEVICE)
    assert kernel.linear(x, weight).shape == (0, 6)
    assert [each.shape for each in kernel.norm_gated(x, x, gain, EPS, weight, None, "silu")] == [(0, 3), (0, 8)]


def test_nan_keeps_to_its_row():
    x, residual, gain, weight = arguments(3, 40, 6, torch.float32, True)
    x[1, 7] = torch.nan
    out, total = kernel.norm_linear(x, residual, gain, EPS, weight)
    assert out.isnan().all(1).tolist() == [False, True, False] and not out[[0, 2]].isnan().any()
    assert total.isnan().sum() == 1


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

    for name in ("linear", "gated", "norm_linear", "norm_gated"):
        note(name)
    return calls


@each_residual
def test_the_kernels_stop_at_their_limits(monkeypatch, with_residual):
    monkeypatch.setattr(few_rows, "ROWS", 3)
    monkeypatch.setattr(few_rows, "NORM_ROWS", 2)
    calls = count_calls(monkeypatch)
    weight, bias = draw(14, 40, dtype=torch.float32, scale=0.2), draw(14, dtype=torch.float32)
    product = few_rows.FewRows(weight, bias)
    for rows in range(5):
        x, residual, gain, _ = arguments(rows, 40, 14, torch.float32, with_residual)
        close(product(x), reference.linear(x, weight, bias))
        for (out, total), (expected, expected_total) in (
            (product.after_norm(x, residual, gain, EPS), reference.norm_linear(x, residual, gain, EPS, weight, bias)),
            (
                product.gated_after_norm(x, residual, gain, EPS, "gelu"),
                reference.norm_gated(x, residual, gain, EPS, weight, bias, "gelu"),
            ),
        ):
            close(out, expected, factor=4)
            same_total(total, expected_total)
    once = [("linear", rows) for rows in (1, 2, 3)]
    fused = [(name, rows) for name in ("norm_gated", "norm_linear") for rows in (1, 2)]
    # with 3 rows the norm in front is a kernel of its own
    assert sorted(calls) == sorted([*once, ("linear", 3), ("gated", 3), *fused])


def test_long_rows_have_limits_of_their_own(monkeypatch):
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(few_rows, "LONG", 3)
    weight = torch.ones(3, 4, device=DEVICE)
    for rows in (1, 2, 3):
        x = torch.ones(rows, 4, device=DEVICE)
        few_rows.FewRows(weight, None).after_norm(x, x, x[0], EPS)
    assert calls == [("norm_linear", 1)]


def test_float32_has_kernels_for_few_rows_alone(monkeypatch):
    calls = count_calls(monkeypatch)
    product = few_rows.FewRows(torch.ones(2, 8, device=DEVICE), None)
    for rows in (FEW, FEW + 1):
        product(torch.ones(rows, 8, device=DEVICE))
    assert calls == [("linear", FEW)]


def test_too_many_inputs_for_a_norm_take_the_product_alone(monkeypatch):
    calls = count_calls(monkeypatch)
    x = torch.ones(1, kernel.WIDEST + 8, device=DEVICE)
    few_rows.FewRows(torch.ones_like(x).fill_(1), None).after_norm(x, x, x[0], EPS)
    assert calls == [("linear", 1)]


@each_residual
def test_without_kernels_a_product_is_the_reference(with_residual):
    x, residual, gain, weight = arguments(3, 40, 14, torch.float32, with_residual)
    product = Product(lambda rows: reference.linear(rows, weight), lambda: (weight, None))
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
    for rows in (1, FEW, FEW + 1, few_rows.ROWS, few_rows.ROWS + 1, few_rows.NORM_ROWS + 1):
        x, residual, gain, _ = arguments(rows, inputs, 1, dtype, True)
        exact = reference.linear(x.double(), weight.double())
        assert (product(x).double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 4
        # in float64 from what the norm has rounded: from there on there is one rounding, three with the gate
        normed, total = (each.double() for each in reference.add_rms_norm(x, residual, gain, EPS))
        exact = reference.linear(normed, weight.double())
        out, sums = product.after_norm(x, residual, gain, EPS)
        assert torch.equal(sums.double(), total)
        assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 4
        exact = reference.gate_times_up(exact, "silu")
        out, _ = product.gated_after_norm(x, residual, gain, EPS, "silu")
        assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[dtype] / 2


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
        residual = torch.zeros_like(x)
        for first, second in zip(up, down, strict=True):
            if rows <= FEW:
                gated, residual = kernel.norm_gated(x, residual, gain, EPS, first, None, "silu")
                x = kernel.linear(gated, second)
                x, residual = kernel.norm_linear(x, residual, gain, EPS, second)
            normed, residual = add_rms_norm(x, residual, gain, EPS)
            x = kernel.linear(gate_times_up(kernel.linear(normed, first), "silu"), second)
            normed, residual = add_rms_norm(x, residual, gain, EPS)
            x = kernel.linear(kernel.gated(normed, first, None, "silu"), second)
        return x + residual

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
