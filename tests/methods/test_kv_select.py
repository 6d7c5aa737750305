"""Steps that choose blocks by the bounds of their keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.kv import BLOCK
from moe import MoE
from moe.commands.evaluate.scoring import price_kv_policy
from moe.kv.blocks import BlockKVCache
from moe.kv.layout import KVFormat
from moe.kv.visibility import turn
from tests.methods.kv_cases import (
    IDS,
    NATIVE,
    WHY,
    checkpoint,
    model,
    pool_of,
    read,
)

__all__ = ["checkpoint", "model"]

pytestmark = pytest.mark.skipif(NATIVE is None, reason=WHY)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_steps_choose_by_the_keys_that_are_stored(model: MoE, bits: int) -> None:
    """Read whole, or in parts that end within blocks, or written by decode steps."""
    pool_of(model, "select:256", bits)
    found: list[Tensor] = []
    with torch.inference_mode():
        for cuts in ([600], [100, 64, 500], [590]):
            cache, at = model.backbone.new_cache(1000), 0
            assert isinstance(cache, BlockKVCache)
            for cut in cuts:
                read(model, cache, IDS[at : min(at + cut, 600)], "prefill")
                at = min(at + cut, 600)
            cache.prompt_read()
            for token in IDS[at:650]:
                last = read(model, cache, [token], "decode")
            found.append(last)
            keys = turn(cache.read(0, 640)[0]) if bits < 16 else cache.read(0, 640)[0]
            shape, form = cache.shapes[0], KVFormat.of_bits(bits)
            rows = cache.stored_block(9).rows[0][BLOCK * form.token_bytes(*shape) :]
            bounds = rows.clone().view(torch.float32).view(shape.heads, 2, shape.key_size)
            whole = keys[0, :, 9 * BLOCK :]
            assert torch.allclose(bounds[:, 0], whole.amax(1), atol=1e-5)
            assert torch.allclose(bounds[:, 1], whole.amin(1), atol=1e-5)
    assert torch.equal(found[0], found[1])


def test_eval_prices_a_policy(model: MoE) -> None:
    """By decode steps: prompts are read with attention to all."""
    pool = pool_of(model, "select:256")
    price = price_kv_policy(model, [*IDS, *IDS[::-1]])
    assert price is not None
    assert 0 < abs(price - 1) < 0.1
    assert model.backbone.blocks is pool
    assert price_kv_policy(model, IDS) is None  # fewer than four times 256 tokens
    pool_of(model, None)
    assert price_kv_policy(model, [*IDS, *IDS]) is None
