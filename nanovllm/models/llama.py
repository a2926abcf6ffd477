"""Llama and Mistral (Touvron et al. 2023, arXiv 2302.13971), and the decoder that Qwen's models share with them.

    tokens -> embedding -> [ + attention(norm(x)) , + mlp(norm(x)) ] x layers -> norm -> head -> logits

Mistral differs by a sliding window alone, which the configuration brings.
"""

from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.config import ModelConfig
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import Embedding, Head
from nanovllm.layers.mlp import MLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Angles, Rotary


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual.

    The addition of a block's result is left to the block that follows it, which also gets the norm in between: the
    three can be one pass over memory. A product that can add on its way does it itself.
    """

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "... tokens width"],
        residual: Float[Tensor, "tokens width"] | None,
        angles: Angles,
        cache: KVCache,
        batch: Batch,
    ) -> tuple[Float[Tensor, "... kept width"], Float[Tensor, "kept width"] | None]:
        """Return what is still to be added, maybe in parts, and the residual; or their sum alone."""
        x, residual = self.self_attn(x, residual, self.input_layernorm, angles, cache, batch)
        x, residual = self.mlp(x, residual, self.post_attention_layernorm)
        return x, residual


class Decoder(nn.Module):
    """Embedding, layers, final norm. Parameters are named as in ``model.*`` of a checkpoint."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, angles: Angles, cache: KVCache, batch: Batch) -> Float[Tensor, "kept width"]:
        """Return the normalised hidden state of each token of the step, or of its ``hidden_rows``."""
        x, residual = self.embed_tokens(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, angles, cache, batch)
        hidden: Tensor = self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        return hidden


class Llama(nn.Module):
    """The whole model. Families that differ in their attention alone override ``attention``."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        layers = [DecoderLayer(config, self.attention(config, layer)) for layer in range(config.num_layers)]
        self.model = Decoder(config, layers)
        self.lm_head = Head(
            config.hidden_size,
            config.vocab_size,
            self.model.embed_tokens if config.tie_word_embeddings else None,
        )
        self.rotaries = [Rotary(config.rope, config.head_dim, config.max_position_embeddings, max_model_len)]

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        """Build one layer's attention."""
        return Attention(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    def forward(self, batch: Batch, cache: KVCache) -> Float[Tensor, "kept width"]:
        """Compute a step: write its keys and values to the cache, return the hidden states."""
        angles = self.rotaries[0].angles(batch.positions, self.model.norm.weight.dtype)
        hidden: Tensor = self.model(angles, cache, batch)
        return hidden

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Score every token of the vocabulary as the next one; see ``Head``."""
        scores: Tensor = self.lm_head(hidden)
        return scores
