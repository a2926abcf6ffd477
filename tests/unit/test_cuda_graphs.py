"""Where a graph cannot be recorded, on a stand-in for the device."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nanovllm.cuda_graphs import Cuts, DecodeGraphs, Key, lay
from nanovllm.errors import ConfigError


@pytest.mark.parametrize(
    ("found", "raised"),
    [
        (RuntimeError("CUDA error: operation not supported\nCompile with TORCH_USE_CUDA_DSA"), ConfigError),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
    ],
)
def test_a_driver_without_graphs_is_answered_with_the_option_to_set(found, raised, monkeypatch):
    @contextmanager
    def record(*_, **__):
        raise found
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", record)
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.backend = SimpleNamespace(graph_plan=lambda *_, **__: None)
    graphs.deterministic, graphs._max_blocks, graphs._pool = False, 3, None
    graphs._message = torch.zeros(lay(2, Cuts(), 3)["tables"].stop, dtype=torch.int32)
    with pytest.raises(raised) as caught:
        graphs._record_one(Key(2, Cuts(), samples=True, filters=False))
    if raised is ConfigError:
        about = "CUDA graphs cannot be recorded here (CUDA error: operation not supported). Set enforce_eager=True."
        assert (str(caught.value), caught.value.parameter) == (about, "enforce_eager")
