"""What ``nanovllm bench`` can time, as data: model shapes, batches of random prompts, and one row for each figure.

The main workload (256 requests, 100-1024 tokens in and out, seed 0: 142,827 tokens in, 133,966 out) is the one that
nano-vllm's benchmark made common. Random prompts and random weights do: the time does not depend on their values.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, nearest

LARGEST_TOKEN = 10_000
"""Prompts are drawn from 0 to this, or to the end of a smaller vocabulary."""

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "bos_token_id": 151_643,
    "eos_token_id": 151_645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = QWEN3_0_6B | {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = QWEN3_0_6B | {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

SHAPES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B, "small": SMALL}
DEFAULT_SHAPE = {"cuda": "qwen3-0.6b", "cpu": "small"}
DEFAULT_SCALE = {"cuda": 1.0, "cpu": 1 / 16}


def write_shape(folder: str, shape: str) -> str:
    """Write the configuration of a shape below ``folder`` and return its folder: dummy weights need no more."""
    made = Path(folder, shape)
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return str(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A batch of work: prompts as token ids, and how many tokens to draw after each."""

    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    shared: int = 0
    """Tokens at the start of every prompt that are the same in all."""

    def cut(self, longest: int) -> "Load":
        """Return the same with no output longer than ``longest``."""
        return replace(self, lengths=[min(length, longest) for length in self.lengths])

    def parts(self, number: int) -> list["Load"]:
        """Deal it out to so many replicas; those that get nothing are left out."""
        return [
            replace(self, prompts=self.prompts[first::number], lengths=self.lengths[first::number])
            for first in range(min(number, len(self.prompts)))
        ]


def mixed(num_requests: int, low: int, high: int, largest_token: int = LARGEST_TOKEN, seed: int = 0) -> Load:
    """Draw prompts and outputs of ``low`` to ``high`` tokens. The order of the draws is part of the workload."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, largest_token) for _ in range(rng.randint(low, high))] for _ in range(num_requests)]
    return Load(prompts=prompts, lengths=[rng.randint(low, high) for _ in range(num_requests)])


def even(
    num_requests: int, prompt: int, output: int, largest_token: int = LARGEST_TOKEN, *, shared: int = 0, seed: int = 0
) -> Load:
    """Draw prompts of one length: ``shared`` tokens that all have, then ``prompt`` of their own."""
    rng = random.Random(seed)
    start = [rng.randint(0, largest_token) for _ in range(shared)]
    prompts = [start + [rng.randint(0, largest_token) for _ in range(prompt)] for _ in range(num_requests)]
    return Load(prompts=prompts, lengths=[output] * num_requests, shared=shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing to time, on an engine of its own or one that other rows want just like that."""

    kind: str
    """How it is timed: a name from ``timing.KINDS``."""
    about: str
    shape: str | None = None
    """A name from SHAPES; None: the model that the command is about."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine that make the row what it is."""
    max_model_len: int = 4096
    num_requests: int = 256
    prompt: int = 0
    """Tokens of each prompt; 0: the main workload, where lengths differ."""
    output: int = 0
    """Tokens to draw for each request, or the most of them in the main workload; 0: as drawn."""
    shared: int = 0
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    """Suffix of the figure's name -> sampling parameters; the first is what the others are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the work is: the main workload's dials, and what all lengths are multiplied by."""

    scale: float = 1.0
    num_requests: int | None = None
    min_len: int | None = None
    max_len: int | None = None

    def scaled(self, number: int, least: int = 1) -> int:
        """Return ``number`` at this scale."""
        return max(least, round(number * self.scale))

    @property
    def lengths(self) -> tuple[int, int]:
        """Shortest and longest prompt and output of the main workload."""
        return self.min_len or self.scaled(100), self.max_len or self.scaled(1024, 2)

    def load(self, row: Row, largest_token: int = LARGEST_TOKEN, seed: int = 0) -> Load:
        """Draw what a row works on. The row's number of requests is scaled where it does not name the row."""
        number = row.num_requests if row.kind == "decode" else self.num_requests or self.scaled(row.num_requests)
        if row.prompt:
            prompt, output, shared = self.scaled(row.prompt), self.scaled(row.output, 2), self.scaled(row.shared, 0)
            return even(number, prompt, output, largest_token, shared=shared, seed=seed)
        drawn = mixed(number, *self.lengths, largest_token, seed)
        return drawn.cut(self.scaled(row.output)) if row.output else drawn


