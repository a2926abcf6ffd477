"""The scales that a checkpoint was calibrated with for a cache of float8.

A cache that holds keys divided by their scale has room for keys beyond float8's largest number, 448, and more digits
for small ones. Names, all below ``model.layers.N.self_attn.``, as vLLM knows them (``maybe_remap_kv_scale_name`` and
``get_cache_scale`` in its loaders):

    k_scale, attn.k_scale      one number, or one for each key-value head
    k_proj.k_scale             the same, from ModelOpt
    k_proj.output_scale        the same, from compressed-tensors
"""

import logging
import re
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError

NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.)?([kv])_scale|([kv])_proj\.(?:output|\3)_scale)")

logger = logging.getLogger(__name__)


def cache_scales(
    named: Mapping[str, Tensor], config: ModelConfig, cache_dtype: torch.dtype
) -> Float[Tensor, "layers 2 kv_heads"] | None:
    """Return a checkpoint's scales of keys and values, 1 where it has none; None if the cache is not of float8.

    Raises CheckpointError for a layer that the model does not have, a scale given twice, and one that is not above 0.
    """
    given: dict[tuple[int, int], str] = {}
    for name in named:
        found = NAME.fullmatch(name)
        if found is None or int(found[1]) >= config.num_layers:
            raise CheckpointError(
                f"the checkpoint has a scale {name!r} that the cache has no place for; it must be a k_scale or v_scale "
                f"of model.layers.0 to {config.num_layers - 1}. Is config.json the one that belongs to these weights?"
            )
        place = int(found[1]), "kv".index(found[2] or found[3])
        if place in given:
            raise CheckpointError(f"the checkpoint has the same scale twice: {given[place]!r} and {name!r}.")
        given[place] = name
    if cache_dtype is not torch.float8_e4m3fn:
        logger.info("%d scales of keys and values are not used: the cache holds %s", len(given), cache_dtype)
        return None
    scales = torch.ones(config.num_layers, 2, config.num_kv_heads)
    for place, name in given.items():
        values = named[name].float().flatten()
        if values.numel() not in (1, config.num_kv_heads) or not bool(((values > 0) & values.isfinite()).all()):
            raise CheckpointError(
                f"the scale {name!r} is {values.tolist()[:4]}; it must be one number above 0, or one for each of "
                f"{config.num_kv_heads} key-value heads. kv_cache_dtype='auto' does without."
            )
        scales[place] = values
    logger.info("%d scales of keys and values from the checkpoint", len(given))
    return scales
