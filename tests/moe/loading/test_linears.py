"""Which modules are taken over, and what happens where a weight is used in another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples.models.tiny import tiny_config
from experts.linear import QuantizedLinear
from moe import MoE
from moe.loading.meta_model import build_meta_model
from moe.loading.takeover import chosen_linears, mend_linears

IDS = list(range(3, 23))


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
SHARED = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("architecture", "expected"), [("mixtral", ATTENTION), ("qwen2_moe", ATTENTION | SHARED)]
)
def test_routers_and_gates_are_left_alone(architecture: str, expected: set[str]) -> None:
    chosen = chosen_linears(build_meta_model(tiny_config(architecture)), 8, 4)
    last = {name.removeprefix("model.layers.3.") for name in chosen if ".layers.3." in name}
    assert last == expected
    assert {name for name in chosen if "layers" not in name} == {"lm_head"}


def test_bits_of_the_trunk_and_of_the_head() -> None:
    network = build_meta_model(tiny_config("mixtral"))
    chosen = chosen_linears(network, 8, 4)
    assert chosen.pop("lm_head") == 4
    assert set(chosen.values()) == {8}
    assert set(chosen_linears(network, None, 8)) == {"lm_head"}
    assert not chosen_linears(network, None, None)
    assert not chosen_linears(network, 16, 16)


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called = QuantizedLinear.of(nn.Linear(32, 32), 32, 8)
        self.read = QuantizedLinear.of(nn.Linear(32, 32, bias=False), 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) @ self.read.weight.T


@torch.no_grad()
def test_a_weight_that_is_read_is_right_and_then_made_whole() -> None:
    module, x = ReadsWeight(), torch.randn(3, 32)
    before = module(x)
    assert mend_linears(module) == ["read"]
    assert [type(child) for child in module.children()] == [QuantizedLinear, nn.Linear]
    assert torch.equal(module(x), before)
    assert mend_linears(module) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_architecture_that_reads_weights_says_so(
    tiny_checkpoint: Callable[[str], Path], dtype: str
) -> None:
    settings = {"trunk_bits": 8, "dtype": dtype}
    moe = MoE.from_pretrained(tiny_checkpoint("jamba"), model=settings)
    assert any("made whole again" in notice for notice in moe.notices)
    assert moe.logits(IDS).isfinite().all()
    kept = sum(t.nbytes for t in (*moe.backbone.model.parameters(), *moe.backbone.model.buffers()))
    assert moe.stats()["weight_bytes"] == kept + moe.stats()["expert_bytes"]
