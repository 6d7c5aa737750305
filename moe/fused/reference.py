"""A decode step by description in plain torch: slow, obvious, and what the others must equal.

Legend: B rows, each one new token; a sequence may have several, at successive positions. H hidden,
Q query heads, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moe.fused.base import Visitor, read_by
from moe.fused.description import (
    Attention,
    Description,
    LatentAttention,
    Projection,
    Rotation,
    View,
)
from moe.fused.parts import project, rotate
from moe.fused.walk import walk
from moe.kv import SequenceKV, Work


def reference_step(
    description: Description,
    work: Sequence[Work],
    visit: Visitor,
    watch: Callable[[int, Tensor], None] | None = None,
) -> list[Tensor]:
    """Logits as of `moe.trunk.Trunk.lanes`; the sequences grow by the tokens read.

    Args:
        watch: hears of each layer's output.
    """
    tokens = torch.tensor([token for item in work for token in item.token_ids])
    steps, answer = walk(description, tokens, _Plain(work), watch), None
    while True:
        try:
            halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
        except StopIteration as end:
            return read_by(work, end.value)
        answer = visit(halt.layer, halt.rows, halt.routing)


class _Plain:
    """Row by row and key by key; see `moe.fused.walk.Means`."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        ends = [(item.cache.length, len(item.token_ids)) for item in work]
        self._positions = torch.cat([torch.arange(at, at + count) for at, count in ends])

    def project(self, projection: Projection, rows: Tensor) -> Tensor:
        return project(projection, rows)

    def turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        rotation.table.reserve(int(self._positions.max()) + 1)
        table, at = rotation.table, self._positions
        return rotate(rotation, heads, table.cos[at], table.sin[at])

    def attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = a.heads // a.kv_heads
        outputs = []
        for row, (keys, values) in zip(q, self._seen(a.layer, k, v), strict=True):
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            probabilities = _softmax((keys @ row[:, :, None])[..., 0], a.view)
            outputs.append((probabilities[:, None] @ values)[:, 0])
        return torch.stack(outputs)

    def attend_latent(
        self, a: LatentAttention, inward: Tensor, turned: Tensor, latent: Tensor, key: Tensor
    ) -> Tensor:
        outputs = []
        stored = self._seen(a.layer, latent[:, None], key[:, None])
        for row, beside, ((latents,), (keys,)) in zip(inward, turned, stored, strict=True):
            scores = row @ latents.T + beside @ keys.T
            outputs.append(_softmax(scores, a.view) @ latents)
        return torch.stack(outputs)

    def _seen(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Store rows ``(B, N, D)``; then ``(N, L, D)`` keys and values that each of them sees."""
        sizes = [len(item.token_ids) for item in self._work]
        for item, k, v in zip(self._work, keys.split(sizes), values.split(sizes), strict=True):
            cache = item.cache
            assert isinstance(cache, SequenceKV)
            cache.write(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            for row in range(len(k)):
                seen_keys, seen_values = cache.read(layer, cache.length + row + 1)
                yield seen_keys[0], seen_values[0]


def _softmax(scores: Tensor, view: View) -> Tensor:
    """Probabilities ``(Q, L)`` of one row's keys, the newest last."""
    scores = scores * view.scale
    if view.softcap is not None:
        scores = view.softcap * torch.tanh(scores / view.softcap)
    keys = scores.shape[-1]
    if view.window is not None and keys > view.window:
        scores[..., : keys - view.window] = -float("inf")
    if view.sinks is not None:
        scores = torch.cat([scores, view.sinks[:, None]], -1)
    return scores.softmax(-1)[..., :keys]
