"""Which source a model name goes to, and what it says about a name that goes nowhere."""

import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from nanovllm.errors import CheckpointError
from nanovllm.hub import resolve
from nanovllm.hub.remote import is_complete, wanted


@pytest.mark.parametrize("name", ["smolm2-135m-instruct", "./nowhere", "/no/where", "a/b/c", "x/y.gguf", "~/m", ""])
def test_a_name_that_is_nothing_says_what_names_may_be(name):
    with pytest.raises(CheckpointError, match="owner/name.*built-in names: smollm2-135m-instruct") as caught:
        resolve(name)
    assert caught.value.parameter == "model"
    assert ("Did you mean 'smollm2-135m-instruct'?" in str(caught.value)) == name.startswith("smol")


REPOSITORY = [
    ".gitattributes",
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "merges.txt",
    "modeling_x.py",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "original/params.json",
    "onnx/model.onnx",
]


def test_only_what_an_engine_reads_is_wanted():
    assert wanted([*REPOSITORY, "pytorch_model.bin"]) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert wanted(["config.json", "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin"]


def write_model(folder: Path, *, shards: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    index = {"weight_map": {str(n): name for n, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ["config.json", "tokenizer.json", *names]:
        (folder / name).write_text("{}")
    return folder


def test_a_folder_is_complete_when_nothing_its_index_names_is_missing(tmp_path):
    folder = write_model(tmp_path / "model")
    assert is_complete(folder)
    for name in sorted(path.name for path in folder.iterdir()):
        content = (folder / name).read_text()
        (folder / name).unlink()
        assert not is_complete(folder), f"complete without {name}"
        (folder / name).write_text(content)
    (folder / "model.safetensors.index.json").write_text("{")
    assert not is_complete(folder)


class Hub:
    """Stands in for huggingface_hub: a cache folder and, if there is a network, a repository."""

    def __init__(self, folder: Path, online: bool) -> None:
        self.folder, self.online = folder, online
        self.downloads: list[dict[str, object]] = []

    def snapshot_download(self, name, *, local_files_only=False, **options):
        if local_files_only:
            if not self.folder.exists():
                raise LocalEntryNotFoundError("not cached")
            return str(self.folder)
        self.downloads.append(options)
        return str(write_model(self.folder))

    def list_repo_files(self, name, revision=None):
        if not self.online:
            raise ConnectionError("the network\n\nis away.")
        return REPOSITORY


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOVLLM_USE_MODELSCOPE", raising=False)
    fake = Hub(tmp_path / "snapshot", online=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: fake)
    return fake


def test_a_hub_name_is_downloaded_once_and_then_needs_no_network(hub):
    assert resolve("owner/name", revision="main", download_dir="there", token="secret") == hub.folder
    (asked,) = hub.downloads
    assert asked == {
        "revision": "main",
        "cache_dir": "there",
        "token": "secret",
        "allow_patterns": wanted(REPOSITORY),
    }
    hub.online = False
    assert resolve("owner/name") == hub.folder
    assert len(hub.downloads) == 1


def test_an_interrupted_download_is_taken_up_again(hub):
    write_model(hub.folder)
    (hub.folder / "model-00002-of-00002.safetensors").unlink()
    resolve("owner/name")
    assert len(hub.downloads) == 1


def test_without_a_network_the_error_says_what_was_tried(hub):
    hub.online = False
    with pytest.raises(CheckpointError, match="owner/name.*Hugging Face.*the network is away. Check") as caught:
        resolve("owner/name")
    assert "HF_ENDPOINT" in str(caught.value) and isinstance(caught.value.__cause__, ConnectionError)


def test_a_full_disk_is_an_error_with_its_reason(hub, monkeypatch):
    """What the download left is not taken for a model the next time."""

    def download(name, *, local_files_only=False, **options):
        if local_files_only:
            return hub.snapshot_download(name, local_files_only=True)
        write_model(hub.folder)
        (hub.folder / "model-00001-of-00002.safetensors").unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="owner/name.*No space left on device") as caught:
            resolve("owner/name")
        assert isinstance(caught.value.__cause__, OSError)


def test_modelscope_is_asked_instead_when_the_variable_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_USE_MODELSCOPE", "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(CheckpointError, match=r"Install nanovllm\[modelscope\]"):
        resolve("owner/name")

    online, asked = True, []

    def snapshot_download(name, *, local_files_only, **options):
        asked.append((name, local_files_only, options))
        if not (online or local_files_only):
            raise ConnectionError("away")
        return str(tmp_path / "snapshot")

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve("owner/name") == tmp_path / "snapshot"
    assert asked[0][:2] == ("owner/name", False) and "token" not in asked[0][2]

    online = False
    write_model(tmp_path / "snapshot")
    assert resolve("owner/name", token="secret") == tmp_path / "snapshot"
    assert asked[-1][2]["token"] == "secret"
    (tmp_path / "snapshot" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="ModelScope: ConnectionError: away"):
        resolve("owner/name")
