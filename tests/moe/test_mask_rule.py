"""Which keys a query sees, of the rules that transformers makes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from kernels.cpu import choose_kernel
from moe.kv.cache import KVCache
from moe.network.attention import MaskRule, first_keys, packed_attention, packed_mask, packed_pass
from moe.network.packed_pass import PackedCache

causal: Any = causal_mask_function
NO_PADDING = torch.zeros(1, dtype=torch.long)
RULES = {
    "causal": packed_mask(mask_function=causal),
    "window": packed_mask(mask_function=sliding_window_causal_mask_function(5), local_size=5),
    "chunks": packed_mask(mask_function=chunked_causal_mask_function(5, NO_PADDING), local_size=5),
    "no skip": packed_mask(mask_function=causal, allow_is_causal_skip=False),
    "gaps": MaskRule(lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), None),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4, 4), (5, 5), (12, 12), (3, 12), (1, 12)])
def test_spans_are_what_the_rule_says(rule: MaskRule, queries: int, keys: int) -> None:
    zero = torch.zeros((), dtype=torch.long)
    at, positions = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    seen = rule.allows(zero, zero, at, positions).expand(queries, keys)
    first = first_keys(rule, queries, keys)
    if first is None:
        assert rule is RULES["gaps"]
    else:
        assert torch.equal(seen, (positions >= first[:, None]) & (positions <= at))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_packed_prompts_attend_by_the_rule(
    rule: MaskRule, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences in a row, one read on; compiled where the rule leaves no gaps."""
    native, reason = choose_kernel()
    assert native is not None, reason
    sequences, sizes, length = [KVCache(30), KVCache(30)], [16, 20], 4
    history = torch.randn(2, 1, 2, length, 8)
    sequences[1].write(0, *history)
    sequences[1].length = length
    query, key, value = torch.randn(1, 4, 36, 8), *torch.randn(2, 1, 2, 36, 8)
    cache = PackedCache(sequences, sizes, set())
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    compiled = Mock(wraps=native.attention.attend)
    monkeypatch.setattr(native.attention, "attend", compiled)
    with packed_pass(cache):
        rows = cache.update(key, value, 0)
        output, _ = packed_attention(module, query, *rows, rule, softcap=softcap)
    assert compiled.call_count == (0 if rule is RULES["gaps"] else 2)
    zero = torch.zeros((), dtype=torch.long)
    parts = []
    for q, sequence, end in zip(query.split(sizes, 2), sequences, cache.ends, strict=True):
        keys, values = (x.repeat_interleave(2, 1) for x in sequence.read(0, end))
        at = torch.arange(end - q.shape[2], end)[:, None]
        mask = rule.allows(zero, zero, at, torch.arange(end)[None])
        if softcap is None:
            parts.append(scaled_dot_product_attention(q, keys, values, mask))
        else:
            scores = softcap * torch.tanh(q @ keys.transpose(2, 3) * 8**-0.5 / softcap)
            parts.append(scores.masked_fill(~mask, -float("inf")).softmax(-1) @ values)
    torch.testing.assert_close(output, torch.cat(parts, 2).transpose(1, 2), rtol=1e-5, atol=1e-5)
