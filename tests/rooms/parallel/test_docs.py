"""docs/parallel.md is true: each block of Python runs, with a tiny model in the place of the real one."""

import re
import runpy
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PRINTED = re.findall(r"This prints `(.*)`", TEXT)


def test_there_is_something_to_run():
    assert len(BLOCKS) == TEXT.count("```python") == 2 and len(PRINTED) == 1


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_the_examples_run(folders, tmp_path, capsys, place):
    script = tmp_path / "example.py"
    opened = f"{str(folders['llama'])!r}, dtype='float32', use_tqdm_on_load=False, num_gpu_blocks_override=64"
    script.write_text(BLOCKS[place].replace('"smollm2-135m-instruct"', opened), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    if "LLM(" in BLOCKS[place]:
        assert lines[-2:] == [f"replica {number}: 2 requests, 16 tokens" for number in range(2)]
    else:
        assert lines == PRINTED
