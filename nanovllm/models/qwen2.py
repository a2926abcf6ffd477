"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on query, key and value, whatever the configuration says."""

from nanovllm.config import ModelConfig
from nanovllm.layers.attention import Attention
from nanovllm.models.llama import Llama


class Qwen2(Llama):
    """See the module."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        """Build one layer's attention."""
        return Attention(config, layer, qkv_bias=True)
