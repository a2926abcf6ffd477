"""What bench/compare_*.py share: ours in a process of its own, theirs in another, and one table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import clone  # noqa: F401

from nanovllm.cli.rows import LARGEST_TOKEN, ROWS, Load, Sizes

ROOT = Path(__file__).resolve().parent.parent
MISSING = 2
"""Exit status where the other library is not installed."""
TEMPERATURE, MAX_MODEL_LEN = 0.6, ROWS["main"].max_model_len


def main_load(model: str, scale: float, seed: int = 0) -> Load:
    """Draw the main workload from the vocabulary of a model folder."""
    vocab = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return Sizes(scale=scale).load(ROWS["main"], min(LARGEST_TOKEN, vocab - 1), seed)


def last_json(command: list[str]) -> dict[str, Any]:
    """Run a process, return its last line of JSON (libraries log behind it); if it fails, end as it did."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        print(words[-1], file=sys.stderr)
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


def time_ours(model: str, scale: float, device: str, options: list[str]) -> dict[str, Any]:
    """Run the main row of ``nanovllm bench``, gate first; return its figure."""
    command = [sys.executable, "-m", "nanovllm", "bench", "--rows", "main", "--json-only", "--scale", str(scale)]
    command += ["--device", device, "--model", model, "-oskip_tokenizer_init=true"]
    found = last_json([*command, *(f"-o{option}" for option in options)])
    figure: dict[str, Any] = found["figures"]["main"]
    return figure | {"device": found["device"], "gate": found["gate"]}


def report(ours: dict[str, Any], name: str, theirs: dict[str, Any], gate: list[str]) -> None:
    """Print both, the ratio, and the line of JSON. Raises AssertionError if they did not do the same work."""
    assert ours["tokens"] == theirs["tokens"], "no figure for different work"
    theirs = theirs | {"value": theirs["tokens"] / theirs["seconds"]}
    print(f"main workload, {ours['tokens']:,} output tokens, {ours['device']}; gate passed: {', '.join(gate)}")
    for label, figure in (("nanovllm", ours), (f"{name} {theirs['version']}", theirs)):
        print(f"{label:<24} {figure['value']:>12,.1f} tokens/s {figure['seconds']:>10.2f} s")
    ratio = ours["value"] / theirs["value"]
    print(f"{'ratio':<24} {ratio:>12.2f}")
    print(json.dumps({"bench": f"compare_{name}", "gate": gate, "ours": ours, "theirs": theirs, "ratio": ratio}))
