"""Our models are transformers' models: equal logits at every position, equal greedy tokens, for random configurations.

Bound on logits: at this size and spread transformers' own eager and fused attention lie 3e-6 to 1.4e-5 apart.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams

ATOL = 1e-4

WINDOWED = dict(sliding_window=7, max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama one layer, one head": (
        "LlamaConfig",
        dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=32),
    ),
    "llama tied, odd vocabulary": ("LlamaConfig", dict(tie_word_embeddings=True, vocab_size=257)),
    "llama all biases": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True)),
    "llama attention bias": ("LlamaConfig", dict(attention_bias=True)),
    "llama mlp bias": ("LlamaConfig", dict(mlp_bias=True)),
    "llama wide heads": ("LlamaConfig", dict(head_dim=20, num_attention_heads=6, num_key_value_heads=2)),
    "llama narrow heads": ("LlamaConfig", dict(head_dim=6, num_key_value_heads=4, hidden_size=128)),
    "llama gelu": ("LlamaConfig", dict(hidden_act="gelu", rms_norm_eps=1e-3)),
    "llama other base": ("LlamaConfig", dict(rope_parameters=dict(rope_type="default", rope_theta=77.0))),
    "llama linear rope": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=3.0)),
    ),
    "llama llama3 rope": ("LlamaConfig", dict(rope_parameters=LLAMA3, head_dim=32)),
    "llama yarn rope": ("LlamaConfig", dict(rope_parameters=YARN, head_dim=32)),
    "llama yarn rope, all settings": (
        "LlamaConfig",
        dict(rope_parameters=YARN | dict(beta_fast=16.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5)),
    ),
    "llama yarn rope, given factor": (
        "LlamaConfig",
        dict(rope_parameters=YARN | dict(attention_factor=1.3, truncate=False), head_dim=32),
    ),
    "llama dynamic rope, short": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    ),
    "mistral no window": ("MistralConfig", dict(sliding_window=None)),
    "mistral window": ("MistralConfig", WINDOWED),
    "mistral window of two": ("MistralConfig", dict(sliding_window=2, head_dim=16, num_hidden_layers=3)),
    "qwen2": ("Qwen2Config", dict(num_hidden_layers=4)),
    "qwen2 tied, window off": (
        "Qwen2Config",
        dict(tie_word_embeddings=True, use_sliding_window=False, sliding_window=5, max_window_layers=1),
    ),
    "qwen2 windows from layer 1 on": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3),
    ),
    "qwen2 yarn rope": ("Qwen2Config", dict(rope_parameters=YARN | dict(rope_theta=1e6), num_key_value_heads=1)),
    "qwen3": ("Qwen3Config", dict(head_dim=20)),
    "qwen3 tied, bias": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True, attention_bias=True)),
    "qwen3 windows": (
        "Qwen3Config",
        dict(head_dim=12, use_sliding_window=True, sliding_window=6, max_window_layers=2, num_hidden_layers=3),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(head_dim=16, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=24,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "gemma3 capped logits": (
        "Gemma3TextConfig", dict(num_hidden_layers=3, head_dim=16, sliding_window=9, final_logit_softcapping=0.7),
    ),
    "gemma2": (
        "Gemma2Config",
        dict(num_hidden_layers=3, head_dim=16, sliding_window=6, query_pre_attn_scalar=24,
             attn_logit_softcapping=1.5, final_logit_softcapping=0.7),
    ),
    "gemma2 as published": ("Gemma2Config", dict(num_hidden_layers=4, head_dim=12, sliding_window=500)),
    "gemma3 untied, bias": (
        "Gemma3TextConfig",
        dict(head_dim=12, num_hidden_layers=2, sliding_window=500, tie_word_embeddings=False, attention_bias=True,
             layer_types=["sliding_attention", "full_attention"]),
    ),
    "gemma3 scaled rope": (
        "Gemma3TextConfig",
        dict(head_dim=16, num_hidden_layers=2, sliding_window=9, layer_types=["sliding_attention", "full_attention"],
             rope_parameters=dict(
                 full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e5),
                 sliding_attention=dict(rope_type="default", rope_theta=300.0),
             )),
    ),
}  # fmt: skip

PROMPT_LENGTH = 43
CHUNKS = [[17, 1, 16, 9], [1] * PROMPT_LENGTH, [5, 30, 1, 1, 6]]


@pytest.fixture(params=CONFIGS)
def pair(request, kit, tmp_path: Path):
    """(transformers' model, the folder that it was saved to)."""
    config_class, changes = CONFIGS[request.param]
    seed = list(CONFIGS).index(request.param)
    reference = kit.make_reference(config_class, seed=seed, **changes)
    reference.save_pretrained(tmp_path)
    return reference, tmp_path


def test_logits_and_greedy_tokens(pair, kit):
    reference, folder = pair
    vocab = reference.config.vocab_size
    tokens = torch.randint(vocab, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = kit.reference_logits(reference, tokens)
    assert 0.3 < float(expected.std()) < 100, "flat logits would hide faults"
    ours = kit.load_ours(folder)
    for number, chunks in enumerate([None, *CHUNKS]):
        found = kit.our_logits(ours, tokens, chunks, block_size=(16, 16, 4, 1)[number])
        torch.testing.assert_close(found, expected, rtol=0, atol=ATOL, msg=lambda text, c=chunks: f"chunks {c}: {text}")

    prompts = [tokens[:20], tokens[:1], tokens]
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=12,
            do_sample=False,
        )[0].tolist()  # fmt: skip
        assert output.token_ids == whole[len(prompt) :]


@pytest.mark.parametrize("length", [20, 32, 33, 64])
def test_dynamic_rope_follows_the_longest_context_allowed(kit, tmp_path, length):
    """transformers stretches with the context it has seen; ours with what max_model_len allows, so they are equal
    where the context is just that long."""
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    reference = kit.make_reference("LlamaConfig", max_position_embeddings=32, rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(131, (length,)).tolist()
    ours = kit.load_ours(tmp_path, max_model_len=length)
    torch.testing.assert_close(kit.our_logits(ours, tokens), kit.reference_logits(reference, tokens), rtol=0, atol=ATOL)


def test_dynamic_rope_knows_one_trained_length(kit, tmp_path):
    """transformers measures by max_position_embeddings, whatever original_max_position_embeddings says."""
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0, original_max_position_embeddings=16)
    reference = kit.make_reference("LlamaConfig", max_position_embeddings=32, rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(131, (32,)).tolist()
    ours = kit.load_ours(tmp_path, max_model_len=32)
    torch.testing.assert_close(kit.our_logits(ours, tokens), kit.reference_logits(reference, tokens), rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama", "mistral window", "gemma3"])
def test_the_last_position_allowed(kit, tmp_path, name):
    config_class, changes = CONFIGS[name]
    reference = kit.make_reference(config_class, **{**changes, "max_position_embeddings": 65})
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(131, (65,)).tolist()
    found = kit.our_logits(kit.load_ours(tmp_path, max_model_len=65), tokens, [64, 1])
    torch.testing.assert_close(found, kit.reference_logits(reference, tokens), rtol=0, atol=ATOL)
    with LLM(tmp_path, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False) as llm:
        (output,) = llm.generate(tokens[:64], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
        assert len(output.token_ids) == 1
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match="65 tokens long.*max_model_len=65"):
            llm.generate(tokens, use_tqdm=False)


@pytest.mark.parametrize("window", [1, 15, 16, 17])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_windows_at_the_edges_of_blocks(kit, tmp_path, window, length):
    reference = kit.make_reference("MistralConfig", sliding_window=window)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(131, (length,)).tolist()
    expected, ours = kit.reference_logits(reference, tokens), kit.load_ours(tmp_path)
    for chunks in (None, [length - 1, 1], [1] * length):
        torch.testing.assert_close(kit.our_logits(ours, tokens, chunks), expected, rtol=0, atol=ATOL)


def test_bfloat16_stays_near_float32(kit, tmp_path):
    """A bound on faults, not on rounding: dense models of this kind move by 0.07 to 0.28 in bfloat16."""
    reference = kit.make_reference("Qwen3Config", head_dim=16)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(131, (40,)).tolist()
    found = kit.our_logits(kit.load_ours(tmp_path, dtype=torch.bfloat16), tokens, [33, 1, 6])
    assert found.dtype is torch.float32
    assert float((found - kit.reference_logits(reference, tokens)).abs().max()) < 0.5


def test_a_float64_model_removes_the_rounding(kit, tmp_path):
    """Nothing inside falls back to float32 but the angles: one piece and chunks agree to 1e-12."""
    kit.make_reference("Qwen3Config", head_dim=16).save_pretrained(tmp_path)
    ours = kit.load_ours(tmp_path, dtype=torch.float64)
    tokens = torch.randint(131, (40,)).tolist()
    torch.testing.assert_close(
        kit.our_logits(ours, tokens), kit.our_logits(ours, tokens, [7, 1, 20, 12]), rtol=0, atol=1e-12
    )
