"""Linear layers: the product by hand, prepared = plain, and each row the same whatever rows come with it."""

import pytest
import torch

from nanovllm.ops.linear import fbgemm, onednn, prepare, reference

# float32: sums of up to 300 products of unit normals (spread 17) in any order: 300 * 2^-24 * 4, rounded up.
# 16-bit: products are summed in float32 and rounded once (2^-11, 2^-8 of numbers up to 60 or so).
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}

SHAPES = [(0, 8, 4), (1, 1, 1), (1, 64, 96), (3, 7, 5), (2, 300, 33), (17, 33, 300)]
ROWS = [*range(1, 41), 63, 64, 65, 127, 128, 129, 255, 256, 257]

needs_fbgemm = pytest.mark.skipif(not fbgemm.available(), reason="this build of PyTorch has no FBGEMM")


def by_hand(x, weight, bias):
    lines = weight.double().tolist()
    rows = [[sum(a * b for a, b in zip(row, line, strict=True)) for line in lines] for row in x.double().tolist()]
    out = torch.tensor(rows, dtype=torch.float64).view(x.shape[0], weight.shape[0])
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", ABSOLUTE, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_is_the_product(rows, inputs, outputs, dtype, with_bias):
    torch.manual_seed(rows + inputs)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    bias = bias if with_bias else None
    expected = by_hand(x, weight, bias)
    for out in (reference.linear(x, weight, bias), prepare(weight, bias, dtype)(x)):
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=ABSOLUTE[dtype])


@needs_fbgemm
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_weight_held_in_float16_is_rounded_once_and_nothing_else(rows, inputs, outputs, with_bias):
    torch.manual_seed(rows + inputs)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    bias = bias if with_bias else None
    out = prepare(weight, bias, torch.float16)(x)
    assert out.dtype is torch.float32
    expected = by_hand(x, weight.half(), bias)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ABSOLUTE[torch.float32])


def test_a_weight_out_of_the_range_of_float16_keeps_float32():
    x, weight = torch.ones(5, 2), torch.tensor([[7e4, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(prepare(weight, None, torch.float16)(x), torch.tensor([[70001.0, -1.0]]).repeat(5, 1))


@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
def test_rows_may_lie_apart(storage):
    torch.manual_seed(1)
    x, weight = torch.randn(10, 40)[::2, 3:36], torch.randn(9, 33).half().float()
    assert not x.is_contiguous()
    out = prepare(weight, None, storage)(x)
    torch.testing.assert_close(out.double(), by_hand(x, weight, None), rtol=0, atol=ABSOLUTE[torch.float32])


@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
def test_the_weight_may_be_a_slice(storage):
    torch.manual_seed(2)
    x, weight = torch.randn(3, 20), torch.randn(30, 50).half().float()[5:17, 10:30]
    out = prepare(weight, None, storage)(x)
    torch.testing.assert_close(out.double(), by_hand(x, weight, None), rtol=0, atol=ABSOLUTE[torch.float32])


@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
def test_the_input_is_left_alone_and_the_output_is_new(storage):
    x = torch.randn(3, 20)
    before = x.clone()
    product = prepare(torch.randn(8, 20), torch.randn(8), storage)
    first = product(x)
    copy = first.clone()
    product(x + 1)
    assert torch.equal(x, before)
    assert torch.equal(first, copy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, torch.float32), (torch.float32, torch.float16)],  # in bfloat16 it depends on the processor
    ids=["float32", "held in float16"],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (96, 37), (576, 192), (1024, 64), (1025, 64), (1536, 576)])
def test_a_row_does_not_depend_on_its_neighbours(inputs, outputs, dtype, storage, threads):
    """Without this a request's tokens would depend on how many others run beside it."""
    if storage is torch.float16 and not fbgemm.available():
        pytest.skip("this build of PyTorch has no FBGEMM")
    if storage is not torch.float16 and not onednn.available(dtype):
        pytest.skip("this build of PyTorch has no oneDNN: weights stay as they are")
    torch.set_num_threads(threads)
    torch.manual_seed(inputs)
    x, bias = torch.randn(300, inputs).to(dtype), torch.randn(outputs).to(dtype)
    product = prepare((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), bias, storage)
    whole = product(x)

    def differing(first: int) -> list[int]:
        parts = {rows: slice(first, first + rows) for rows in ROWS if first + rows <= 300}
        return [rows for rows, part in parts.items() if not torch.equal(product(x[part]), whole[part])]

    for first in (0, 9, 299):  # a row's place must not matter either
        assert not differing(first), (
            f"on this processor the product differs in the last bits for {differing(first)} rows from row {first} "
            "on: here a request's tokens may depend on its neighbours"
        )
