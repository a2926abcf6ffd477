"""A real model on the GPU: bench/real_model.py in a process of its own, on the file that is already there."""

import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from nanovllm.hub.builtin import BUILT_IN, cache_folder

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SCRIPT = Path(__file__).parents[2] / "bench" / "real_model.py"


def test_smollm2_says_on_a_gpu_what_its_references_say() -> None:
    """Greedy tokens equal in float32, log-probabilities within the bounds in bfloat16; -rP shows the texts."""
    path = cache_folder() / PurePosixPath(BUILT_IN["smollm2-135m-instruct"].member).name
    if not path.exists():
        pytest.skip(f"{path} is not there: set NANOVLLM_CACHE, or fetch it with nanovllm info smollm2-135m-instruct")
    command = [sys.executable, str(SCRIPT), "--model", str(path), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passed"] and set(found["figures"]) == {"float32", "bfloat16"}
    assert found["figures"]["float32"]["equal_outputs"] == found["figures"]["float32"]["outputs"] > 0
