"""``nanovllm trace``: answer a batch of prompts, and write down every step of it."""

import argparse
import sys
from pathlib import Path

from nanovllm import SamplingParams
from nanovllm.cli.arguments import engine_options, sampling_options
from nanovllm.cli.generate import answers, as_text, checked_prompts
from nanovllm.cli.opening import open_llm

NOT_WRITTEN = 1
"""Exit status: there are answers, and no file."""


def run(args: argparse.Namespace) -> int:
    """Answer the prompts. Answers go to standard output; where the files are, to standard error."""
    params = SamplingParams(**sampling_options(args), logprobs=args.alternatives)
    prompts = checked_prompts(args)
    path = Path(str(engine_options(args)["trace"])).expanduser()
    before = stamp(path)
    loaded = open_llm(args)
    with loaded.llm as llm:
        outputs = answers(llm, prompts, params, args)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(as_text(prompt, output, quiet=False))
    sys.stdout.flush()  # both streams may be one terminal; keep them in order
    if stamp(path) == before:  # the log says why
        print(f"nanovllm: error: {path} has not been written", file=sys.stderr)
        return NOT_WRITTEN
    print(f"written: {path}", file=sys.stderr)
    if path.suffix == ".html":
        print(f"written: {path.with_suffix('.json')}, for viewers of Chrome traces", file=sys.stderr)
    print(f"in words: nanovllm explain {path}", file=sys.stderr)
    return 0


def stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells one file from another that replaces it."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None
