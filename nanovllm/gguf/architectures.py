"""The architectures that GGUF files name: their configuration and tensor names in Hugging Face's words.

Source: ``convert_hf_to_gguf.py`` and ``llama-model.cpp`` of llama.cpp for what is stored and how, the
``configuration_*.py`` files of transformers for what it is called there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import CheckpointError, nearest
from nanovllm.gguf.reader import GGUFFile, Scalar, Value

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

ROPE_FACTORS = "rope_freqs.weight"
"""Not a parameter: the number by which each rotary frequency is divided (Llama 3.1's long context)."""

GEMMA_PERIOD = 6
"""Every sixth layer of Gemma 3 attends to everything; files that say otherwise name their own period."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of ``general.architecture``."""

    model_class: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    interleaved: bool = False
    """Whether rows of Q and K are in the order of interleaved rotary pairs."""
    norms_hold_one: bool = False
    """Whether norm weights are stored as 1 + w, w being what Hugging Face stores."""


ARCHITECTURES = {
    # Mistral's files call themselves llama too; the arithmetic is the same.
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", GEMMA_LAYER_NAMES, norms_hold_one=True),
}


def find_architecture(file: GGUFFile) -> Architecture:
    """Return the architecture of ``file``. Raises CheckpointError where it is not in the table."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {name!r}.{nearest(name, ARCHITECTURES)} "
            f"Known: {', '.join(ARCHITECTURES)}. Use one of these, or the model's original folder."
        )
    return ARCHITECTURES[name]


def tensor_name(name: str, architecture: Architecture, num_layers: int) -> str | None:
    """Translate the name of a tensor: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

    None for a name that this architecture does not have.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    found = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in architecture.layer_names or int(found[1]) >= num_layers:
        return None
    return f"model.layers.{int(found[1])}.{architecture.layer_names[found[2]]}.{found[3]}"


def read_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """Build the content of ``config.json``.

    Raises CheckpointError where a fact is missing or not supported.
    """
    facts = _Facts(file)
    heads = facts.integer("attention.head_count")
    hidden = facts.integer("embedding_length")
    head_dim = facts.integer("attention.key_length", hidden // heads)
    facts.refuse_unless("attention.value_length", head_dim, "values as wide as keys")
    facts.refuse_unless("rope.dimension_count", head_dim, "rotary embedding of whole heads")
    facts.refuse_unless("expert_count", 0, "no mixture of experts")
    facts.refuse_unless("rope.scale_linear", 1, "scaling by rope.scaling.factor only")
    facts.refuse_unless("rope.scaling.attn_factor", 1, "scores scaled as the rope type says")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": facts.vocabulary(),
        "hidden_size": hidden,
        "intermediate_size": facts.integer("feed_forward_length"),
        "num_hidden_layers": facts.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": facts.rope_scaling(),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture.model_type == "gemma3_text":
        config |= _gemma(facts, config)
    elif facts.has("attention.sliding_window"):
        config["sliding_window"] = facts.integer("attention.sliding_window")
    return config


def _gemma(facts: "_Facts", config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Gemma 3 has besides; half of it is in no file and comes from the model's description."""
    layers = config["num_hidden_layers"]
    # The 27B model, told by its 62 layers, scales scores by the width of a head as if heads filled the
    # hidden size (5376 / 32 = 168); all others by the head's real width.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": scalar,
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in facts.sliding(layers)],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
    }


class _Facts:
    """The metadata of one file, read by type; keys are those behind ``<architecture>.``"""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata.get('general.architecture')}."

    def has(self, key: str) -> bool:
        """Return whether the file says anything under ``key``."""
        return self.prefix + key in self.file.metadata

    def value(self, key: str, default: Scalar | None) -> Value:
        found = self.file.metadata.get(self.prefix + key, default)
        if found is None:
            raise self.error(key, found, "be given", "Convert the model again with a current llama.cpp.")
        return found

    def error(self, key: str, found: object, rule: str, way_out: str) -> CheckpointError:
        """Build the error for a fact that breaks ``rule``."""
        return CheckpointError(f"{self.file.path}: {self.prefix}{key} is {found!r}; it must {rule}. {way_out}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. A list (one value a layer) is refused: all layers must be alike."""
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or found <= 0:
            raise self.error(key, found, "be one positive integer", "This kind of model is not supported.")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. float32 in the file: rounded to the seven digits that it holds, 1e-05 and not
        9.999999747378752e-06."""
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.error(key, found, "be a number", "The file is damaged; fetch it again.")
        return float(f"{found:.7g}")

    def refuse_unless(self, key: str, wanted: int, what: str) -> None:
        """Raise where the file says something other than ``wanted``; silence means ``wanted``."""
        found = self.file.metadata.get(self.prefix + key, wanted)
        if found != wanted:
            raise self.error(key, found, f"be {wanted} ({what})", "This kind of model is not supported.")

    def vocabulary(self) -> int:
        """Return the number of rows of the embedding."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise CheckpointError(
                f"{self.file.path}: there is no tensor token_embd.weight with two dimensions; every language "
                "model has one. Give a file with a whole model, not an adapter, a projector or a vocabulary."
            )
        return table.shape[0]

    def sliding(self, layers: int) -> list[bool]:
        """Return for each layer whether it sees a window only. The file may name a period, or each layer."""
        key = "attention.sliding_window_pattern"
        if isinstance(pattern := self.value(key, GEMMA_PERIOD), tuple):
            if len(pattern) != layers:
                raise self.error(key, pattern, f"have {layers} entries", "The file is damaged; fetch it again.")
            return [bool(slides) for slides in pattern]
        period = self.integer(key, GEMMA_PERIOD)
        return [(layer + 1) % period != 0 for layer in range(layers)]

    def rope_scaling(self) -> dict[str, Any] | None:
        """Return how rotary frequencies are scaled for long contexts, except by ``ROPE_FACTORS``."""
        kind = self.file.metadata.get(self.prefix + "rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self.error("rope.scaling.type", kind, "be none, linear or yarn", "Use the model's original folder.")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if self.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = self.integer("rope.scaling.original_context_length")
        return scaling
