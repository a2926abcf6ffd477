"""Execute one decided step: model, cache, attention backend and sampler together.

To change this file: ``submit`` is a function of the decision and of the cache. It decides nothing, and it keeps
nothing of a request from one step to the next but what lies in the cache.
"""

from typing import Any

import torch

from nanovllm.batch import build_batch
from nanovllm.engine import Fetch
from nanovllm.kv_cache import KVCache
from nanovllm.sampler import sample
from nanovllm.scheduler import SchedulerOutput


class ModelRunner:
    """Owns the model and the cache tensors. ``backend`` is a module as ``nanovllm.ops.attention`` describes."""

    def __init__(self, model: Any, cache: KVCache, backend: Any) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.lookahead = 0

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> Fetch:
        """Begin the step; return what waits for its tokens."""
        batch = build_batch(output, self.cache.block_size, self.backend, self.cache.data.device)
        hidden = self.model(batch, self.cache)
        requests = [span.request for span in output.spans if span.samples]
        if not requests:
            return lambda: [None] * len(output.spans)
        drawn = iter(sample(self.model.logits(hidden[batch.sample_rows]), requests))
        sampled = [next(drawn) if span.samples else None for span in output.spans]
        return lambda: sampled
