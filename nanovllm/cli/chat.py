"""``nanovllm chat``: a conversation in the terminal, streamed, with its history."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from nanovllm import LLM, SamplingParams
from nanovllm.cli.arguments import sampling_options
from nanovllm.cli.generate import no_text
from nanovllm.cli.opening import open_llm
from nanovllm.errors import RequestError

Message = dict[str, str]

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and history, where the platform has it
    params = SamplingParams(**sampling_options(args))
    opening = [{"role": "system", "content": args.system}] if args.system is not None else []
    loaded = open_llm(args)
    with loaded.llm as llm:
        print(f"{args.model}, loaded in {loaded.import_seconds + loaded.load_seconds:.1f} s. {HELP}.")
        history = list(opening)
        for said in turns():
            if said == "/clear":
                history = list(opening)
                print("(cleared)")
            elif said.startswith("/") and " " not in said:
                print(HELP)
            else:
                history = answer(llm, history, said, params)
    return 0


def turns() -> Iterator[str]:
    """Yield what the user says until /exit, Ctrl-D, or Ctrl-C twice in a row."""
    interrupted = False
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            print("\n(Ctrl-C once more, or Ctrl-D, leaves)")
            continue
        except UnicodeDecodeError as error:
            raise no_text(error) from error
        interrupted = False
        if said == "/exit":
            return
        if said:
            yield said


def answer(llm: LLM, history: list[Message], said: str, params: SamplingParams) -> list[Message]:
    """Print the answer as it comes and return the history with it.

    A stopped answer is kept as far as it came. A turn without any answer is forgotten.
    """
    asked = [*history, {"role": "user", "content": said}]
    text = ""
    # Ctrl-C must not break into a step of the engine: note it, and leave between two tokens, where closing
    # the stream ends the request. A second one breaks in all the same.
    try:
        stream = llm.stream_chat(asked, params)
        with noting_ctrl_c() as noted, contextlib.closing(stream):
            for output in stream:
                print(output.outputs[0].text, end="", flush=True)
                text += output.outputs[0].text
                if noted:
                    print(" (stopped)", end="")
                    break
    except RequestError as error:
        print(f"{error} (/clear starts afresh)", file=sys.stderr)
    print()
    return [*asked, {"role": "assistant", "content": text}] if text else history


@contextlib.contextmanager
def noting_ctrl_c() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list for the length of the block; the second one raises KeyboardInterrupt."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
