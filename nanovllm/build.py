"""From options to an engine: which device and type, how long a context, how large a cache; then everything built.

Only ``llm`` and the command line import this file, and it imports everything else: here the parts meet.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.checkpoint import Checkpoint, open_checkpoint
from nanovllm.config import DTYPES, EngineConfig, ModelConfig, token_ids
from nanovllm.engine import Limits, LLMEngine
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kv_cache import KVCache, bytes_per_token
from nanovllm.loader import build_model, draw_weights, load_weights
from nanovllm.model_runner import ModelRunner
from nanovllm.ops.attention import find_backend
from nanovllm.scheduler import Scheduler
from nanovllm.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

STEP_TOKENS = {"cpu": 512, "cuda": 8192}
"""Default ``max_num_batched_tokens``. On a CPU a prefill is compute-bound from a few dozen rows on, and a smaller
step keeps decodes moving."""

CPU_CACHE_BYTES = 4 * 2**30
"""Most that the cache takes on a CPU unless told otherwise; pages are mapped only when they are first written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What options, checkpoint and machine come to, before anything large is allocated."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """What is computed in, and what the cache holds."""
    storage: torch.dtype
    """What matrices are held in: ``dtype``, or float16 on a CPU."""
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    backend: Any
    """The attention backend's module."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready to run, and what the facade keeps beside it."""

    engine: LLMEngine
    tokenizer: Tokenizer | None
    plan: Plan
    generation_config: dict[str, Any]


def plan(config: EngineConfig, checkpoint: Checkpoint) -> Plan:
    """Work out sizes and types. Raises ConfigError and CheckpointError."""
    model = ModelConfig.from_dict(checkpoint.config)
    device = _device(config.device)
    dtype, storage = _dtypes(config.dtype, model.dtype, device)
    backend = find_backend(config.attention_backend, device.type)
    return Plan(
        model=model,
        device=device,
        dtype=dtype,
        storage=storage,
        max_model_len=_max_model_len(config.max_model_len, model),
        max_num_batched_tokens=config.max_num_batched_tokens or STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"]),
        block_size=config.block_size or backend.PREFERRED_BLOCK_SIZE,
        backend=backend,
    )


