"""Model names that are no path: built-in names, and models on Hugging Face's hub or on ModelScope.

``resolve`` turns such a name into a path on this machine. What was fetched once is used again
without a network.
"""

import os
import re
from pathlib import Path

from nanovllm.errors import CheckpointError, nearest
from nanovllm.hub.builtin import BUILT_IN, cache_folder, fetch_built_in
from nanovllm.hub.remote import fetch_huggingface, fetch_modelscope

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""``owner/name``. A path that starts with a dot, a slash or a tilde does not look like it."""


def resolve(
    model: str, *, revision: str | None = None, download_dir: str | None = None, token: str | None = None
) -> Path:
    """Return the folder or file that ``model`` names, fetching it first where it is not on this machine yet.

    ``revision`` and ``token`` matter to hubs only; ``download_dir`` replaces the usual cache folder. The
    caller has already seen that ``model`` is no path. Raises CheckpointError: what was tried and the way out.
    """
    if model in BUILT_IN:
        return fetch_built_in(model, Path(download_dir).expanduser() if download_dir else cache_folder())
    if HUB_NAME.fullmatch(model) and not model.endswith(".gguf"):
        modelscope = os.environ.get("NANOVLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}
        fetch = fetch_modelscope if modelscope else fetch_huggingface
        return fetch(model, revision, download_dir, token)
    raise CheckpointError(
        f"there is no model {model!r}.{nearest(model, BUILT_IN)} A model is a folder or a .gguf file "
        f"that exists, a hub name like 'owner/name', or one of the built-in names: {', '.join(BUILT_IN)}.",
        parameter="model",
        value=model,
    )
