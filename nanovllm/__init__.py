"""nanovllm: a small, fast inference engine for large language models.

Public names are imported when they are first used, so ``import nanovllm`` is instant and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM as AsyncLLM
    from nanovllm.beam_search import BeamSearchParams as BeamSearchParams
    from nanovllm.engine import LLMEngine as LLMEngine
    from nanovllm.errors import CheckpointError as CheckpointError
    from nanovllm.errors import ConfigError as ConfigError
    from nanovllm.errors import EngineError as EngineError
    from nanovllm.errors import NanoError as NanoError
    from nanovllm.errors import RequestError as RequestError
    from nanovllm.errors import UnknownOptionError as UnknownOptionError
    from nanovllm.llm import LLM as LLM
    from nanovllm.outputs import CompletionOutput as CompletionOutput
    from nanovllm.outputs import Logprob as Logprob
    from nanovllm.outputs import RequestOutput as RequestOutput
    from nanovllm.prompts import TextPrompt as TextPrompt
    from nanovllm.prompts import TokensPrompt as TokensPrompt
    from nanovllm.sampling_params import RequestOutputKind as RequestOutputKind
    from nanovllm.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "llm", "TextPrompt": "prompts", "TokensPrompt": "prompts",
    "AsyncLLM": "async_llm", "BeamSearchParams": "beam_search",
    "SamplingParams": "sampling_params", "RequestOutputKind": "sampling_params",
    "StructuredOutputsParams": "structured.params",
    "RequestOutput": "outputs", "CompletionOutput": "outputs", "Logprob": "outputs",
    "LLMEngine": "engine",
    "NanoError": "errors", "ConfigError": "errors", "UnknownOptionError": "errors",
    "CheckpointError": "errors", "RequestError": "errors", "EngineError": "errors",
}  # fmt: skip

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    return getattr(import_module(f"nanovllm.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
