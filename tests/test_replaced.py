"""What tests leave replaced is found and put back."""

from __future__ import annotations

import pytest
import torch

from moe.engine import in_flight, runner
from moe.engine.runner import ModelRunner
from tests.replaced import Originals


def test_what_stays_replaced_is_named_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    originals, unread, run = Originals(), in_flight.num_unread, ModelRunner.run
    assert not originals.put_back()
    monkeypatch.setattr(in_flight, "num_unread", lambda _: 0)
    monkeypatch.setattr(ModelRunner, "run", None)
    monkeypatch.setattr(runner, "MASKS_S", 1.0)
    torch.set_default_dtype(torch.float64)
    assert set(originals.put_back()) == {
        "moe.engine.in_flight.num_unread", "ModelRunner.run", "moe.engine.runner.MASKS_S",
        "torch.get_default_dtype()",
    }  # fmt: skip
    assert not originals.put_back()
    assert in_flight.num_unread is unread
    assert ModelRunner.run is run
    assert torch.get_default_dtype() == torch.float32
