"""The kernel whose rows do not depend on each other means the reference, and gives a row its bits in any company."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops.linear import few_rows, invariant, invariant_kernel, prepare, reference
from nanovllm.ops.linear.invariant_kernel import TILES, WIDE_TILE, Tile, choose, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Inputs are drawn so that results have unit size. float32: sums of up to 1000 products in another order; 16 bits: the
# result is rounded once on each side.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2 * 2**-10}
if DEVICE == "cuda":  # in Triton's interpreter tl.dot is wrong for bfloat16
    TOLERANCE[torch.bfloat16] = 2 * 2**-7

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

# rows, inputs, outputs: every side of a tile's edges
SHAPES = [(0, 8, 3), (1, 1, 1), (1, 576, 7), (3, 1000, 17), (31, 130, 65), (65, 40, 33), (70, 128, 129), (300, 96, 70)]


def draw(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def apart(rows, width, dtype):
    """Rows that lie apart, with NaN between them: one that is read beyond its end shows."""
    padded = torch.full((rows, width + 11), torch.nan, device=DEVICE, dtype=dtype)
    padded[:, 3 : width + 3] = draw(rows, width, dtype=dtype)
    return padded[:, 3 : width + 3]


def close(actual, expected):
    assert actual.dtype is expected.dtype and actual.is_contiguous() and actual.shape == expected.shape
    bound = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


@each_dtype
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_it_means_the_reference(rows, inputs, outputs, with_bias, dtype):
    x, weight = apart(rows, inputs, dtype), draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = draw(outputs, dtype=dtype) if with_bias else None
    close(linear(x, weight, bias), reference.linear(x, weight, bias))


@each_dtype
@pytest.mark.parametrize("tile", [*TILES, WIDE_TILE, Tile(16, 16, 16, 1, 2)], ids=str)
def test_every_tile_means_the_reference(tile, dtype):
    x, weight = apart(150, 140, dtype), draw(75, 140, dtype=dtype, scale=140**-0.5)
    close(linear(x, weight, None, tile), reference.linear(x, weight))


def same_bits(actual, expected):
    """On a GPU. NumPy's products, which the interpreter takes, differ by a row's place on some processors."""
    if DEVICE == "cuda":
        assert torch.equal(actual, expected)
    else:
        bound = TOLERANCE[expected.dtype] / 2
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("inputs", [128, 200])
def test_a_row_alone_is_the_row_among_others(inputs):
    """Here in the interpreter, or as compiled; ``tests/gpu/test_deterministic.py`` has the sizes of real models."""
    for dtype in TOLERANCE:
        x, weight = apart(140, inputs, dtype), draw(50, inputs, dtype=dtype, scale=inputs**-0.5)
        bias, tile = draw(50, dtype=dtype), Tile(32, 32, 64, 4, 2)
        together = linear(x, weight, bias, tile)
        for row in (0, 1, 31, 32, 33, 77, 139):
            same_bits(linear(x[row : row + 1], weight, bias, tile)[0], together[row])
        same_bits(linear(x[5:50], weight, bias, tile), together[5:50])


def test_programs_cover_each_tile_once():
    """More bands of tiles than one, the last of them lower: ones times ones count the inputs everywhere."""
    x, weight = torch.ones(19 * 16 - 3, 16, device=DEVICE), torch.ones(50, 16, device=DEVICE)
    out = linear(x, weight, None, Tile(16, 16, 16, 1, 2))
    assert torch.equal(out, torch.full_like(out, 16))


def test_the_choice_of_a_tile():
    half = torch.bfloat16
    assert choose(1, 1024, half) == choose(64, 1024, half) == TILES[-1]
    assert choose(1, 151_936, half).rows == 64, "not a tile that is nearly empty"
    assert choose(8192, 1024, half) == choose(8192, 6144, half) == TILES[0]
    for rows in (1, 7, 64, 65, 256, 4096):
        for outputs in (1, 1024, 4096, 151_936):
            assert choose(rows, outputs, half) in TILES
            assert choose(rows, outputs, torch.float32) is WIDE_TILE


def test_all_tiles_add_up_as_many_numbers_at_a_time():
    """What the sums depend on: 64 rows or more take one kind of instruction, whole steps of 16 inputs."""
    assert all(tile.rows % 64 == 0 and tile.inputs % 16 == 0 for tile in TILES)
    assert all(tile.warps == 4 * tile.rows // 64 for tile in TILES), "one instruction is that of four warps"
    assert all((tile.rows + tile.outputs) * tile.inputs * tile.stages * 2 <= 96 * 1024 for tile in TILES)


def test_a_layer_gets_it_on_a_gpu_alone(monkeypatch):
    weight = draw(6, 40, dtype=torch.float32)
    plain = prepare(weight, None, torch.float32, deterministic=True)
    if DEVICE == "cpu":
        assert not invariant.available(weight)
        monkeypatch.setattr(invariant, "available", lambda weight: True)
        monkeypatch.setattr("nanovllm.ops.linear.onednn.available", lambda dtype: False)
        plain = prepare(weight, None, torch.float32, deterministic=True)
    assert plain.multiply.func is invariant_kernel.linear
    assert not isinstance(plain, few_rows.FewRows)
    x, residual, gain = apart(3, 40, torch.float32), apart(3, 40, torch.float32), draw(40, dtype=torch.float32)
    out, total = plain.after_norm(x, residual, gain, 1e-6)
    expected, expected_total = reference.norm_linear(x, residual, gain, 1e-6, weight)
    close(out, expected)
    assert torch.equal(total, expected_total)
    out, _ = plain.gated_after_norm(x, residual, gain, 1e-6, "silu")
    close(out, reference.norm_gated(x, residual, gain, 1e-6, weight, None, "silu")[0])
