"""From options to an engine: which device and type, how long a context, how large a cache; then everything built.

Only ``llm`` and the command line import this file, and it imports everything else: here the parts meet.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.checkpoint import Checkpoint, find, open_checkpoint
from nanovllm.config import DTYPES, EngineConfig, ModelConfig
from nanovllm.engine import LLMEngine
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kv_cache import KVCache, bytes_per_token
from nanovllm.loader import build_model, draw_weights, load_weights
from nanovllm.model_runner import ModelRunner
from nanovllm.models import find_model
from nanovllm.ops.attention import find_backend
from nanovllm.ops.sample import MOST_LOGPROBS
from nanovllm.request import Matcher, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerOutput, Span
from nanovllm.tokenizer import Tokenizer, end_ids, text_tools

logger = logging.getLogger(__name__)

GRAMMARS = "nanovllm.structured.compiler:Compiler"
"""What holds requests to their ``structured_outputs``."""

STEP_TOKENS = {"cpu": 512, "cuda": 8192, "large cuda": 16_384}
"""Default ``max_num_batched_tokens``. On a CPU a prefill is compute-bound from a few dozen rows on, and a smaller
step keeps decodes moving. A GPU of 70 GB or more may compute 8,192 tokens of a small model sooner than Python launches
their kernels."""

CPU_CACHE_BYTES = 4 * 2**30
"""Most that the cache takes on a CPU unless told otherwise; pages are mapped only when they are first written."""

CACHE_SCALES = "nanovllm.quantization:cache_scales"
"""What reads the scales of a float8 cache that some checkpoints have."""

PACING = "nanovllm.pacing:PacedScheduler"
"""The scheduler for a ``target_itl_ms``."""

COMPILER = "nanovllm.compiled"
"""The room that makes ``compile=True`` of a model."""

RANKS = "nanovllm.parallel.group:Group"
"""What starts the other ranks of ``tensor_parallel_size``, and speaks for them."""

REPLICAS = "nanovllm.parallel.data:Replicas"
"""The engine of ``data_parallel_size``: it sends requests to others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What options, checkpoint and machine come to, before anything large is allocated."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """What is computed in."""
    cache_dtype: torch.dtype
    """What the cache holds: ``dtype``, or float8."""
    storage: torch.dtype
    """What matrices are held in: ``dtype``, or float16 on a CPU."""
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    backend: Any
    """The attention backend's module."""
    deterministic: bool
    """Whether kernels must not be chosen by the size of a step; False on a CPU, where none is."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready to run, and what the facade keeps beside it."""

    engine: LLMEngine
    tokenizer: Tokenizer | None
    plan: Plan
    generation_config: dict[str, Any]
    model: Any
    close: Callable[[], None]
    """Ends what memory alone would not: the processes of other ranks."""


def plan(config: EngineConfig, checkpoint: Checkpoint) -> Plan:
    """Work out sizes and types. Raises ConfigError and CheckpointError."""
    if isinstance(names := checkpoint.config.get("architectures"), list) and names and isinstance(names[0], str):
        find_model(names[0])  # first, for another family may have other names for its sizes
    model = ModelConfig.from_dict(checkpoint.config)
    device = _device(config.device)
    dtype, storage = _dtypes(config.dtype, model.dtype, device)
    backend = find_backend(config.attention_backend, device.type, (model.head_dim, config.block_size, dtype))
    return Plan(
        model=model, device=device, dtype=dtype, deterministic=_deterministic(config, device, backend),
        storage=storage, backend=backend, max_model_len=_max_model_len(config.max_model_len, model),
        cache_dtype=_cache_dtype(config.kv_cache_dtype, dtype, device, backend),
        max_num_batched_tokens=config.max_num_batched_tokens or _step_tokens(device),
        block_size=config.block_size or backend.PREFERRED_BLOCK_SIZE,
    )  # fmt: skip


