"""Make the recordings that docs/tour.md shows, and its figures from them.

    python docs/recordings.py    writes docs/recordings/*.recording.json, and docs/tour.md between its marks

Scheduler, block manager, engine and recorder are the real ones; no model computes anything, and time is one
millisecond a step, so that the files are the same wherever they are made. A test makes them again and compares.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import Fetch, LLMEngine
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerOutput
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import Recording, dump
from nanovllm.trace.replay import Replay

HERE = Path(__file__).parent
FOLDER, TOUR = HERE / "recordings", HERE / "tour.md"
BLOCK_SIZE, VOCAB = 4, 256


class Clockwork:
    """A runner that computes nothing: every request draws its own letter, for ever."""

    lookahead = 0

    def submit(self, output: SchedulerOutput) -> Fetch:
        """Return what the step will have drawn."""
        drawn = [Sampled(ord("a") + span.request.arrival) if span.samples else None for span in output.spans]
        return lambda: drawn


class Scene:
    """An engine with a small pool, and who comes when."""

    def __init__(self, num_blocks: int, *, budget: int = 32, seqs: int = 8, caching: bool = True) -> None:
        blocks = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
        scheduler = Scheduler(blocks, max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.engine = LLMEngine(scheduler, Clockwork(), Limits(max_model_len=100, vocab_size=VOCAB))
        facts = {"nanovllm": "", "model": "clockwork", "device": "cpu", "device_name": "none", "dtype": "none"}
        settings = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "policy": "fcfs"}
        self.recorder = Recorder(self.engine, facts=facts | settings, decode=chr)
        self.engine.observers.append(self.recorder)

    def add(self, prompt: str, length: int) -> None:
        """Queue a prompt of one token a character."""
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        self.engine.add_request(None, [ord(each) for each in prompt], params, prompt=prompt)

    def steps(self, number: int = 1000) -> None:
        """Run so many steps, or until nobody is left."""
        while number and self.engine.has_unfinished_requests:
            self.engine.step()
            number -= 1

    def recording(self) -> Recording:
        """End, and return what happened, by a clock of our own."""
        self.steps()
        self.engine.close()
        made = self.recorder.recording()
        made["engine"]["started"] = "2026-01-01T00:00:00Z"
        for row in made["requests"]:
            row["arrived"], row["ended"] = 1000 * row["before_step"], 1000 * (row["end_step"] + 1)
        for place, step in enumerate(made["steps"]):
            step["t"] = [1000 * place + each for each in (0, 20, 40, 40, 950, 1000)]
        return made


def continuous_batching() -> Recording:
    """Requests come and go while others run: nobody waits for a batch to end."""
    scene = Scene(24)
    scene.add("ABCDE", 6)
    scene.steps(2)
    scene.add("FGH", 9)
    scene.add("IJKLMN", 3)
    scene.steps(3)
    scene.add("OP", 5)
    return scene.recording()


def chunked_prefill() -> Recording:
    """A prompt of 40 tokens, a budget of 12 a step: it comes in pieces, and who runs gains a token in each step."""
    scene = Scene(24, budget=12)
    scene.add("ABC", 8)
    scene.steps(2)
    scene.add("x" * 40, 3)
    return scene.recording()


def prefix_hit() -> Recording:
    """The second and the third prompt begin as the first did: they take its blocks, and compute what is their own."""
    scene = Scene(24)
    scene.add("In the beginning, A", 4)
    scene.steps(2)
    scene.add("In the beginning, B was", 4)
    scene.add("In the beginning? C", 4)
    return scene.recording()


def preemption() -> Recording:
    """Three requests grow in a pool too small for them: the last to come gives up its blocks, and comes back later."""
    scene = Scene(8, caching=False)
    for prompt in ("ABCDEF", "GHIJKL", "MNOPQR"):
        scene.add(prompt, 10)
    return scene.recording()


def eviction() -> Recording:
    """Blocks of requests that have ended stay findable until the room is needed: the least recently used goes first."""
    scene = Scene(8)
    scene.add("ABCDEFGHIJ", 2)
    scene.steps()
    scene.add("KLMNOPQRST", 2)
    scene.steps()
    scene.add("UVWXYZUVWXYZUVWX", 2)
    return scene.recording()


SCENES: dict[str, Callable[[], Recording]] = {
    "continuous-batching": continuous_batching,
    "chunked-prefill": chunked_prefill,
    "prefix-hit": prefix_hit,
    "preemption": preemption,
    "eviction": eviction,
}


def lanes(recording: Recording) -> list[str]:
    """Draw a line for each request and a column for each step: waiting, how many tokens it computes, preempted."""
    lines = []
    for place, row in enumerate(recording["requests"]):
        cells = []
        for number, step in enumerate(recording["steps"]):
            span = next((each for each in step["spans"] if each[0] == place), None)
            there = row["before_step"] <= number <= row["end_step"]
            cells.append(
                "x" if place in step["preempted"] else str(span[2] - span[1]) if span else "." if there else ""
            )
        lines.append(f"request {place} " + "".join(f"{cell:>3}" for cell in cells).rstrip())
    return lines


def block_map(recording: Recording) -> list[str]:
    """Draw a line for each block and a column for each step: who holds it, * if several, - if it can only be found."""
    replay = Replay(recording)
    columns = []
    while replay.forward():
        owners: dict[int, list[int]] = {}
        for place, table in replay.tables.items():
            for block in table:
                owners.setdefault(block, []).append(place)
        cached = set(replay.cached)
        columns.append(
            ["*" if len(owners.get(block, ())) > 1 else str(owners[block][0]) if block in owners
             else "-" if block in cached else "" for block in range(recording["engine"]["num_blocks"])]
        )  # fmt: skip
    used = [block for block in range(recording["engine"]["num_blocks"]) if any(column[block] for column in columns)]
    return [f"block {block:>3} " + "".join(f"{column[block]:>3}" for column in columns).rstrip() for block in used]


def shown(name: str, scene: Callable[[], Recording], recording: Recording) -> str:
    """Return what the tour shows of a recording."""
    header = "step      " + "".join(f"{number:>3}" for number in range(len(recording["steps"])))
    figure = "\n".join([header, *lanes(recording), "", *block_map(recording)])
    words = " ".join(str(scene.__doc__).split())
    command = f"`nanovllm explain docs/recordings/{name}.recording.json` says it in words."
    return f"{words}\n\n```text\n{figure}\n```\n\n{command}\n"


def made() -> tuple[dict[str, str], str]:
    """Return the text of each recording by its name, and the tour with the figures of today."""
    recordings = {name: scene() for name, scene in SCENES.items()}
    tour = TOUR.read_text(encoding="utf-8")
    for name, recording in recordings.items():
        mark = re.compile(rf"(<!-- recording: {name} -->\n).*?(<!-- end -->)", re.S)
        text = shown(name, SCENES[name], recording)
        tour, number = mark.subn(lambda found, text=text: f"{found[1]}{text}{found[2]}", tour)
        assert number == 1, f"docs/tour.md has no place for {name}"
    return {name: f"{dump(recording)}\n" for name, recording in recordings.items()}, tour


def main(arguments: Sequence[str] = ()) -> Any:
    """Write them."""
    if arguments:
        sys.exit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    recordings, tour = made()
    for name, text in recordings.items():
        (FOLDER / f"{name}.recording.json").write_text(text, encoding="utf-8")
    TOUR.write_text(tour, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
