"""Elastic refresh: rows of a canvas that a pass leaves out, with the keys and values they had.

A pass over a canvas computes each of its rows, though the input of a row may hardly have moved: the
token is the same, and so is what the pass before said of it. With `Refresh` a pass computes the
rows whose input did move; these see the keys and values of all, and what the others had said stays
said. Every few passes all are computed. What is written changes.

Of Elastic-Cache (2510.14973) that is the test of drift, on what a row reads in place of attention
to the most attended token, and for each row in place of a layer and all behind it: here each pass
changes what enters the first layer. The full refresh after some passes is dLLM-Cache's.
Legend: C tokens of a canvas, R rows that a pass computes, H hidden size, N heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.sampling.batch import Token


class Refresh(NamedTuple):
    """Which rows a pass computes: those whose input has a cosine similarity below ``similarity``
    to the one they were last computed with, the least similar one, and all in each ``passes``-th
    pass."""

    similarity: float
    passes: int


class Said(NamedTuple):
    """What a pass says of ``(1, C)`` or ``(1, R)`` rows: the likeliest token, the drawn one, the
    entropy in nats, and ``(1, C, V)`` probabilities, or ``(1, C, 1)``, the likeliest token's."""

    likeliest: Tensor
    drawn: Tensor
    entropy: Tensor
    probabilities: Tensor


class KeptRows:
    """What a sequence keeps of the rows of its canvas.

    A pass calls `choose`, `join` at each layer, then `merge`. One that fails before `merge` can be
    run again.
    """

    def __init__(self, refresh: Refresh) -> None:
        self._refresh = refresh
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._since = 0  # passes since the last full one

    def choose(self, inputs_1CH: Tensor, *, first: bool) -> Tensor:
        """``(R,)`` places of the rows that this pass computes, ascending.

        Args:
            first: the canvas is a new one.
        """
        self._next = inputs_CH = inputs_1CH[0]
        self._whole = first or self._since + 1 >= self._refresh.passes
        moved = torch.ones(len(inputs_CH), dtype=torch.bool, device=inputs_CH.device)
        if not self._whole:
            similarity = torch.cosine_similarity(inputs_CH, self._inputs, dim=-1)
            moved = (similarity < self._refresh.similarity) | (similarity == similarity.amin())
        self.rows = moved.nonzero()[:, 0]
        return self.rows

    def join(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``(1, N, C, D)`` of all rows.

        Args:
            keys, values: ``(1, N, R, D)`` of those that the pass computes.
        """
        if self._whole:
            self._keys[layer] = keys.clone(), values.clone()
        for kept, new in zip(self._keys[layer], (keys, values), strict=True):
            kept.index_copy_(2, self.rows, new)
        return self._keys[layer]

    def merge(self, said: Said, scores: list[Token] | None) -> tuple[Said, list[Token] | None]:
        """What is said of all rows, by this pass or the last one that computed them."""
        said = said._replace(probabilities=said.probabilities.amax(-1, keepdim=True))
        if self._whole:
            self._said, self._scores, self._inputs, self._since = said, scores, self._next, 0
            return said, scores
        self._since += 1
        self._said = Said(*(
            kept.index_copy(1, self.rows, new) for kept, new in zip(self._said, said, strict=True)
        ))
        self._inputs = self._inputs.index_copy(0, self.rows, self._next[self.rows])
        if scores is not None and self._scores is not None:
            self._scores = list(self._scores)
            for place, token in zip(self.rows.tolist(), scores, strict=True):
                self._scores[place] = token
        return self._said, self._scores