def build(config: EngineConfig) -> Built:
    """Open the model, load it, allocate the cache, and connect the parts."""
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, download_dir=config.download_dir, token=config.hf_token
    )
    facts = plan(config, checkpoint)
    tokenizer = None if config.skip_tokenizer_init else open_tokenizer(config, checkpoint)
    limits = Limits(
        max_model_len=facts.max_model_len, vocab_size=facts.model.vocab_size, max_logprobs=config.max_logprobs,
        eos_token_ids=end_ids(facts.model, checkpoint.generation_config, tokenizer), seed=config.seed,
        by_priority=config.scheduling_policy == "priority",
    )  # fmt: skip
    tools: Any = {}
    if tokenizer is not None:
        tools = text_tools(tokenizer) | {"make_matcher": matchers(tokenizer, limits.eos_token_ids)}
    if config.data_parallel_size > 1:
        replicas = find(REPLICAS)(config, facts, limits, **tools)
        return Built(replicas, tokenizer, facts, checkpoint.generation_config, None, replicas.close)
    ranks = find(RANKS)(config, facts) if config.tensor_parallel_size > 1 else None
    with nullcontext() if ranks is None else ranks.guarding():
        runner, num_blocks = build_runner(config, checkpoint, facts, ranks)
        leader = runner if ranks is None else ranks.lead(runner)
    paced = config.target_itl_ms is not None
    make: Any = partial(find(PACING), target_itl_ms=config.target_itl_ms) if paced else Scheduler
    scheduler = make(
        BlockManager(num_blocks, facts.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        policy=config.scheduling_policy,
        share_outputs=not facts.deterministic,  # a drawn token's key is not, to the last bit, that of a prompt's token
    )
    engine = LLMEngine(scheduler, leader, limits, **tools)
    close = (lambda: None) if ranks is None else ranks.close
    return Built(engine, tokenizer, facts, checkpoint.generation_config, runner.model, close)


def build_runner(config: EngineConfig, checkpoint: Checkpoint, facts: Plan, ranks: Any) -> tuple[ModelRunner, int]:
    """Load the model and allocate the cache, or what one of several ranks has of both; return also its blocks.

    Raises ConfigError where a GPU has no memory for weights, a step or its graphs.
    """
    try:
        with torch.cuda.device(facts.device if facts.device.type == "cuda" else -1):
            return _build_runner(config, checkpoint, facts, ranks)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"weights, a step and its CUDA graphs do not fit into the memory of {facts.device} ({error}). Lower "
            f"{_levers(config, facts)}, or gpu_memory_utilization={config.gpu_memory_utilization}; raise "
            f"tensor_parallel_size={config.tensor_parallel_size}; or take a smaller model.",
            parameter="gpu_memory_utilization", value=config.gpu_memory_utilization,
        ) from error  # fmt: skip


def _build_runner(config: EngineConfig, checkpoint: Checkpoint, facts: Plan, ranks: Any) -> tuple[ModelRunner, int]:
    whole, facts = facts, facts if ranks is None else ranks.facts
    model = build_model(facts.model, facts.max_model_len, facts.dtype, facts.device)
    if ranks is not None:
        ranks.shard(model)
    if config.compile:
        find(f"{COMPILER}:prepare")(model, facts.device, config)
    scales = None
    if config.load_format == "dummy":
        draw_weights(model, facts.device, facts.storage, config.seed, deterministic=facts.deterministic)
    else:
        named = load_weights(
            model, checkpoint.tensors(), facts.device, facts.storage,
            deterministic=facts.deterministic, progress=config.use_tqdm_on_load,
        )  # fmt: skip
        scales = find(CACHE_SCALES)(named, whole.model, facts.cache_dtype) if named else None
    if ranks is not None:
        scales = None if scales is None else ranks.cache_scales(scales)
        ranks.connect()
    measured = facts.device.type == "cuda" and config.num_gpu_blocks_override is config.kv_cache_memory_bytes is None
    working = working_bytes(config, facts, model) if measured else None
    num_blocks = cache_blocks(config, facts, working=working)
    if ranks is not None:
        num_blocks = ranks.agree(num_blocks)
    cache = KVCache.allocate(facts.model, num_blocks, facts.block_size, facts.cache_dtype, facts.device, scales)
    logger.info(
        "%s in %s on %s: %d blocks of %d tokens, attention by %s",
        facts.model.architecture, facts.dtype, facts.device, num_blocks, facts.block_size, facts.backend.__name__,
    )  # fmt: skip
    runner = _runner(config, facts, model, cache)
    runner.prepare()
    return runner, num_blocks


