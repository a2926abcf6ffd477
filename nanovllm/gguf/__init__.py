"""Models in llama.cpp's file format: one GGUF file with configuration, tokenizer and quantised weights.

A room: the core knows it only as a name in a table of checkpoint formats. ``GGUFCheckpoint`` gives out what a
Hugging Face folder would hold: the same configuration keys, the same tensor names, the same tensor meaning
(row order, norm weights); quantised tensors are expanded to float32 one at a time.
"""

from nanovllm.gguf.checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
