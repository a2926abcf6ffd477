"""The options of an engine, and the facts of a model that the engine needs to know."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from nanovllm.errors import CheckpointError, ConfigError, nearest, unknown_option

logger = logging.getLogger(__name__)

DTYPES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"
}  # fmt: skip
"""Accepted spellings of ``dtype``, beside ``"auto"``."""

ALIASES = {"kvcache_block_size": "block_size", "num_kvcache_blocks": "num_gpu_blocks_override"}
"""nano-vllm's names for two options."""

IGNORED = {
    "trust_remote_code": "code from a model's folder is never run",
    "swap_space": "preempted requests are computed again, not swapped",
    "enable_chunked_prefill": "prefills are always split to fit max_num_batched_tokens",
}
"""Options of vLLM that are accepted, with a warning when they ask for something, because scripts carry them."""

CHOICES = {
    "dtype": ("auto", *DTYPES),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
    "load_format": ("auto", "dummy"),
    "scheduling_policy": ("fcfs", "priority"),
    "generation_config": ("auto", "vllm"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
}
LEAST = dict.fromkeys(
    ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override",
     "block_size", "tensor_parallel_size", "data_parallel_size"), 1
) | {"max_logprobs": -1, "max_model_len": 2}  # fmt: skip
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "quantization": (None,), "pipeline_parallel_size": (1,), "distributed_executor_backend": (None,),
    "tokenizer_revision": (None,), "override_generation_config": (None, {}), "speculative_config": (None,),
    "enable_lora": (False,), "enable_sleep_mode": (False,), "cpu_offload_gb": (0,), "tokenizer_mode": ("auto",),
    "limit_mm_per_prompt": (None, {}),
}  # fmt: skip
"""Options of vLLM that are not built: any value but these, which ask for nothing, is refused, not ignored."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The options of one engine. Frozen: what the engine finds out later, it keeps itself.

    Errors: ConfigError with the value, the rule and the way out; UnknownOptionError from ``from_options``.
    """

    model: str
    """A folder, a ``.gguf`` file, a built-in name, or a hub name ``owner/name``."""
    tokenizer: str | None = None
    """Take the tokenizer from this model instead."""
    revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = None
    dtype: str = "auto"
    """"auto": on a GPU the checkpoint's type, bfloat16 for wider ones; on a CPU float32, with matrices held in
    float16 unless the checkpoint has them in float32."""
    kv_cache_dtype: str = "auto"
    """"auto": what is computed in; "fp8", which is "fp8_e4m3": half the bytes of 16-bit types, on a GPU."""
    device: str = "auto"
    """"auto": a CUDA device if there is one, else the CPU."""
    load_format: str = "auto"
    """"auto" reads the weights; "dummy" draws random ones and reads nothing but the configuration."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and output; None: the model's own limit."""
    max_num_seqs: int = 256
    """Most requests computed in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step, over all requests; None: the device's default."""
    gpu_memory_utilization: int | float = 0.9
    """Part of a GPU's memory the engine may fill, in (0, 1]."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for keys and values; None: what the device has to spare."""
    num_gpu_blocks_override: int | None = None
    """Number of cache blocks, whatever the memory; on any device."""
    block_size: int | None = None
    """Tokens in one block; None: what the attention backend likes best."""
    enable_prefix_caching: bool = True
    target_itl_ms: int | float | None = None
    """Hold the time between two tokens of a running request under so many milliseconds: fewer requests run, and fewer
    tokens of prompts are computed in a step. None: throughput rules."""
    scheduling_policy: str = "fcfs"
    """"fcfs", or "priority": smaller numbers first, and one level makes up for 1,000 steps of waiting."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own, and dummy weights."""
    enforce_eager: bool = False
    """Never use CUDA graphs. Has nothing to switch off on a CPU."""
    deterministic: bool = False
    """On a GPU, a request's log-probabilities are the same bits alone and in any company, which costs speed. Otherwise
    they may differ in the last bits, for kernels are chosen by the size of a step. Changes nothing on a CPU."""
    compile: bool = False
    """Let ``torch.compile`` make what stands around the products of matrices, in place of our own kernels. The engine
    takes longer to start. Needs a C++ compiler on a CPU; contradicts ``enforce_eager`` and ``deterministic``."""
    tensor_parallel_size: int = 1
    """Number of devices that share the model, each with a process of its own; on a CPU of processes alone."""
    data_parallel_size: int = 1
    """Number of engines that share the requests, each a process with the whole model on devices of its own."""
    attention_backend: str = "auto"
    """A name from ``nanovllm.ops.attention.BACKENDS``, or "auto"."""
    skip_tokenizer_init: bool = False
    """Take and return token ids only."""
    chat_template: str | None = None
    """Jinja source that replaces the model's own template."""
    generation_config: str = "auto"
    """"auto": take default sampling parameters from the model's generation_config.json; "vllm": do not."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for at each token; -1: no limit."""
    logprobs_mode: str = "raw_logprobs"
    """Of what log-probabilities are: "raw_logprobs" of the model's logits, "processed_logprobs" of those that are drawn
    from, after all that the sampling parameters do; "raw_logits" and "processed_logits" return these themselves."""
    trace: str | None = None
    """Record every step, and write the recording when the engine is closed: "run.html" is a page to watch it on, with
    "run.json" for viewers of Chrome traces beside it; "run.recording.json" is the recording alone."""
    live: int | None = None
    """Serve that page at this port of this machine while the engine runs; 0: at any free one. The log says where."""
    disable_log_stats: bool = False
    """Count nothing: ``get_metrics`` then raises, and no advice is logged."""
    use_tqdm_on_load: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (isinstance(value, bool) and field.type is not bool) or not isinstance(value, cast(type, field.type)):
                kind = getattr(field.type, "__name__", str(field.type))
                _refuse(field.name, value, f"must be of type {kind}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), f"must be one of {', '.join(choices)}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                _refuse(name, value, f"must be a whole number of at least {least}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            _refuse("gpu_memory_utilization", self.gpu_memory_utilization, "must lie in (0, 1]; 0.9 leaves some room")
        if self.target_itl_ms is not None and not 0.0 < self.target_itl_ms < float("inf"):
            _refuse("target_itl_ms", self.target_itl_ms, "must be a number of milliseconds above 0; None: no target")

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: Mapping[str, Any]) -> "EngineConfig":
        """Build a config from keyword options in vLLM's or nano-vllm's names."""
        known = {field.name for field in fields(cls)}
        found: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if name in IGNORED:
                wanted = value is False if name == "enable_chunked_prefill" else bool(value)
                if wanted:
                    logger.warning("%s=%r is ignored: %s", name, value, IGNORED[name])
            elif name in NOT_BUILT:
                if value not in NOT_BUILT[name]:
                    _refuse(name, value, f"is not supported; leave it out, or at {NOT_BUILT[name][0]!r}")
            elif target not in known:
                raise unknown_option("LLM", name, known | set(ALIASES))
            elif target in found:
                given = sorted({other for other in options if ALIASES.get(other, other) == target})
                raise ConfigError(f"{' and '.join(given)} are one option; give one of them.", parameter=name)
            else:
                found[target] = _optional(target, value)
        return cls(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **found)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and how it is stretched (``models`` know the formulas)."""

    theta: float = 10_000.0
    kind: str = "default"
    """"default", "linear", "dynamic", "yarn", "llama3" or "frequency_factors"."""
    settings: Mapping[str, Any]
    """The other entries of ``rope_scaling`` (``rope_parameters`` since transformers 5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The facts of a decoder, from the names of Hugging Face's config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """For each layer, how many tokens back its attention sees (itself included); None: all."""
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]
    """The whole of config.json, for what only one family has."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read config.json's content. Raises CheckpointError where it misses or contradicts a fact."""
        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise CheckpointError(
                f"config.json names no architecture (architectures: {architectures!r}). It must list one, such as "
                '["Qwen3ForCausalLM"]; is this a complete model folder?'
            )
        hidden, heads, layers = (
            _count(raw, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        kv_heads = _count(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"{heads} attention heads do not divide into {kv_heads} key-value heads.")
        if raw.get("head_dim") is None and hidden % heads:
            raise CheckpointError(
                f"hidden_size {hidden} does not divide into {heads} heads, and head_dim is not given."
            )
        return cls(
            architecture=architectures[0],
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_count(raw, "head_dim", hidden // heads),
            max_position_embeddings=_count(raw, "max_position_embeddings", 2048, most=2**31 - 1),
            norm_eps=_real(raw, "rms_norm_eps", 1e-6),
            activation=raw.get("hidden_act") or raw.get("hidden_activation") or "silu",
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            rope=_rope(raw),
            windows=_windows(raw, layers),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
            raw=dict(raw),
        )


def token_ids(value: object) -> tuple[int, ...]:
    """Read ``eos_token_id``, which may be missing, a number or a list of numbers."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise CheckpointError(f"eos_token_id is {value!r}; it must be a token id or a list of token ids.")
    return tuple(values)


def configure_logging() -> None:
    """Print our log lines to standard error at the level NANOVLLM_LOG_LEVEL names, if it is set.

    Without the variable the application's own logging set-up rules, as for any library.
    """
    level = os.environ.get("NANOVLLM_LOG_LEVEL")
    package = logging.getLogger("nanovllm")
    if not level or package.handlers:
        return
    if level.upper() not in LOG_LEVELS:
        _refuse("NANOVLLM_LOG_LEVEL", level, f"must be one of {', '.join(LOG_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    package.addHandler(handler)
    package.setLevel(level.upper())


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read both spellings: ``rope_theta`` + ``rope_scaling``, and transformers 5's ``rope_parameters``."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"rope_scaling is {settings!r}; it must be an object or null.")
    settings = dict(settings.get("full_attention") or settings)  # Gemma 3 has one entry for each kind of layer
    theta = _real({"rope_theta": settings.pop("rope_theta", None) or raw.get("rope_theta")}, "rope_theta", 10_000.0)
    kinds = [settings.pop(name, None) for name in ("rope_type", "type")]
    return RopeConfig(theta=theta, kind=kinds[0] or kinds[1] or "default", settings=settings)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Which layers slide: ``layer_types`` if given; else Qwen2's switch and layer count; else all or none."""
    window = raw.get("sliding_window")
    # Qwen has a switch, off unless it is given, and a number of first layers that see everything all the same
    qwen = "use_sliding_window" in raw or str(raw.get("model_type")).startswith("qwen")
    if window is None or not raw.get("use_sliding_window", not qwen):
        return (None,) * layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"sliding_window is {window!r}; it must be a number of tokens or null.")
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            number = len(types) if isinstance(types, list) else repr(types)
            raise CheckpointError(f"layer_types has {number} entries for {layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    gemma2 = raw.get("model_type") == "gemma2"
    if gemma2 or raw.get("sliding_window_pattern") is not None:  # Gemma as published: every second or sixth is whole
        pattern = _count(raw, "sliding_window_pattern", 2 if gemma2 else None)
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    full = _count(raw, "max_window_layers", layers, least=0) if qwen else 0
    return tuple(None if layer < full else window for layer in range(layers))


def _count(
    raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1, most: int = 2**20
) -> int:  # fmt: skip
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(
            f"config.json has {name}: {value!r}; it must be a whole number from {least} to {most}.{nearest(name, raw)}"
        )
    return value


def _real(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json has {name}: {value!r}; it must be a number above 0.")
    return float(value)


def _refuse(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{name} is {value!r}; it {rule}.", parameter=name, value=value)


def _optional(name: str, value: object) -> object:
    """Read -1 as None where vLLM and nano-vllm do: "as much as fits"."""
    return None if value == -1 and name in {"max_model_len", "num_gpu_blocks_override"} else value
