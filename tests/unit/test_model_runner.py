"""A step is computed on the device of the cache, on a stand-in for it."""

from types import SimpleNamespace

import pytest
import torch

from nanovllm import model_runner
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import SchedulerOutput


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", 1), ("cuda:0", 0), ("cpu", -1)])
def test_a_step_makes_the_caches_device_the_current_one(device, expected, monkeypatch):
    """Every thread begins with device 0: kernels and events would go there, and tokens be read too early."""
    current, seen = [], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    def clear(_):
        seen.extend(current)
        raise RuntimeError("seen")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(model_runner, "Drawn", lambda *_: None)
    cache = SimpleNamespace(data=SimpleNamespace(device=torch.device(device)), clear=clear)
    runner = ModelRunner(None, cache, SimpleNamespace(), max_requests=1, max_model_len=8)
    with pytest.raises(RuntimeError, match="seen"):
        runner.submit(SchedulerOutput(()))
    assert (seen, current) == ([expected], [])
