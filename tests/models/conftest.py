"""Tiny random models made by transformers, and the logits of both sides at every position."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.batch import Drawn, build_batch
from nanovllm.checkpoint import open_checkpoint
from nanovllm.config import ModelConfig
from nanovllm.kv_cache import KVCache
from nanovllm.loader import build_model, load_weights
from nanovllm.ops.attention import find_backend
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput, Span

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = dict(
    vocab_size=131, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
"""At transformers' usual range of 0.02 the logits are so flat that faults hide; at 0.15 they spread over 1 or so."""


def make_reference(config_class: str, seed: int = 0, **changes: Any) -> Any:
    """Draw a model; biases and norms, which transformers begins with 0 and 1, are drawn as well."""
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def load_ours(
    folder: Path, max_model_len: int = 256, dtype: torch.dtype = torch.float32, storage: torch.dtype | None = None
) -> SimpleNamespace:
    """Build and load our model from a folder. In tests new memory holds NaN, so what is not written shows."""
    device = torch.device("cpu")
    checkpoint = open_checkpoint(str(folder))
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, max_model_len, dtype, device)
    load_weights(model, checkpoint.tensors(), device, dtype if storage is None else storage)
    return SimpleNamespace(model=model, config=config, dtype=dtype)


@torch.inference_mode()
def our_logits(
    ours: SimpleNamespace, token_ids: Sequence[int], chunks: Sequence[int] | None = None, block_size: int = 16
) -> torch.Tensor:
    """Teacher forcing: the logits after each token, computed in one piece or in these chunks.

    Blocks lie anywhere in the pool, and what the pool holds before is large and finite.
    """
    device = torch.device("cpu")
    blocks = -(-len(token_ids) // block_size)
    cache = KVCache.allocate(ours.config, blocks + 2, block_size, ours.dtype, device)
    cache.data.normal_(0, 50)
    request = Request(
        request_id="0", prompt_token_ids=list(token_ids), params=SamplingParams(), max_tokens=1, arrival=0
    )
    request.block_ids = random.Random(len(token_ids)).sample(range(blocks + 2), blocks)
    backend = find_backend("auto", "cpu")
    rows, start = [], 0
    for size in chunks or [len(token_ids)]:
        output = SchedulerOutput((Span(request, start, start + size, samples=True),))
        batch = build_batch(output, block_size, backend, Drawn(1, torch.device(device)), all_hidden=True)
        rows.append(ours.model.logits(ours.model(batch, cache)))
        start += size
    assert start == len(token_ids)
    return torch.cat(rows)


@torch.inference_mode()
def reference_logits(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The same by transformers, which sees the whole at once."""
    return reference(torch.tensor([list(token_ids)])).logits[0].float()


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions above, for test files cannot import each other."""
    return SimpleNamespace(
        make_reference=make_reference, load_ours=load_ours, our_logits=our_logits, reference_logits=reference_logits
    )