CUT: dict[str, dict[str, Any]] = {
    "": {},
    "_top_p": {"top_p": 0.95},
    "_top_k": {"top_k": 50},
    "_logprobs": {"logprobs": 5},
}

ROWS = {
    "main": Row(kind="throughput", about="256 requests, 100-1024 tokens in and out"),
    "batch1": Row(kind="decode", about="a step of 1 request, 128 in, 512 out", num_requests=1, prompt=128, output=512),
    "batch8": Row(kind="decode", about="a step of 8 such requests", num_requests=8, prompt=128, output=512),
    "batch64": Row(kind="decode", about="a step of 64 such requests", num_requests=64, prompt=128, output=512),
    "shared": Row(
        kind="throughput", about="256 requests, 1,792 shared and 100 own tokens in, 64 out",
        prompt=100, output=64, shared=1792,
    ),
    "prefill": Row(kind="prefill", about="the prompts of main, one token out"),
    "cut300": Row(
        kind="throughput", about="main with at most 300 out: plain, top_p, top_k, logprobs", output=300, variants=CUT
    ),
    "main_fp8": Row(kind="throughput", about="main with an FP8 cache", options={"kv_cache_dtype": "fp8"}),
    "long8": Row(
        kind="decode", about="a step of 8 requests of 32k tokens", max_model_len=40_960,
        num_requests=8, prompt=32_768, output=64,
    ),
    "long1": Row(
        kind="decode", about="a step of 1 such request", max_model_len=40_960,
        num_requests=1, prompt=32_768, output=64,
    ),
    "start": Row(kind="start", about="from the start of a process to the first token"),
    "big_main": Row(kind="throughput", about="main with Qwen3-8B's shapes", shape="qwen3-8b"),
    "big_batch1": Row(
        kind="decode", about="batch1 with Qwen3-8B's shapes", shape="qwen3-8b", num_requests=1, prompt=128, output=512
    ),
}  # fmt: skip
"""In the order in which they are timed: rows that want the same engine follow each other."""

SWEEP = {
    f"sweep{batch}": Row(
        kind="decode", about=f"a step of {batch}, 128 in, 256 out", num_requests=batch, prompt=128, output=256
    )
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
}

GROUPS = {"big": ("big_main", "big_batch1")}
"""Names that ``--rows`` takes for several rows."""

GPU_ONLY = ("main_fp8", "big_main", "big_batch1")
"""Rows that are not timed on a CPU unless they are asked for."""

PEERS_SOURCE = "vLLM 0.26.0, one H200"
PEERS = {
    "main": "16,200-22,500", "main_fp8": "20,300-22,700",
    "batch1": "2.04-2.29", "batch8": "2.13", "batch64": "2.98",
    "shared": "14,600", "prefill": "352,000",
    "cut300": "27,300", "cut300_top_p": "7,100", "cut300_top_k": "7,800", "cut300_logprobs": "18,400",
    "long8": "8.4", "long1": "2.6", "start": "75", "big_main": "9,100", "big_batch1": "5.2",
}  # fmt: skip
"""Figure -> what PEERS_SOURCE reached, in the figure's unit."""


def select(names: Sequence[str] | None, *, sweep: bool = False, device: str, own_model: bool = False) -> dict[str, Row]:
    """Return the rows called ``names`` in the table's order; None: the sweep, or all that make sense on this device.

    Raises ConfigError for an unknown name, and for a row with shapes of its own beside a user's model.
    """
    if names is None:
        left_out = {*(GPU_ONLY if device == "cpu" else ()), *(row for row in ROWS if own_model and ROWS[row].shape)}
        names = [] if sweep else [name for name in ROWS if name not in left_out]
    wanted: set[str] = set(SWEEP if sweep else ())
    for name in names:
        if name not in ROWS and name not in GROUPS:
            known = [*ROWS, *GROUPS]
            raise ConfigError(
                f"there is no row {name!r}.{nearest(name, known)} Known: {', '.join(known)}.",
                parameter="rows", value=name,
            )  # fmt: skip
        wanted |= set(GROUPS.get(name, (name,)))
    fixed = sorted(name for name in wanted & set(ROWS) if ROWS[name].shape)
    if own_model and fixed:
        raise ConfigError(
            f"--rows names {', '.join(fixed)}, with shapes of their own, beside --model; leave one of them out.",
            parameter="rows", value=fixed,
        )  # fmt: skip
    return {name: row for name, row in (ROWS | SWEEP).items() if name in wanted}
