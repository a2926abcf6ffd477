"""The header of a GGUF file: what is in it comes out, and what is damaged is refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.errors import CheckpointError
from nanovllm.gguf.reader import GGUFFile


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join((*pairs, *tensors))


def row(name: str = "w", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


SMALL = header(
    text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    text("list") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("") + text("ü"),
    text("numbers") + struct.pack("<IIQ4f", 9, 6, 4, 1.0, 2.0, 3.0, 4.0),
    text("flag") + struct.pack("<IB", 7, 1),
    tensors=(row("v", (8,), 0, 256), row("w", (32, 2), 0, 0)),
)
SMALL += bytes(-len(SMALL) % 32 + 256 + 32)


def read(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile(path)


def test_reads_what_the_gguf_package_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße 😀")
    writer.add_array("texts", ["a", "", "日本"])
    writer.add_array("floats", [0.25, -1.0])
    writer.add_array("ints", [1, 2, 3])
    weights = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("w", weights)
    writer.add_tensor("half", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(tmp_path / "model.gguf")

    assert file.metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 2**32 - 1,
        "i32": -5,
        "u64": 2**63,
        "i64": -(2**40),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "grüße 😀",
        "texts": ["a", "", "日本"],
        "floats": (0.25, -1.0),
        "ints": (1, 2, 3),
    }
    assert file.tensors["w"].shape == (2, 3, 4)
    assert file.tensors["half"].kind.name == "F16"
    assert file.data(file.tensors["w"]).numpy().tobytes() == weights.tobytes()


def test_version_2_has_the_same_layout(tmp_path):
    assert read(tmp_path / "m", SMALL.replace(b"GGUF\x03", b"GGUF\x02", 1)).metadata["flag"] is True


def big(kind: int, *more: int) -> bytes:
    return text("key") + struct.pack(f"<I{len(more)}Q", kind, *more)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "begins with b'GG'"),
        (b"PK\x03\x04" + bytes(40), "begins with b'PK"),
        (b"GGUF\x03\x00\x00\x00", "numbers are announced"),
        (header(version=1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),  # big-endian
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors are announced"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata pairs are announced"),
        (header(struct.pack("<Q", 2**63) + bytes(20)), "a string of 9223372036854775808 bytes"),
        (header(text("key") + struct.pack("<I", 13) + bytes(8)), "value type 13 is unknown"),
        (header(text("key") + struct.pack("<IIQ", 9, 8, 2**40)), "at most 4194304"),
        (header(text("key") + struct.pack("<IIQ", 9, 8, 10**6)), "strings are announced"),
        (header(text("key") + struct.pack("<IIQ", 9, 12, 10**6)), "numbers are announced"),
        (header(text("key") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)), "items of type 9"),
        (header(text("key") + struct.pack("<IIQQQ", 9, 8, 2, 8, 0)), "run past the end"),
        (header(struct.pack("<Q", 1) + b"\xff" + struct.pack("<IBB", 7, 1, 0)), "not UTF-8"),
        (header(*[text("k") + struct.pack("<IB", 7, 1)] * 2), "'k' appears twice"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0)), "alignment is 0"),
        (header(text("general.alignment") + struct.pack("<II", 4, 12)), "alignment is 12"),
        (header(tensors=(row(dims=(1,) * 5),)), "5 dimensions"),
        (header(tensors=(row(dims=()) + bytes(20),)), "0 dimensions"),
        (header(tensors=(row(dims=(0, 2)),)), "must be positive"),
        (header(tensors=(row(dims=(33, 2), kind=8),)), "multiple of 32"),
        (header(tensors=(row(kind=77),)), "type number 77; known: 0 \\(F32\\)"),
        (header(tensors=(row(dims=(2**40, 2**40)),)) + bytes(300), "end inside the file"),
        (header(tensors=(row(),)) + bytes(200), "end inside the file"),
        (header(tensors=(row(offset=2**63),)) + bytes(300), "end inside the file"),
        (header(tensors=(row(offset=8),)) + bytes(600), "not a multiple of 32"),
        (header(tensors=(row("a"), row("b", offset=32))) + bytes(600), "begin at or after"),
        (header(tensors=(row("a"), row("a", offset=256))) + bytes(600), "'a' appears twice"),
    ],
)
def test_damage_is_refused(tmp_path, data, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "m", data)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "nothing.gguf")


def test_every_truncation_is_refused(tmp_path):
    for size in range(len(SMALL)):
        with pytest.raises(CheckpointError):
            read(tmp_path / "m", SMALL[:size])


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_headers_raise_nothing_else(tmp_path, data):
    mutated = bytearray(SMALL[: data.draw(st.integers(0, len(SMALL)))] if data.draw(st.booleans()) else SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        patch = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        place = data.draw(st.integers(0, len(mutated)))
        mutated[place : place + len(patch)] = patch
    try:
        file = read(tmp_path / "m", bytes(mutated))
    except CheckpointError:
        return
    for tensor in file.tensors.values():
        assert len(file.data(tensor)) == tensor.num_bytes
