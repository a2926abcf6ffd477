"""What docs/ shows is true: each block of Python runs, with a tiny model in the place of the real one."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("requests", "metrics")}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in TEXTS.items()}
LEAST = {"requests": 5, "metrics": 4}


def test_there_is_something_to_run():
    for name, blocks in BLOCKS.items():
        assert len(blocks) == TEXTS[name].count("```python") >= LEAST[name]


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in BLOCKS for place in range(len(BLOCKS[name]))])
def test_the_examples_run(folders, tmp_path, capsys, name, place):
    script = tmp_path / "example.py"
    opened = f"{str(folders['llama'])!r}, dtype='float32', use_tqdm_on_load=False, num_gpu_blocks_override=64"
    code = BLOCKS[name][place].replace('"smollm2-135m-instruct"', opened)
    assert code != BLOCKS[name][place]
    script.write_text(code, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
