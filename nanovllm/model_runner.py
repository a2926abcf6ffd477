"""Execute decided steps: model, cache, attention backend and sampler together.

To change this file: what ``submit`` computes is a function of the decision, of the cache and of the tokens that the
step before drew. It decides nothing, and keeps nothing else of a request from one step to the next.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanovllm.batch import Drawn, build_batch
from nanovllm.checkpoint import find
from nanovllm.cuda_graphs import DecodeGraphs
from nanovllm.engine import Fetch
from nanovllm.kv_cache import KVCache
from nanovllm.request import Sampled
from nanovllm.sampler import Samples, sample
from nanovllm.scheduler import SchedulerOutput, Span

PROMPTS = "nanovllm.scoring.prompts:score_prompts"
"""What finds out the log-probabilities of prompt tokens."""


class ModelRunner:
    """Owns the model and the cache tensors. ``backend`` is a module as ``nanovllm.ops.attention`` describes.

    On a GPU a step is under way when ``submit`` returns, and one more may be submitted before its tokens are fetched.
    Steps of decodes alone are replayed as CUDA graphs, unless ``enforce_eager``. ``deterministic`` asks the backend for
    kernels that do not depend on the step; the model must have been loaded that way too. A thread may have another
    current device than the cache's.
    """

    def __init__(
        self, model: Any, cache: KVCache, backend: Any, *,
        max_requests: int, max_model_len: int, enforce_eager: bool = False, record_ahead: bool = True,
        deterministic: bool = False, logprobs_mode: str = "raw_logprobs",
    ) -> None:  # fmt: skip
        device = cache.data.device
        self._device = torch.cuda.device(device.index if device.type == "cuda" else -1)  # kernels go to the current one
        self.model = model
        self.cache = cache
        self.backend = backend
        self.deterministic = deterministic
        self.logprobs_mode = logprobs_mode
        self.lookahead = 1 if device.type == "cuda" else 0
        self._graphs = None
        if device.type == "cuda" and not enforce_eager and hasattr(backend, "graph_plan"):
            self._graphs = DecodeGraphs(
                model, cache, backend,
                max_requests=max_requests, max_model_len=max_model_len,
                deterministic=deterministic, ahead=record_ahead, logprobs_mode=logprobs_mode,
            )  # fmt: skip
        self._drawn = self._graphs.drawn if self._graphs else Drawn(max_requests, device)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Do before the first request what would otherwise delay it."""
        if self._graphs is not None:
            self._graphs.prepare()

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> Fetch:
        """Begin the step; return what waits for its tokens."""
        with self._device:
            self.cache.clear(output.spoiled)
            drawing = [span for span in output.spans if span.samples]
            samples = prompts = None
            if self._graphs is not None and self._graphs.fits(output.spans):
                samples = self._graphs.run(drawing)
            else:
                scores = any(span.request.unscored(span.start, span.stop) for span in output.spans)
                batch = build_batch(
                    output, self.cache.block_size, self.backend, self._drawn,
                    deterministic=self.deterministic, all_hidden=scores,
                )  # fmt: skip
                hidden = self.model(batch, self.cache)
                if scores:
                    prompts = find(PROMPTS)(self.model, hidden, output.spans, self.logprobs_mode)
                if drawing:
                    logits = self.model.logits(hidden if batch.hidden_rows is not None else hidden[batch.sample_rows])
                    samples = sample(logits, drawing, self._drawn, logprobs_mode=self.logprobs_mode)
            if samples is prompts is None:
                return lambda: [None] * len(output.spans)
            if not self.lookahead:
                return _dealer(output.spans, samples, prompts, None)
            if samples is not None:
                self._drawn.keep(drawing, samples.tokens)
                samples = samples.to_host()
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            return _dealer(output.spans, samples, prompts, arrived.synchronize)


def _dealer(spans: Sequence[Span], samples: Samples | None, prompts: Any, wait: Callable[[], None] | None) -> Fetch:
    """Return what waits for the samples and deals them out to the spans that drew, ``prompts`` to those it is about."""

    def fetch() -> list[Sampled | None]:
        if wait is not None:
            wait()
        sampled = iter(samples.sampled() if samples is not None else ())
        dealt = [next(sampled) if span.samples else None for span in spans]
        return dealt if prompts is None else prompts(dealt)

    return fetch
