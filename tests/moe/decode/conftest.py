"""Models in main memory that are served as on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from examples.models import tiny as architectures
from moe import loader
from moe.decode import enable, proof, recorded, step


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is slow: layers, heads with one of keys, groups of two experts, and
    steps of a proof, which one recording of four rows serves, the second time with padding."""
    monkeypatch.setattr(proof, "STEPS", ((1, 1, 2), (1, 1, 1)))
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    for name, value in small.items():
        monkeypatch.setitem(architectures.TINY, name, value)
    monkeypatch.setitem(architectures.LATENT, "num_key_value_heads", 2)


@pytest.fixture
def on_tape(small_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on the CPU record their steps, and run their experts by Triton."""
    from kernels.triton import experts as triton_experts
    from moe.decode.recorded import recorded_step
    from moe.kv.blocks import BlockPool
    from moe.kv.device_blocks import DeviceBlocks
    from tests.moe.decode.tape import Tape

    def new_pool(planned: Any, _device: object) -> BlockPool:
        return BlockPool(DeviceBlocks(torch.device("cpu"), planned.network.dtype, 40))

    monkeypatch.setattr(enable, "_compiled", partial(recorded_step, capture=Tape))
    monkeypatch.setattr("moe.loader.experts_forward", triton_experts.experts_forward)
    monkeypatch.setattr(step, "experts_forward", triton_experts.experts_forward)
    monkeypatch.setattr(recorded, "reads_nothing_back", triton_experts.supports)
    monkeypatch.setattr(loader, "_blocks_on_device", new_pool)
