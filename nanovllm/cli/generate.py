"""``nanovllm generate``: answer a batch of prompts and say how fast that was."""

import argparse
import json
import sys
import time
from typing import TextIO

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.cli.arguments import sampling_options
from nanovllm.cli.opening import open_llm, wants_progress
from nanovllm.errors import ConfigError, RequestError


def run(args: argparse.Namespace) -> int:
    """Answer the prompts. Answers go to standard output, everything about them to standard error."""
    params = SamplingParams(**sampling_options(args))
    prompts = checked_prompts(args)
    loaded = open_llm(args)
    with loaded.llm as llm:
        started = time.perf_counter()
        outputs = answers(llm, prompts, params, args)
        seconds = time.perf_counter() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        print(as_json(prompt, output) if args.json else as_text(prompt, output, args.quiet))
    if not args.quiet:
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        sys.stdout.flush()  # both streams may be one terminal; keep them in order
        print(
            f"loaded in {loaded.import_seconds + loaded.load_seconds:.2f} s "
            f"(import {loaded.import_seconds:.2f}, model {loaded.load_seconds:.2f}); "
            f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s",
            file=sys.stderr,
        )
    return 0


def checked_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts that were given, or those on standard input."""
    if args.system is not None and not args.chat:
        raise ConfigError("--system is given without --chat; a plain prompt has no system message. Add --chat.")
    prompts = args.prompts or read_prompts(sys.stdin)
    if not prompts:
        raise RequestError("0 prompts; there must be at least one. Give it as an argument or on standard input.")
    return list(prompts)


def answers(llm: LLM, prompts: list[str], params: SamplingParams, args: argparse.Namespace) -> list[RequestOutput]:
    """Answer prompts as they are, or as what a user says."""
    if not args.chat:
        return llm.generate(prompts, params, use_tqdm=wants_progress(args))
    talks = [conversation(prompt, args.system) for prompt in prompts]
    return llm.chat(talks, params, use_tqdm=wants_progress(args))


def read_prompts(lines: TextIO) -> list[str]:
    """Return one prompt a line, without the line ends, the empty lines and an editor's mark at the beginning."""
    if lines.isatty():
        print("prompts, one a line; Ctrl-D ends them:", file=sys.stderr)
    try:
        found = list(lines)
    except UnicodeDecodeError as error:
        raise no_text(error) from error
    found[:1] = [line.removeprefix("\ufeff") for line in found[:1]]
    return [line.rstrip("\r\n") for line in found if line.strip()]


def no_text(error: UnicodeDecodeError) -> RequestError:
    """Say that standard input holds bytes that are no text."""
    return RequestError(
        f"standard input holds the byte {error.object[error.start]:#04x}, which is no {error.encoding}; "
        "prompts must be text in that encoding. Convert the file first, for instance with iconv."
    )


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages in which a user says ``prompt``."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [*opening, {"role": "user", "content": prompt}]


def as_text(prompt: str, output: RequestOutput, quiet: bool) -> str:
    """Return a prompt and its answer, set apart; or the answer alone."""
    answer = output.outputs[0].text
    return answer if quiet else f"--- {prompt}\n{answer}\n"


def as_json(prompt: str, output: RequestOutput) -> str:
    """Return one result as a line of JSON."""
    answer = output.outputs[0]
    return json.dumps(
        {
            "prompt": prompt,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "token_ids": list(answer.token_ids),
            "num_prompt_tokens": len(output.prompt_token_ids or ()),
            "num_cached_tokens": output.num_cached_tokens,
        },
        ensure_ascii=False,
    )
