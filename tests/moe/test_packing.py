"""The probe that lets sequences share a pass: last bits do not matter to it, a wrong mask does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE
from moe.network import attention as packed
from moe.network.attention import MaskRule

DEMO = Path(__file__).parents[2] / "examples/demo-model"
attend = packed._attend


def last_bits(*args: Any) -> Tensor:
    out, generator = attend(*args), torch.Generator().manual_seed(0)
    return out * (1 + 1e-6 * torch.randn(out.shape, generator=generator))


def unmasked(query: Tensor, key: Tensor, value: Tensor, _: MaskRule, *rest: Any) -> Tensor:
    everything = MaskRule(lambda batch, head, query, key: key >= 0, None)
    return attend(query, key, value, everything, *rest)


def blind_to_itself(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, *rest: Any
) -> Tensor:
    if query.shape[2] == 1:
        rule = MaskRule(lambda batch, head, query, key: key < query, None)
    return attend(query, key, value, rule, *rest)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    ("attention", "equal"), [(last_bits, True), (unmasked, False), (blind_to_itself, False)]
)
def test_rounding_is_told_from_a_wrong_mask(
    monkeypatch: pytest.MonkeyPatch, bits: int | None, attention: Callable[..., Tensor], equal: bool
) -> None:
    """Layers that round what they read to 8 bits make thousandths of last bits."""
    for name in ("_attend_prompt", "_attend"):
        monkeypatch.setattr(packed, name, attention)
    with MoE.from_pretrained(DEMO, model={"trunk_bits": bits, "head_bits": bits}) as model:
        assert model.status()["packing"]["enabled"] == equal
