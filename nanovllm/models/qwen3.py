"""Qwen3 dense models (arXiv 2505.09388): Llama with each query and key head normalised before the rotation."""

from nanovllm.config import ModelConfig
from nanovllm.layers.attention import Attention
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.llama import Llama


class Qwen3(Llama):
    """See the module."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        """Build one layer's attention."""
        bias = config.attention_bias
        return Attention(config, layer, qkv_bias=bias, output_bias=bias, norm=RMSNorm)
