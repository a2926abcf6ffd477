"""Model families, found by the architecture's name in config.json and imported only then.

A model is an ``nn.Module`` built as ``Model(config, max_model_len)``. ``forward(batch, cache)`` returns the hidden
state of each token, ``logits(rows)`` the scores of the next token. Parameters have Hugging Face's names, but for
merged layers (``MergedLinear.parts``), and ``rotaries`` lists what must move to the device with them.
"""

from importlib import import_module
from typing import Any

from nanovllm.errors import CheckpointError, nearest

MODELS = {
    "LlamaForCausalLM": "nanovllm.models.llama:Llama",
    "MistralForCausalLM": "nanovllm.models.llama:Llama",
    "Qwen2ForCausalLM": "nanovllm.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "nanovllm.models.qwen3:Qwen3",
    "Gemma2ForCausalLM": "nanovllm.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "nanovllm.models.gemma3:Gemma3",
}


def find_model(architecture: str) -> Any:
    """Return the class for an architecture; raises CheckpointError with the list of known ones."""
    if architecture not in MODELS:
        raise CheckpointError(
            f"no model is built for architecture {architecture!r}; known are {', '.join(MODELS)}."
            f"{nearest(architecture, MODELS)}"
        )
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)
