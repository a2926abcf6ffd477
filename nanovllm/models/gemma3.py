"""Gemma 3 text models (arXiv 2503.19786).

Against Llama: embeddings scaled by sqrt(width), norms before and after each block, weights of norms stored as their
distance from 1, normalised query and key heads, and layers that see a sliding window and rotate with a base of
their own.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import Embedding, Head
from nanovllm.layers.mlp import MLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Angles, Rotary


class GemmaNorm(RMSNorm):
    """RMS normalisation whose stored weight is the distance of the scale from 1."""

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """Turn the distance into the scale; called once, after loading."""
        self.weight.data += 1.0


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, config: ModelConfig, layer: int, head_norm: type[RMSNorm] | None, softcap: float | None) -> None:
        super().__init__()
        scale = config.raw.get("query_pre_attn_scalar", 256) ** -0.5
        bias = config.attention_bias
        self.self_attn = Attention(
            config, layer, qkv_bias=bias, output_bias=bias, norm=head_norm, scale=scale, softcap=softcap, adds=False
        )
        self.mlp = MLP(config, adds=False)
        width, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = GemmaNorm(width, eps)
        self.post_attention_layernorm = GemmaNorm(width, eps)
        self.pre_feedforward_layernorm = GemmaNorm(width, eps)
        self.post_feedforward_layernorm = GemmaNorm(width, eps)

    def forward(
        self, x: Float[Tensor, "tokens width"], angles: Angles, cache: KVCache, batch: Batch
    ) -> Float[Tensor, "kept width"]:
        """Return the residual after both blocks."""
        added, x = self.self_attn(x, None, self.input_layernorm, angles, cache, batch)
        x = x + self.post_attention_layernorm(added)
        added, _ = self.mlp(x, None, self.pre_feedforward_layernorm)
        x = x + self.post_feedforward_layernorm(added)
        return x


class Decoder(nn.Module):
    """Scaled embedding, layers of two kinds, final norm."""

    def __init__(self, config: ModelConfig, head_norm: type[RMSNorm] | None, softcap: float | None) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, head_norm, softcap) for layer in range(config.num_layers)
        )
        self.norm = GemmaNorm(config.hidden_size, config.norm_eps)
        self.windows = config.windows

    def forward(
        self, angles: Angles, sliding_angles: Angles, cache: KVCache, batch: Batch
    ) -> Float[Tensor, "kept width"]:
        """Return the normalised hidden state of each token of the step, or of its ``hidden_rows``."""
        x = self.embed_tokens(batch.token_ids)
        x = x * torch.tensor(x.shape[1] ** 0.5, dtype=x.dtype)  # rounded to the model's type first, as in training
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, angles if window is None else sliding_angles, cache, batch)
        hidden: Tensor = self.norm(x)
        return hidden


class Gemma3(nn.Module):
    """The whole model. Gemma 2 is another ``generation``: no norms of heads, caps on scores, one base of rotation."""

    generation = 3

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        softcap, latest = soft_cap(config, "attn_logit_softcapping"), self.generation == 3
        if latest and softcap is not None:
            raise CheckpointError(f"attn_logit_softcapping is {softcap}; Gemma 3 is built without it, as published.")
        if config.raw.get("use_bidirectional_attention"):
            raise CheckpointError("use_bidirectional_attention is true; only causal decoders are built.")
        self.model = Decoder(config, GemmaNorm if latest else None, softcap)
        self._softcap = soft_cap(config, "final_logit_softcapping")
        tied = config.raw.get("tie_word_embeddings", True)
        self.lm_head = Head(config.hidden_size, config.vocab_size, self.model.embed_tokens if tied else None)
        local = RopeConfig(theta=_local_base(config), settings={}) if latest else config.rope
        self.rotaries = [
            Rotary(rope, config.head_dim, config.max_position_embeddings, max_model_len)
            for rope in (config.rope, local)
        ]

    def forward(self, batch: Batch, cache: KVCache) -> Float[Tensor, "kept width"]:
        """Compute a step: write its keys and values to the cache, return the hidden states."""
        dtype = self.model.norm.weight.dtype
        angles, sliding = (rotary.angles(batch.positions, dtype) for rotary in self.rotaries)
        hidden: Tensor = self.model(angles, sliding, cache, batch)
        return hidden

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Score every token of the vocabulary as the next one; at least float32."""
        scores: Tensor = self.lm_head(hidden)
        return scores if self._softcap is None else torch.tanh(scores / self._softcap) * self._softcap


def soft_cap(config: ModelConfig, name: str) -> float | None:
    """Return what bounds scores or logits: s becomes c tanh(s / c)."""
    value = config.raw.get(name)
    if value is not None and not (type(value) in (int, float) and 0 < value < float("inf")):
        raise CheckpointError(f"{name} is {value!r}; it must be a number above 0, or null for no cap.")
    return value


def _local_base(config: ModelConfig) -> float:
    """The rotation base of sliding layers: ``rope_local_base_freq``, or transformers 5's nested spelling."""
    nested = config.raw.get("rope_parameters") or {}
    sliding = nested.get("sliding_attention") or {}
    return float(sliding.get("rope_theta") or config.raw.get("rope_local_base_freq") or 10_000.0)
