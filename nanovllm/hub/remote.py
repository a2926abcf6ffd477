"""Models on Hugging Face's hub and on ModelScope: find a complete copy in the cache, else download one.

Only files in a repository's top folder that an engine can read are fetched, and no Python file ever.
"""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

from nanovllm.errors import CheckpointError

FACTS = ("*.json", "tokenizer.*", "*.jinja", "*.model", "*.txt")
"""Configuration, tokenizer and chat template."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Weights, best form first."""
SECOND_COPIES = "consolidated*"
"""The same weights in another layout, as some publishers add them."""
SHARD = re.compile(r"-\d+-of-\d+\.")
"""Marks one file of several, which are whole only together with their index."""


def fetch_huggingface(model: str, revision: str | None, download_dir: str | None, token: str | None) -> Path:
    """Return the folder of ``model`` in huggingface_hub's cache, or in ``download_dir``.

    A complete cached copy is returned without asking the network, so a model that moved on is refreshed only
    under a new ``revision``. HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as everywhere.
    """
    # Imported here: it takes 0.3 s, and most models are already a path.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            cached = Path(
                snapshot_download(
                    model,
                    revision=revision,
                    cache_dir=download_dir,
                    allow_patterns=["config.json"],
                    local_files_only=True,
                )
            )
            if is_complete(cached):
                return cached
        except LocalEntryNotFoundError:
            pass  # not cached yet
        files = wanted(HfApi(token=token).list_repo_files(model, revision=revision))
        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, token=token, allow_patterns=files)
        )
    except Exception as error:
        raise _failure(
            model,
            "Hugging Face's hub",
            error,
            "A gated or private model needs a token (hf_token= or HF_TOKEN); HF_ENDPOINT names a mirror; "
            "HF_HUB_OFFLINE must not be set to download",
        ) from error


def fetch_modelscope(model: str, revision: str | None, download_dir: str | None, token: str | None) -> Path:
    """Return the folder of ``model`` in ModelScope's cache, or in ``download_dir``.

    ModelScope is asked first; where it cannot be reached, a complete cached copy will do.
    """
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"model {model!r} is to come from ModelScope because NANOVLLM_USE_MODELSCOPE is set, but the "
            "package modelscope is not installed. Install nanovllm[modelscope], or unset the variable.",
            parameter="model",
            value=model,
        ) from error

    def ask(local_only: bool) -> Path:
        found: str = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*FACTS, *WEIGHTS],
            ignore_patterns=["*/*", SECOND_COPIES],
            local_files_only=local_only,
            **({"token": token} if token else {}),
        )
        return Path(found)

    try:
        return ask(local_only=False)
    except Exception as error:
        try:
            cached = ask(local_only=True)
        except Exception:  # noqa: BLE001  # not cached either; the first reason is the one to tell
            cached = None
        if cached is not None and is_complete(cached):
            return cached
        raise _failure(model, "ModelScope", error, "A private model needs a token (hf_token=)") from error


def wanted(files: list[str]) -> list[str]:
    """Return which of a repository's ``files`` to download: the facts, and the weights in one form only."""
    top = [name for name in files if "/" not in name and not fnmatch(name, SECOND_COPIES)]
    facts = [name for name in top if any(fnmatch(name, pattern) for pattern in FACTS)]
    forms = ([name for name in top if fnmatch(name, pattern)] for pattern in WEIGHTS)
    weights = next((form for form in forms if form), [])
    return sorted({*facts, *weights})


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a configuration, a tokenizer and every weight file that its index names.

    An interrupted download leaves a folder that looks like a model; this is what tells it from one.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()}
    weights = {name for name in names if any(fnmatch(name, pattern) for pattern in WEIGHTS)}
    tokenizer = any(name.startswith(("tokenizer.", "vocab.")) for name in names)
    if not (weights and tokenizer and "config.json" in names):
        return False
    indices = [name for name in names if name.endswith(".index.json")]
    for index in indices:
        try:
            shards = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
            return False
        if not weights.issuperset(shards):
            return False
    return bool(indices) or not any(SHARD.search(name) for name in weights)


def _failure(model: str, hub: str, error: Exception, hint: str) -> CheckpointError:
    """Build the error for a download that failed: what was tried, why it failed, the ways out."""
    reason = " ".join(str(error).split())[:400].rstrip(".") or "no message"
    return CheckpointError(
        f"model {model!r} is no folder here, is not cached, and could not be fetched from {hub}: "
        f"{type(error).__name__}: {reason}. Check the name and the network. {hint}. "
        "A model that is already on disk works by its path.",
        parameter="model",
        value=model,
    )
