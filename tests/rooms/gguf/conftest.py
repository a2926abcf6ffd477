"""Tiny GGUF files, written by the ``gguf`` package and so by other hands than ours."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

BYTES = 256
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, LAYERS = 4, 2, 8, 32, 48, 2


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one metadata pair; integers become uint32, floats float32, as in real files."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    kinds: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file. ``kinds`` names the type of tensors that are given as raw bytes of blocks."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    """List the 256 characters that stand for bytes in byte-level vocabularies, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(BYTES) if byte not in shown]
    return [chr(byte) if byte in shown else chr(BYTES + hidden.index(byte)) for byte in range(BYTES)]


def byte_level_metadata(pre: str = "qwen2", **extra: Any) -> dict[str, Any]:
    """Describe a byte-level tokenizer: bytes, four merged tokens, two control, one user-defined."""
    tokens = [*byte_alphabet(), "12", "123", "he", "hel", "<|end|>", "<tool>", "<|turn|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (BYTES + 4) + [3, 4, 3],
        "tokenizer.ggml.merges": ["1 2", "12 3", "h e", "he l"],
        "tokenizer.ggml.eos_token_id": BYTES + 4,
        "tokenizer.ggml.eot_token_id": BYTES + 6,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """Describe a SentencePiece tokenizer: three special tokens, all bytes, and a few pieces with scores."""
    pieces = ["▁", "a", "b", "c", "ab", "▁ab", "bc", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(BYTES)), *pieces, "[x]"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (BYTES + 3) + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0] + [-1e3],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * BYTES + [1] * len(pieces) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def model_metadata(architecture: str, **extra: Any) -> dict[str, Any]:
    """Describe a model of two layers; ``extra`` keys get the architecture's prefix, and dots for ``__``."""
    facts = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in facts.items()},
        **byte_level_metadata(),
    }


def model_tensors(architecture: str) -> dict[str, np.ndarray]:
    """Make random weights of two layers, as they are in Hugging Face's order, under their stored names."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {"token_embd.weight": some(263, HIDDEN), "output_norm.weight": some(HIDDEN)}
    for layer in range(LAYERS):
        part = {
            "attn_norm.weight": some(HIDDEN),
            "attn_q.weight": some(HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": some(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": some(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": some(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": some(HIDDEN),
            "ffn_gate.weight": some(WIDE, HIDDEN),
            "ffn_up.weight": some(WIDE, HIDDEN),
            "ffn_down.weight": some(HIDDEN, WIDE),
        }
        if architecture == "qwen2":
            part |= {"attn_q.bias": some(32), "attn_k.bias": some(16), "attn_v.bias": some(16)}
        if architecture in ("qwen3", "gemma3"):
            part |= {"attn_q_norm.weight": some(HEAD_DIM), "attn_k_norm.weight": some(HEAD_DIM)}
        if architecture == "gemma3":
            part |= {"post_attention_norm.weight": some(HIDDEN), "post_ffw_norm.weight": some(HIDDEN)}
        tensors |= {f"blk.{layer}.{name}": values for name, values in part.items()}
    return tensors


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file from metadata and tensors; the path comes back."""

    def write_one(metadata: Mapping[str, Any], tensors: Mapping[str, Any], kinds: Any = None) -> Path:
        return write(tmp_path / "model.gguf", metadata, tensors, kinds)

    return write_one


@pytest.fixture
def make() -> Any:
    """The functions above by name: this folder is no package that tests could import from."""

    class Make:
        byte_level = staticmethod(byte_level_metadata)
        sentencepiece = staticmethod(sentencepiece_metadata)
        model = staticmethod(model_metadata)
        tensors = staticmethod(model_tensors)
        alphabet = staticmethod(byte_alphabet)

    return Make
