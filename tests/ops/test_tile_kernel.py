"""The kernel for some tens of rows means what the reference says: whole, gated, and in parts that a norm adds."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops import overlap
from nanovllm.ops.linear import few_rows, prepare, reference, tile_kernel
from nanovllm.ops.linear.tile_kernel import Tile, choose, multiply
from nanovllm.ops.rms_norm import add_rms_norm, whole
from nanovllm.ops.rms_norm import kernel as norms
from nanovllm.ops.rms_norm.reference import add_rms_norm as reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# results have unit size and are rounded once on each side; tl.dot of bfloat16 is wrong in Triton's interpreter
TOLERANCE = {torch.float16: 2 * 2**-10}
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 2 * 2**-7

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SHAPES = [(17, 1024, 96), (33, 1000, 40), (64, 96, 200), (65, 300, 33), (130, 128, 70)]
"""Rows, inputs, outputs: full tiles and every size that leaves a rest."""


def draw(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def apart(rows, width, dtype):
    """Rows that lie apart, with NaN between them: one that is read beyond its end shows."""
    padded = torch.full((rows, width + 11), torch.nan, device=DEVICE, dtype=dtype)
    padded[:, 3 : width + 3] = draw(rows, width, dtype=dtype)
    return padded[:, 3 : width + 3]


def near(out, expected, dtype):
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is not written is NaN."""
    empty = torch.empty

    def full_of_nan(*shape, **options):
        return empty(*shape, **options).fill_(torch.nan)

    monkeypatch.setattr(tile_kernel.torch, "empty", full_of_nan)


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_product(rows, inputs, outputs, bias, dtype):
    x, weight = apart(rows, inputs, dtype), draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = draw(outputs, dtype=dtype) if bias else None
    exact = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = multiply(x, weight, bias)
    assert out.shape == (rows, outputs)
    assert out.dtype is dtype
    near(out, exact, dtype)
    for tile in (Tile(32, 32, 1, 4, 2), Tile(16, 64, 3, 4, 2), Tile(64, 32, 8, 4, 2)):
        parts = multiply(x, weight, bias, in_parts=True, tile=tile)
        assert parts.shape == ((tile.parts, rows, outputs) if tile.parts > 1 else (rows, outputs))
        assert parts.dtype is (torch.float32 if tile.parts > 1 else dtype)
        near(whole(parts, dtype), exact, dtype)


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate(activation, bias, dtype):
    x, weight = apart(37, 300, dtype), draw(2 * 50, 300, dtype=dtype, scale=300**-0.5)
    bias = draw(100, dtype=dtype) if bias else None
    exact = reference.gated(x.double(), weight.double(), None if bias is None else bias.double(), activation)
    for tile in (None, Tile(32, 64, 1, 4, 2)):
        out = multiply(x, weight, bias, activation, tile=tile)
        assert out.shape == (37, 50)
        torch.testing.assert_close(out.double(), exact, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_norm_adds_parts(parts, dtype):
    x, residual, gain = torch.randn(parts, 19, 200, device=DEVICE), draw(19, 200, dtype=dtype), draw(200, dtype=dtype)
    expected, total = reference_norm(x, residual, gain, 1e-6)
    for out, added in (norms.add_rms_norm(x, residual, gain, 1e-6), add_rms_norm(x, residual, gain, 1e-6)):
        assert out.dtype is added.dtype is dtype
        torch.testing.assert_close(added, total, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
        torch.testing.assert_close(out, expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_nothing_to_multiply():
    weight = draw(64, 32, dtype=torch.float16)
    assert multiply(draw(0, 32, dtype=torch.float16), weight, None).shape == (0, 64)


@pytest.mark.parametrize("outputs", [7, 1024, 4096])
def test_parts_are_only_where_asked_and_where_programs_are_missing(outputs):
    for rows in (17, 64, 65, 128):
        assert choose(rows, outputs, False, 1).parts == choose(rows, outputs, True, 8).parts == 1
        tile = choose(rows, outputs, False, 8)
        assert 1 <= tile.parts <= 8
        programs = tile.parts * -(-outputs // tile.lines) * -(-rows // tile_kernel.ROWS)
        assert tile.parts == 1 or programs <= tile_kernel.ENOUGH
    assert [choose(rows, 1024, False, 8).parts for rows in (17, 64, 65, 128, 256)] == [8, 8, 4, 4, 2]


def test_stages_fit_the_shared_memory(monkeypatch):
    device, shared = torch.device("cuda"), 99 * 1024
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *which: SimpleNamespace(shared_memory_per_block_optin=shared)
    )
    assert [tile_kernel._stages(8, num_bytes, device) for num_bytes in (8192, 16_384, 65_536)] == [8, 6, 2]


def test_the_library_computes_in_parts_where_processors_would_be_idle():
    rows, parts = (64, 65, 128, 129, 256, 257), few_rows.choose_parts
    assert [parts(number, 1024, 3072) for number in rows] == [1, 4, 4, 2, 2, 1]  # Qwen3-0.6B
    assert [parts(number, 4096, 12_288) for number in rows] == [1, 2, 2, 2, 2, 1]  # Qwen3-8B
    assert [parts(number, 8192, 4096) for number in rows] == [1, 2, 2, 1, 1, 1]
    assert [parts(number, 1024, 2000) for number in rows] == [1] * 6  # inputs that four parts would not share evenly


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_library_add_up(parts, dtype, monkeypatch):
    if DEVICE == "cpu":  # where PyTorch has no such product
        monkeypatch.setattr(torch, "bmm", lambda one, two, out_dtype: one.to(out_dtype) @ two.to(out_dtype))
    x, weight = apart(70, 512, dtype), draw(96, 512, dtype=dtype, scale=512**-0.5)
    found = few_rows.multiply_in_parts(x, weight, parts)
    assert (found.shape, found.dtype) == ((parts, 70, 96), torch.float32)
    torch.testing.assert_close(
        found.double().sum(0), reference.linear(x.double(), weight.double()), rtol=1e-4, atol=1e-4
    )
    share = reference.linear(x[:, : 512 // parts].double(), weight[:, : 512 // parts].double())
    torch.testing.assert_close(found[0].double(), share, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("rows", [16, 17, 32, 33, 64, 65, 129, 256, 257])
def test_the_front_door_takes_it_between_its_limits(rows, level, monkeypatch):
    monkeypatch.setattr(overlap, "OVERLAP", level)
    weight = draw(256, 1024, dtype=torch.bfloat16, scale=1024**-0.5)
    product = prepare(weight, None, torch.bfloat16)
    x = draw(rows, 1024, dtype=torch.bfloat16)
    between = few_rows.ROWS < rows <= few_rows.IN_PARTS[1]  # first our parts, then the library's
    added = draw(rows, 256, dtype=torch.bfloat16)
    parts, rest = product.plus(x, added)
    assert parts.dim() == (3 if between else 2) and (rest is None) == (rows <= few_rows.ROWS)
    exact = reference.linear(x.double(), weight.double())
    near(whole(parts, torch.bfloat16) - (added if rest is None else 0), exact, torch.bfloat16)
    near(product(x), exact, torch.bfloat16)
    gain = draw(256, dtype=torch.bfloat16)
    behind = prepare(draw(512, 256, dtype=torch.bfloat16, scale=1 / 16), None, torch.bfloat16)
    for one, two in (
        (behind.after_norm(parts, rest, gain, 1e-6), behind.after_norm(product(x), added, gain, 1e-6)),
        (
            behind.gated_after_norm(parts, rest, gain, 1e-6, "silu"),
            behind.gated_after_norm(product(x), added, gain, 1e-6, "silu"),
        ),
    ):
        for got, expected in zip(one, two, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
