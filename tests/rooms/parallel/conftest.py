"""Tiny float32 models whose sizes ask something of their cut, ranks that are threads, and what an engine may leave."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places
from nanovllm.parallel.communicator import Communicator

ROOT = Path(__file__).parents[3]
VOCAB = 259  # 256 bytes, two special tokens, one without a text: odd, so that the last rank has padding
SIZES = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1000.0,
    hidden_act="silu", torch_dtype="float32", eos_token_id=256,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], num_key_value_heads=1),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    "gemma3": dict(architectures=["Gemma3ForCausalLM"], hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=16),
    "wide": dict(
        architectures=["LlamaForCausalLM"], num_attention_heads=8, num_key_value_heads=8, vocab_size=9, eos_token_id=8
    ),
}


def write_model(folder: Path, name: str) -> Path:
    """Draw weights of spread 0.15, so that logits spread over 1 or so and ties are rare."""
    config = {**SIZES, **MODELS[name]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ModelConfig.from_dict(config), 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(sum(name.encode()))
    tensors = {}
    for key, place in parameter_places(model).items():
        drawn = torch.randn(place.shape, generator=generator) * 0.15
        tensors[key] = drawn + 1 if "norm" in key else drawn
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each model."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in MODELS}


@pytest.fixture(scope="session")
def open_llm(folders: dict[str, Path]) -> Callable[..., LLM]:
    """Open a model; the caller closes it."""

    def open_one(name: str, size: int, **options: Any) -> LLM:
        defaults = dict(dtype="float32", use_tqdm_on_load=False, block_size=8, num_gpu_blocks_override=64)
        return LLM(folders[name], tensor_parallel_size=size, **{**defaults, **options})

    return open_one


@pytest.fixture(scope="session")
def open_replicas(folders: dict[str, Path]) -> Callable[..., LLM]:
    """Open a model as several replicas; the caller closes it."""

    def open_one(name: str, size: int, **options: Any) -> LLM:
        defaults = dict(dtype="float32", use_tqdm_on_load=False, block_size=8, num_gpu_blocks_override=64)
        return LLM(folders[name], data_parallel_size=size, **{**defaults, **options})

    return open_one


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return what asserts that everything is as before: descriptors, processes, threads, files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    threads = torch.get_num_threads()

    def state() -> tuple[Any, ...]:
        links = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if alive(name)}
        sockets = sum(link.startswith(("socket:", "pipe:")) for link in links.values())
        return sockets, children(), names() - {"tqdm_monitor"}, os.listdir(folder)

    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    def alive(name: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{name}")

    before = state()

    def check() -> None:
        assert state() == before
        assert torch.get_num_threads() == threads

    yield check


FAULT = """
import sys
if sys.argv[0] == "-c" and len(sys.argv) >= 4:
    import nanovllm.model_runner, nanovllm.loader, os
    def planted(plain, after):
        count = iter(range(1, 10**9))
        def call(*args, **options):
            if next(count) > after:
                {fault}
            return plain(*args, **options)
        return call
    owner = {owner}
    setattr(owner, "{name}", planted(getattr(owner, "{name}"), {after}))
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a function fail in workers, each time after so many calls."""

    def do(owner: str, name: str, after: int, fault: str) -> None:
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(FAULT.format(owner=owner, name=name, after=after, fault=fault))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))

    return do


def children() -> set[int]:
    """Return the processes that this one has started, dead ones that nobody waits for too."""
    while True:
        try:
            return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended: its children are another's now
            continue


class Thread(Communicator):
    """One rank of several in this process: a communicator that waits at barriers."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, desk: list[Any]) -> None:
        self.rank, self.size, self.calls = rank, size, 0
        self._meeting, self._desk = meeting, desk

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all have laid on the desk."""
        self.calls += 1
        self._desk[self.rank] = x.clone()
        self._meeting.wait(20)
        found = torch.stack(self._desk)
        self._meeting.wait(20)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return its sum."""
        return self.all_gather(x).sum(0)


def on_ranks(size: int, work: Callable[[Thread], Any]) -> list[Any]:
    """Return what each rank's ``work`` returns."""
    meeting, desk, results = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(Thread(rank, size, meeting, desk))
        except Exception as error:  # noqa: BLE001  raised again by the caller's thread
            results[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in results if isinstance(each, Exception)]
    if failed:
        raise next((each for each in failed if not isinstance(each, threading.BrokenBarrierError)), failed[0])
    return results


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions above, for test files cannot import each other."""
    return SimpleNamespace(on_ranks=on_ranks, children=children, sizes=SIZES, models=MODELS, vocab=VOCAB)
