"""``nanovllm info``: what a model is, and how much cache fits beside it."""

import argparse
import json
from typing import Any

import torch

from nanovllm.build import cache_blocks, plan
from nanovllm.checkpoint import open_checkpoint
from nanovllm.cli.arguments import engine_options
from nanovllm.cli.opening import show_downloads
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.kv_cache import bytes_per_token
from nanovllm.models import find_model

ROWS = {
    "architecture": "{}",
    "parameters": "{:,}",
    "dtype": "{}",
    "device": "{}",
    "weight_bytes": "{:,}",
    "max_model_len": "{:,} tokens",
    "block_size": "{:,} tokens",
    "bytes_per_token": "{:,}",
    "cache_tokens": "{:,} tokens",
}
"""What is shown, in this order. A fact that is not listed follows as it is."""


def run(args: argparse.Namespace) -> int:
    """Print the facts of a model as a table or as JSON. Reads its configuration, not its weights."""
    show_downloads()
    facts = describe(args.model, **engine_options(args))
    if args.json:
        print(json.dumps(facts))
        return 0
    for name in [*(name for name in ROWS if name in facts), *(name for name in facts if name not in ROWS)]:
        value = facts[name]
        form = ROWS.get(name, "{}") if isinstance(value, int) else "{}"
        print(f"{name.replace('_', ' '):<16} {form.format(value)}")
    return 0


def describe(model: str, **options: Any) -> dict[str, object]:
    """Return the facts of a model under these options without loading its weights."""
    config = EngineConfig.from_options(model, options)
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, download_dir=config.download_dir, token=config.hf_token
    )
    facts = plan(config, checkpoint)
    parameters = count_parameters(facts.model)
    weight_bytes = parameters * facts.storage.itemsize
    return {
        "model": config.model,
        "architecture": facts.model.architecture,
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "weights_held_in": str(facts.storage).removeprefix("torch."),
        "device": str(facts.device),
        "max_model_len": facts.max_model_len,
        "block_size": facts.block_size,
        "bytes_per_token": bytes_per_token(facts.model, facts.cache_dtype),
        "cache_tokens": cache_blocks(config, facts, still_to_load=weight_bytes) * facts.block_size,
    }


def count_parameters(model: ModelConfig) -> int:
    """How many numbers the model's weights are; a tied head counts once."""
    with torch.device("meta"):
        shell = find_model(model.architecture)(model, model.max_position_embeddings)
    return sum(parameter.numel() for parameter in shell.parameters())
