"""Gemma 2 models (arXiv 2408.00118): soft caps bound scores and logits, every second layer sees a sliding window."""

from nanovllm.models.gemma3 import Gemma3


class Gemma2(Gemma3):
    """See the module."""

    generation = 2
