"""The README is true: its Python runs, its commands run, its line count is the real one, its links lead somewhere."""

import io
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from nanovllm.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if "nanovllm " in line and not line.startswith("$ git")
]
EXPECTED = {0: "The capital of France is -> ", 2: "16 ", 3: "Did you mean 'temperature'?"}
"""What some of the Python examples print."""


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 4 and len(COMMANDS) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(PYTHON)))
def test_python_examples_run(place: int, tmp_path: Path, capsys, smollm2_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(PYTHON[place], encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert EXPECTED.get(place, "") in printed


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch, capsys, smollm2_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("One, two,\n\nRed, green,\n", encoding="utf-8")
    before_pipe, _, after_pipe = command.rpartition(" | ")
    piped = Path(before_pipe.removeprefix("cat ")).read_text(encoding="utf-8") if before_pipe else ""
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    program, *arguments = shlex.split(after_pipe)
    assert program == "nanovllm"
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip()


EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "lm_eval_adapter.py"})
"""What needs more than a model has tests of its own: ``tests/rooms/scoring``."""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: Path, monkeypatch, capsys, smollm2_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), str(smollm2_path)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
