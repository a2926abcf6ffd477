"""A GGUF file gives what the Hugging Face folder would: configuration, names, values."""

import os

import gguf
import numpy as np
import pytest
import torch

from nanovllm.errors import CheckpointError
from nanovllm.gguf import GGUFCheckpoint

HEADS, KV_HEADS = 4, 2


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does: row i of a head's first half before row i of its second."""
    head_dim = len(rows) // heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def stored_as(architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    """Return ``values`` of a Hugging Face checkpoint as the converter writes them."""
    if architecture == "llama" and ".attn_q." in name:
        return interleave(values, HEADS)
    if architecture == "llama" and ".attn_k." in name:
        return interleave(values, KV_HEADS)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    return values


def test_a_file_that_changes_while_it_is_read(write_gguf, make):
    """It is mapped: to touch what was cut off would end the process."""
    path = write_gguf(make.model("llama"), make.tensors("llama"))
    tensors = GGUFCheckpoint(path).tensors()
    next(tensors)
    os.truncate(path, 5000)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        next(tensors)


CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@pytest.mark.parametrize("architecture", CLASSES)
def test_names_and_values_are_those_of_the_folder(write_gguf, make, architecture):
    transformers = pytest.importorskip("transformers")
    weights = make.tensors(architecture)
    extra = {"attention__sliding_window": 16} if architecture == "gemma3" else {}
    path = write_gguf(
        make.model(architecture, **extra),
        {name: stored_as(architecture, name, values) for name, values in weights.items()},
    )

    checkpoint = GGUFCheckpoint(path)
    found = {name: values.clone() for name, values in checkpoint.tensors()}

    assert checkpoint.config["architectures"] == [CLASSES[architecture]]
    known = {
        "vocab_size": 263,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    assert checkpoint.config.items() >= known.items()
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["tie_word_embeddings"] is True
    # The names and shapes are exactly those that transformers gives the model.
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        expected = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    del expected["lm_head.weight"]
    assert {name: values.shape for name, values in found.items()} == {
        name: values.shape for name, values in expected.items()
    }
    # 1 + w - 1 is w up to one rounding of 1 + w.
    for stored, name in (("blk.1.attn_q.weight", "q_proj.weight"), ("blk.1.attn_k.weight", "k_proj.weight")):
        values = found[f"model.layers.1.self_attn.{name}"]
        np.testing.assert_allclose(values.numpy(), weights[stored], atol=5e-7)
    np.testing.assert_allclose(found["model.norm.weight"].numpy(), weights["output_norm.weight"], atol=5e-7)
    after = "pre_feedforward_layernorm" if architecture == "gemma3" else "post_attention_layernorm"
    norm = found[f"model.layers.1.{after}.weight"]
    np.testing.assert_allclose(norm.numpy(), weights["blk.1.ffn_norm.weight"], atol=5e-7)
    if architecture == "qwen2":
        assert checkpoint.config["attention_bias"] is True
        assert torch.equal(
            found["model.layers.0.self_attn.k_proj.bias"], torch.from_numpy(weights["blk.0.attn_k.bias"])
        )


def test_output_tensor_unties_the_embedding(write_gguf, make):
    tensors = make.tensors("qwen3")
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    checkpoint = GGUFCheckpoint(write_gguf(make.model("qwen3"), tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    found = dict(checkpoint.tensors())
    assert torch.equal(found["lm_head.weight"], 2 * found["model.embed_tokens.weight"])


@pytest.mark.parametrize(("kind", "named"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", None)])
def test_a_file_of_one_plain_type_names_it(write_gguf, make, kind, named):
    weights, kinds = make.tensors("llama"), {}
    for name, values in weights.items():
        if values.ndim > 1 and (kind != "Q8_0" or values.shape[1] % 32 == 0):
            kinds[name] = gguf.GGMLQuantizationType[kind]
            weights[name] = gguf.quants.quantize(values, kinds[name])
    checkpoint = GGUFCheckpoint(write_gguf(make.model("llama"), weights, kinds))
    assert checkpoint.config.get("torch_dtype") == named


def test_gemma_layers_alternate(write_gguf, make):
    facts = {"attention__sliding_window": 16, "rope__freq_base": 1e6, "block_count": 13}
    config = GGUFCheckpoint(write_gguf(make.model("gemma3", **facts), make.tensors("gemma3"))).config
    assert [kind == "full_attention" for kind in config["layer_types"]] == [n % 6 == 5 for n in range(13)]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["model_type"] == "gemma3_text"
    assert config["query_pre_attn_scalar"] == 8
    assert config["sliding_window"] == 16


@pytest.mark.parametrize(("pattern", "slides"), [(2, [True, False]), ([False, True], [False, True])])
def test_gemma_pattern_in_the_file_wins(write_gguf, make, pattern, slides):
    facts = {"attention__sliding_window": 16, "attention__sliding_window_pattern": pattern}
    config = GGUFCheckpoint(write_gguf(make.model("gemma3", **facts), make.tensors("gemma3"))).config
    assert [kind == "sliding_attention" for kind in config["layer_types"]] == slides


def test_rope_scaling_and_sampling_are_passed_on(write_gguf, make):
    facts = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    }
    metadata = make.model("qwen2", **facts) | {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    checkpoint = GGUFCheckpoint(write_gguf(metadata, make.tensors("qwen2")))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert checkpoint.generation_config == {"temperature": 0.6, "top_k": 20}


def test_frequency_factors_become_rope_scaling(write_gguf, make):
    tensors = make.tensors("llama")
    tensors["rope_freqs.weight"] = np.array([1.0, 1.5, 4.0, 8.0], dtype=np.float32)
    checkpoint = GGUFCheckpoint(write_gguf(make.model("llama"), tensors))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "frequency_factors",
        "factors": [1.0, 1.5, 4.0, 8.0],
    }
    assert not any("rope" in name for name, _ in checkpoint.tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma9"}, "'gemma9'. Did you mean 'gemma3'.*Known: llama, qwen2"),
        ({"split.count": 3}, "one of 3 parts.*--merge"),
        ({"llama.attention.head_count": [4, 2]}, "head_count is \\(4, 2\\)"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.block_count": None}, "block_count is None"),
        ({"llama.block_count": 1}, "'blk.1.attn_norm.weight' has no place.*1 layers"),
        ({"llama.expert_count": 8}, "expert_count is 8.*mixture"),
        ({"llama.rope.dimension_count": 4}, "dimension_count is 4"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "must be a number"),
    ],
)
def test_what_cannot_be_served_is_refused(write_gguf, make, changes, message):
    metadata = {key: value for key, value in (make.model("llama") | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(write_gguf(metadata, make.tensors("llama")))


def test_unknown_tensors_are_refused(write_gguf, make):
    tensors = make.tensors("qwen2") | {"blk.0.attn_qkv.weight": np.zeros((4, 4), dtype=np.float32)}
    with pytest.raises(CheckpointError, match="'blk.0.attn_qkv.weight' has no place.*Did you mean 'blk.0.attn"):
        GGUFCheckpoint(write_gguf(make.model("qwen2"), tensors))


def test_unsupported_types_are_refused_when_the_file_is_opened(write_gguf, make):
    tensors = make.tensors("qwen2") | {"output.weight": np.zeros((263, 84), dtype=np.uint8)}
    kinds = {"output.weight": gguf.GGMLQuantizationType.Q2_K}
    with pytest.raises(CheckpointError, match="'output.weight' has type Q2_K"):
        GGUFCheckpoint(write_gguf(make.model("qwen2"), tensors, kinds))


def test_rows_that_do_not_fill_the_heads_are_refused(write_gguf, make):
    tensors = make.tensors("llama") | {"blk.0.attn_q.weight": np.zeros((30, 32), dtype=np.float32)}
    checkpoint = GGUFCheckpoint(write_gguf(make.model("llama"), tensors))
    with pytest.raises(CheckpointError, match="30 rows; 4 heads"):
        list(checkpoint.tensors())


@pytest.mark.slow
def test_smollm2(smollm2_path):
    checkpoint = GGUFCheckpoint(smollm2_path)
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["head_dim"], config["rope_theta"]) == (30, 64, 100_000.0)
    values = finite = 0
    for _, tensor in checkpoint.tensors():
        values += tensor.numel()
        finite += int(tensor.isfinite().sum())
    assert values == finite == 134_515_008


@pytest.mark.slow
def test_gemma3(gemma3_path):
    checkpoint = GGUFCheckpoint(gemma3_path)
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["head_dim"], config["sliding_window"]) == (18, 256, 512)
    assert [n for n, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    values = finite = 0
    for _, tensor in checkpoint.tensors():
        values += tensor.numel()
        finite += int(tensor.isfinite().sum())
    assert values == finite == 268_098_176
