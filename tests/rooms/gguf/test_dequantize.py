"""Each quantised type means what the ``gguf`` package says it means, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from nanovllm.errors import CheckpointError
from nanovllm.gguf import dequantize as module
from nanovllm.gguf.dequantize import EXPAND, dequantize
from nanovllm.gguf.reader import TYPES, GGUFFile

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q6_K": [208]}
"""Where the float16 scales of a block lie; 0 and 2 for the types that are not listed."""


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Make blocks of random bytes, but with finite scales: uint8 [rows, bytes]."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (rows * blocks, kind.block_bytes), dtype=np.uint8)
    for place in HALVES.get(name, [0, 2]):
        raw[:, place : place + 2] = rng.standard_normal(len(raw)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", EXPAND)
@pytest.mark.parametrize(("rows", "blocks", "chunk"), [(1, 1, 1 << 19), (7, 3, 127 * 256), (5, 3, 1024)])
def test_equals_the_gguf_package(write_gguf, monkeypatch, name, rows, blocks, chunk):
    monkeypatch.setattr(module, "CHUNK_VALUES", chunk)
    raw = random_blocks(name, rows, blocks)
    kind = gguf.GGMLQuantizationType[name]
    file = GGUFFile(write_gguf({}, {"w": raw}, {"w": kind}))

    values = dequantize(file, file.tensors["w"])

    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), gguf.quants.dequantize(raw, kind))


def test_every_type_has_the_size_that_the_gguf_package_knows():
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (
            kind.block_values,
            kind.block_bytes,
        )


def test_plain_types_stay_as_they_are(write_gguf):
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)  # 1.0 and -2.0 in bfloat16
    file = GGUFFile(
        write_gguf(
            {},
            {
                "f32": np.array([1.5, -2.0], dtype=np.float32),
                "f16": np.array([1.5, -2.0], dtype=np.float16),
                "bf16": bits.view(np.uint8),
            },
            {"bf16": gguf.GGMLQuantizationType.BF16},
        )
    )
    found = {name: dequantize(file, tensor) for name, tensor in file.tensors.items()}
    assert {name: values.dtype for name, values in found.items()} == {
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
    }
    assert found["f32"].tolist() == found["f16"].tolist() == [1.5, -2.0]
    assert found["bf16"].tolist() == [[1.0, -2.0]]


def test_other_types_are_refused_by_name(write_gguf):
    raw = np.zeros((1, 84), dtype=np.uint8)
    file = GGUFFile(write_gguf({}, {"w": raw}, {"w": gguf.GGMLQuantizationType.Q2_K}))
    with pytest.raises(CheckpointError, match="'w' has type Q2_K; supported types are F32, .*Q6_K"):
        dequantize(file, file.tensors["w"])
