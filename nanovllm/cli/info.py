"""``nanovllm info``: what a model is, and how much cache fits beside it."""

import argparse
import json

from nanovllm.cli.arguments import engine_options
from nanovllm.cli.opening import show_downloads
from nanovllm.llm import describe

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
