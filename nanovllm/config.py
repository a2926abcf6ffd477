"""The options of an engine, and the facts of a model that the engine needs to know."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
    "disable_log_stats": "figures are always kept",
    "enable_chunked_prefill": "prefills are always split to fit max_num_batched_tokens",
}
"""Options of vLLM that are accepted, with a warning when they ask for something, because scripts carry them."""

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
    """"auto": the checkpoint's type on a GPU; on a CPU float32, or bfloat16 for a bfloat16 checkpoint where the
    processor computes in it."""
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
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory the engine may fill, in (0, 1]."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for keys and values; None: what the device has to spare."""
    num_gpu_blocks_override: int | None = None
    """Number of cache blocks, whatever the memory; on any device."""
    block_size: int | None = None
    """Tokens in one block; None: what the attention backend likes best."""
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    """"fcfs", or "priority": smaller numbers first."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own, and dummy weights."""
    enforce_eager: bool = False
    """Never use CUDA graphs. Has nothing to switch off on a CPU."""
    compile: bool = False
    tensor_parallel_size: int = 1
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
    quantization: str | None = None
    use_tqdm_on_load: bool = True

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            _refuse("dtype", self.dtype, f"must be 'auto' or one of {', '.join(DTYPES)}")
        _choice("load_format", self.load_format, ("auto", "dummy"))
        _choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _choice("generation_config", self.generation_config, ("auto", "vllm"))
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes",
                     "num_gpu_blocks_override", "block_size"):  # fmt: skip
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _at_least_one("max_num_seqs", self.max_num_seqs)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            _refuse("gpu_memory_utilization", share, "must lie in (0, 1]; 0.9 leaves room for other programs")
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            _refuse("max_logprobs", self.max_logprobs, "must be -1 (no limit), 0 or more")
        for name, built in (("tensor_parallel_size", 1), ("compile", False), ("quantization", None)):
            if getattr(self, name) != built:
                _refuse(name, getattr(self, name), f"is not supported yet; leave it at {built!r}")

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
            elif target not in known:
                raise unknown_option("LLM", name, known | set(ALIASES))
            elif target in found:
                raise ConfigError(f"{name} and {target} are one option; give one of them.", parameter=name)
            else:
                found[target] = _optional(target, value)
        return cls(model=os.fspath(model), **found)


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
            max_position_embeddings=_count(raw, "max_position_embeddings", 2048),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
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
    if not all(isinstance(item, int) and item >= 0 for item in values):
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
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings = dict(settings.get("full_attention") or settings)  # Gemma 3 has one entry for each kind of layer
    theta = settings.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    return RopeConfig(theta=float(theta), kind=kind, settings=settings)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Which layers slide: ``layer_types`` if given; else Qwen2's switch and layer count; else all or none."""
    window = raw.get("sliding_window")
    if window is None or raw.get("use_sliding_window") is False:
        return (None,) * layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"sliding_window is {window!r}; it must be a number of tokens or null.")
    types = raw.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    full = raw.get("max_window_layers", layers) if "use_sliding_window" in raw else 0
    return tuple(None if layer < full else window for layer in range(layers))


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"config.json has {name}: {value!r}; it must be a whole number of at least 1.{nearest(name, raw)}"
        )
    return value


def _refuse(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{name} is {value!r}; it {rule}.", parameter=name, value=value)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(name, value, f"must be one of {', '.join(choices)}")


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(name, value, "must be a whole number of at least 1")


def _optional(name: str, value: object) -> object:
    """Read -1 as None where vLLM and nano-vllm do: "as much as fits"."""
    return None if value == -1 and name in {"max_model_len", "num_gpu_blocks_override"} else value