def build(config: EngineConfig) -> Built:
    """Open the model, load it, allocate the cache, and connect the parts."""
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, download_dir=config.download_dir, token=config.hf_token
    )
    facts = plan(config, checkpoint)
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config, checkpoint)
    model = build_model(facts.model, facts.max_model_len, facts.dtype, facts.device)
    if config.load_format == "dummy":
        draw_weights(model, facts.device, facts.storage, config.seed)
    else:
        tensors = checkpoint.tensors()
        load_weights(model, tensors, facts.device, facts.storage, progress=config.use_tqdm_on_load)
    num_blocks = cache_blocks(config, facts)
    cache = KVCache.allocate(facts.model, num_blocks, facts.block_size, facts.dtype, facts.device)
    logger.info(
        "%s in %s on %s: %d blocks of %d tokens, attention by %s",
        facts.model.architecture, facts.dtype, facts.device, num_blocks, facts.block_size, facts.backend.__name__,
    )  # fmt: skip
    scheduler = Scheduler(
        BlockManager(num_blocks, facts.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        policy=config.scheduling_policy,
    )
    limits = Limits(
        max_model_len=facts.max_model_len,
        vocab_size=facts.model.vocab_size,
        max_logprobs=config.max_logprobs,
        eos_token_ids=_end_ids(facts.model, checkpoint.generation_config, tokenizer),
        seed=config.seed,
    )
    engine = LLMEngine(
        scheduler,
        ModelRunner(model, cache, facts.backend),
        limits,
        make_builder=None if tokenizer is None else lambda params: Detokenizer(tokenizer, params),
        decode_token=None if tokenizer is None else lambda token: tokenizer.decode([token], skip_special_tokens=False),
    )
    return Built(engine, tokenizer, facts, checkpoint.generation_config)


def cache_blocks(config: EngineConfig, facts: Plan, *, still_to_load: int = 0) -> int:
    """How many blocks the cache gets. ``still_to_load``: bytes of weights that are not in memory yet."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = bytes_per_token(facts.model, facts.dtype) * facts.block_size
    spare = config.kv_cache_memory_bytes
    if spare is None:
        spare = _spare_bytes(config, facts) - still_to_load
    most = config.max_num_seqs * -(-facts.max_model_len // facts.block_size)  # more could never be used
    blocks = min(spare // block_bytes, most)
    if blocks < 1:
        raise ConfigError(
            f"{spare} bytes are left for the cache, and one block of {facts.block_size} tokens takes {block_bytes}; "
            "give it more with kv_cache_memory_bytes, or take a smaller block_size or model.",
            parameter="kv_cache_memory_bytes", value=spare,
        )  # fmt: skip
    return blocks


def _spare_bytes(config: EngineConfig, facts: Plan) -> int:
    if facts.device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier engine of this process gave back is free too
        free, total = torch.cuda.mem_get_info(facts.device)
        widest = max(
            facts.model.hidden_size,
            facts.model.intermediate_size,
            facts.model.num_heads * facts.model.head_dim,
        )
        working = facts.max_num_batched_tokens * widest * 8 * facts.dtype.itemsize
        working += config.max_num_seqs * facts.model.vocab_size * 4 * 4  # logits and their copies in float32
        return int(free - (1 - config.gpu_memory_utilization) * total) - working
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return CPU_CACHE_BYTES
    return min(CPU_CACHE_BYTES, available // 2)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device is {name!r}, which cannot be used here ({reason}). Use 'auto' or 'cpu'.",
            parameter="device", value=name,
        ) from error  # fmt: skip
    return device


def _dtypes(wanted: str, stored: str | None, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return what to compute in and what to hold matrices in.

    On a CPU "auto" gives float32's answers: it computes in float32, and holds matrices in float16 unless the
    checkpoint has more than 16 bits a weight to lose. "float16" asks for the same, for CPUs have no arithmetic in it.
    """
    cpu = device.type == "cpu"
    if wanted == "auto" and not cpu:
        wanted = "float16" if stored == "float16" else "bfloat16"
    if cpu and (wanted == "auto" or DTYPES[wanted] == "float16"):
        return torch.float32, torch.float32 if wanted == "auto" and stored == "float32" else torch.float16
    dtype: torch.dtype = getattr(torch, DTYPES[wanted])
    return dtype, dtype


def _max_model_len(wanted: int | None, model: ModelConfig) -> int:
    """The model's limit, stretched where its rope scaling says so; or what the user wants, within that."""
    factor = model.rope.settings.get("factor", 1.0) if model.rope.kind in ("linear", "dynamic", "yarn") else 1.0
    trained = model.rope.settings.get("original_max_position_embeddings") or model.max_position_embeddings
    try:
        limit = max(model.max_position_embeddings, int(trained * float(factor)))
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"rope_scaling is {dict(model.rope.settings)}; its numbers are none: {error}.") from error
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"max_model_len is {wanted}; this model's positions end at {limit}. Use that or less.",
            parameter="max_model_len", value=wanted,
        )  # fmt: skip
    if wanted is not None:
        return wanted
    return model.max_position_embeddings if model.rope.kind == "dynamic" else limit


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.tokenizer is not None:
        checkpoint = open_checkpoint(config.tokenizer, download_dir=config.download_dir, token=config.hf_token)
    try:
        return Tokenizer(checkpoint.tokenizer_parts(), chat_template=config.chat_template)
    except CheckpointError:
        if config.load_format == "dummy" and config.tokenizer is None:
            logger.warning("%s has no tokenizer: prompts and outputs are token ids", config.model)
            return None
        raise


def _end_ids(model: ModelConfig, generation: dict[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that tokenizer, config or generation config call the end."""
    named = {*model.eos_token_ids, *token_ids(generation.get("eos_token_id"))}
    named |= set(() if tokenizer is None else tokenizer.eos_token_ids)
    return frozenset(token for token in named if token < model.vocab_size)