def _runner(config: EngineConfig, facts: Plan, model: Any, cache: KVCache, *, record_ahead: bool = True) -> ModelRunner:
    runner = ModelRunner(
        model, cache, facts.backend,
        max_requests=min(config.max_num_seqs, facts.max_num_batched_tokens), max_model_len=facts.max_model_len,
        enforce_eager=config.enforce_eager, record_ahead=record_ahead,
        deterministic=facts.deterministic, logprobs_mode=config.logprobs_mode,
    )  # fmt: skip
    if config.compile:  # now, for graphs are recorded in the first step
        find(f"{COMPILER}:warm_up")(runner, config.max_num_seqs)
    return runner


def working_bytes(config: EngineConfig, facts: Plan, model: Any) -> int:
    """Compute the largest step there can be on a GPU; return what it takes of its memory beside weights and cache.

    First a step of prompts alone, then one of decodes alone, with its graph; each with as many requests as may run.
    """
    number = min(config.max_num_seqs, facts.max_num_batched_tokens)
    length = min(facts.max_num_batched_tokens // number, facts.max_model_len)
    blocks = -(-length // facts.block_size)
    requests = [
        Request(request_id="", prompt_token_ids=[0] * length, params=SamplingParams(), max_tokens=1, arrival=0)
        for _ in range(number)
    ]
    for place, request in enumerate(requests):
        request.block_ids = list(range(place * blocks, (place + 1) * blocks))
    torch.cuda.empty_cache()
    cache = KVCache.allocate(facts.model, blocks * len(requests), facts.block_size, facts.cache_dtype, facts.device)
    runner = _runner(config, facts, model, cache, record_ahead=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.submit(SchedulerOutput(tuple(Span(request, 0, length, True) for request in requests)))()
    peak = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.memory_reserved()
    for request in requests:  # a decode, whatever kind of it: its last token is one that was drawn
        del request.prompt_token_ids[-1]
    runner.submit(SchedulerOutput(tuple(Span(request, length - 1, length, True) for request in requests)))()
    return int(peak + max(0, torch.cuda.memory_reserved() - reserved))


def cache_blocks(config: EngineConfig, facts: Plan, *, working: int | None = None, still_to_load: int = 0) -> int:
    """How many blocks the cache gets.

    ``working``: bytes that a step takes, None: an estimate; ``still_to_load``: bytes of weights not in memory yet.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = bytes_per_token(facts.model, facts.cache_dtype) * facts.block_size
    spare = config.kv_cache_memory_bytes
    if spare is None:
        spare = _spare_bytes(config, facts, working) - still_to_load
    most = config.max_num_seqs * -(-facts.max_model_len // facts.block_size)  # more could never be used
    blocks = min(spare // block_bytes, most)
    if blocks < 1:
        raise ConfigError(
            f"{spare} bytes are left for the cache, and one block of {facts.block_size} tokens takes {block_bytes}. "
            f"Raise gpu_memory_utilization={config.gpu_memory_utilization} or kv_cache_memory_bytes; lower "
            f"{_levers(config, facts)}; on a GPU take kv_cache_dtype='fp8'; or take a smaller block_size or model.",
            parameter="kv_cache_memory_bytes", value=spare,
        )  # fmt: skip
    return blocks


def _levers(config: EngineConfig, facts: Plan) -> str:
    sizes = f"max_num_batched_tokens={facts.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}"
    return f"{sizes} or max_model_len={facts.max_model_len}, which the working memory of a step follows"


def _spare_bytes(config: EngineConfig, facts: Plan, working: int | None) -> int:
    if facts.device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier engine of this process gave back is free too
        free, total = torch.cuda.mem_get_info(facts.device)
        if working is None:
            model = facts.model
            widest = max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim)
            working = facts.max_num_batched_tokens * widest * 8 * facts.dtype.itemsize
            working += config.max_num_seqs * model.vocab_size * 4 * 4  # logits and their copies in float32
        return int(free - (1 - config.gpu_memory_utilization) * total) - working
    try:  # what can be had: free memory alone is little where the system has files in the rest of it
        words = Path("/proc/meminfo").read_text(encoding="ascii").split()
        return min(CPU_CACHE_BYTES, 1024 * int(words[words.index("MemAvailable:") + 1]) // 2)
    except (ValueError, OSError):  # another system
        return CPU_CACHE_BYTES


def _device(name: str) -> torch.device:
    name = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(name, name)
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("it is neither a CPU nor a CUDA device")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        raise ConfigError(
            f"device is {name!r}, which cannot be used here ({str(error).splitlines()[0]}). Use 'auto' or 'cpu'.",
            parameter="device", value=name,
        ) from error  # fmt: skip
    return device


def _dtypes(wanted: str, stored: str | None, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return what to compute in and what to hold matrices in.

    On a CPU "auto" gives float32's answers: it computes in float32, and holds matrices in float16 unless the
    checkpoint has more than 16 bits a weight to lose. "float16" asks for the same, for CPUs have no arithmetic in it.
    A GPU without bfloat16 gets float16 in its place.
    """
    cpu = device.type == "cpu"
    if wanted == "auto" and not cpu:
        wanted = "float16" if stored == "float16" else "bfloat16"
    if cpu and (wanted == "auto" or DTYPES[wanted] == "float16"):
        return torch.float32, torch.float32 if wanted == "auto" and stored == "float32" else torch.float16
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    if DTYPES[wanted] == "bfloat16" and capability < (8, 0):
        logger.warning("float16 instead of bfloat16: this device's compute capability is %d.%d, below 8.0", *capability)
        wanted = "float16"
    dtype: torch.dtype = getattr(torch, DTYPES[wanted])
    return dtype, dtype


def _cache_dtype(wanted: str, dtype: torch.dtype, device: torch.device, backend: Any) -> torch.dtype:
    """Return what the cache holds; float8 only where the backend's kernels read it."""
    if wanted == "auto":
        return dtype
    lowest = getattr(backend, "FLOAT8_CAPABILITY", None)
    if device.type != "cuda" or lowest is None or torch.cuda.get_device_capability(device) < lowest:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}; it must be 'auto' here: a cache of float8 needs the Triton attention "
            f"backend on a CUDA device of compute capability 8.9 or above, and this is {backend.__name__} on {device}.",
            parameter="kv_cache_dtype", value=wanted,
        )  # fmt: skip
    return torch.float8_e4m3fn


def _deterministic(config: EngineConfig, device: torch.device, backend: Any) -> bool:
    """Return whether kernels have to be told; raise where they cannot be."""
    if not config.deterministic or device.type != "cuda":
        return False
    if not getattr(backend, "DETERMINISTIC", False):
        raise ConfigError(
            "deterministic is True; it must be False here: on a GPU it needs the Triton attention backend, and this is "
            f"{backend.__name__}. Use attention_backend='auto' on a device of compute capability 8.0 or above, with a "
            "model whose head dimension is at most 256.",
            parameter="deterministic", value=True,
        )  # fmt: skip
    if not 0 <= config.max_logprobs <= MOST_LOGPROBS:
        raise ConfigError(
            f"max_logprobs is {config.max_logprobs}; with deterministic=True it must be at most {MOST_LOGPROBS} on a "
            "GPU, for the kernel of larger numbers adds up in another order. Lower it, or leave deterministic.",
            parameter="max_logprobs", value=config.max_logprobs,
        )  # fmt: skip
    return True


def _step_tokens(device: torch.device) -> int:
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 70e9
    return STEP_TOKENS.get(f"{'large ' * large}{device.type}", STEP_TOKENS["cpu"])


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
    usual = model.max_position_embeddings if model.rope.kind == "dynamic" else limit
    return usual if wanted is None else wanted


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Read the model's tokenizer, or the one that is named in its place; None if dummy weights come without."""
    if config.tokenizer is not None:
        checkpoint = open_checkpoint(config.tokenizer, download_dir=config.download_dir, token=config.hf_token)
    try:
        return Tokenizer(checkpoint.tokenizer_parts(), chat_template=config.chat_template)
    except CheckpointError:
        if config.load_format == "dummy" and config.tokenizer is None:
            logger.warning("%s has no tokenizer: prompts and outputs are token ids", config.model)
            return None
        raise


def matchers(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Callable[[SamplingParams], Matcher]:
    """Return what makes matchers; the room that knows how is loaded when the first one is wanted."""
    made: list[Any] = []

    def make(params: SamplingParams) -> Matcher:
        if not made:
            made.append(find(GRAMMARS)(tokenizer, eos_token_ids))
        matcher: Matcher = made[0].matcher(params)
        return matcher

    return make
