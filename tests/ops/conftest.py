"""What kernels write to is poisoned."""

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns too with NaN: tiles, looked-up rows and sums of parts have their memory from there.

    Not on a GPU, where a fill between two kernels would keep the second from starting early.
    """
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = plain(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and made.device.type == "cpu" else made

    monkeypatch.setattr(torch, "empty", poisoned)
