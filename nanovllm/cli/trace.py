"""``nanovllm trace``: answer a batch of prompts, and write down every step of it."""

import argparse
import sys
from pathlib import Path

from nanovllm import SamplingParams
from nanovllm.checkpoint import find
from nanovllm.cli.arguments import sampling_options
from nanovllm.cli.generate import answers, as_text, checked_prompts
from nanovllm.cli.opening import open_llm

OF_REPLICA = "nanovllm.trace.recording:of_replica"
"""What names the file of each replica."""

NOT_WRITTEN = 1
"""Exit status: there are answers, and no file."""


def run(args: argparse.Namespace) -> int:
    """Answer the prompts. Answers go to standard output; where the files are, to standard error."""
    params = SamplingParams(**sampling_options(args), logprobs=args.alternatives)
    prompts = checked_prompts(args)
    loaded = open_llm(args)
    path, replicas = str(loaded.llm.config.trace), loaded.llm.config.data_parallel_size
    named = [path] if replicas == 1 else [find(OF_REPLICA)(path, place) for place in range(replicas)]
    paths = [Path(each).expanduser() for each in named]
    before = list(map(stamp, paths))
    with loaded.llm as llm:
        outputs = answers(llm, prompts, params, args)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(as_text(prompt, output, quiet=False))
    sys.stdout.flush()  # both streams may be one terminal; keep them in order
    missing = [each for each, stamped in zip(paths, before, strict=True) if stamp(each) == stamped]
    for each in missing:  # the log says why
        print(f"nanovllm: error: {each} has not been written", file=sys.stderr)
    if missing:
        return NOT_WRITTEN
    for each in paths:
        print(f"written: {each}", file=sys.stderr)
        if each.suffix == ".html":
            print(f"written: {each.with_suffix('.json')}, for viewers of Chrome traces", file=sys.stderr)
        print(f"in words: nanovllm explain {each}", file=sys.stderr)
    return 0


def stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells one file from another that replaces it."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None
