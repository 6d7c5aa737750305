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

    @classmethod
    def of(cls, text: str) -> Refresh | None:
        """Of `DiffusionSettings.refresh`; None: all rows in each pass."""
        kind, _, bounds = text.partition(":")
        similarity, _, passes = bounds.partition(":")
        return None if kind == "all" else cls(float(similarity), int(passes))


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
        self._rows = self._inputs_CH = self._next_CH = torch.empty(0)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._said: Said | None = None
        self._scores: list[Token] | None = None
        self._whole = True
        self._since = 0  # passes since the last full one

    def choose(self, inputs_1CH: Tensor, *, first: bool) -> Tensor:
        """``(R,)`` places of the rows that this pass computes, ascending.

        Args:
            first: the canvas is a new one.
        """
        self._next_CH = inputs_CH = inputs_1CH[0]
        self._whole = first or self._since + 1 >= self._refresh.passes
        moved_C = torch.ones(len(inputs_CH), dtype=torch.bool, device=inputs_CH.device)
        if not self._whole:
            similarity_C = torch.cosine_similarity(inputs_CH, self._inputs_CH, dim=-1)
            moved_C = similarity_C < self._refresh.similarity
            moved_C[similarity_C.argmin()] = True  # a pass has rows
        self._rows = moved_C.nonzero()[:, 0]
        return self._rows

    def join(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``(1, N, C, D)`` of all rows.

        Args:
            keys, values: ``(1, N, R, D)`` of those that the pass computes.
        """
        if self._whole:
            self._keys[layer] = keys.clone(), values.clone()
        else:
            for kept, new in zip(self._keys[layer], (keys, values), strict=True):
                kept.index_copy_(2, self._rows, new)
        return self._keys[layer]

    def merge(self, said: Said, scores: list[Token] | None) -> tuple[Said, list[Token] | None]:
        """What is said of all rows, by this pass or the last one that computed them."""
        rows = self._rows
        said = said._replace(probabilities=said.probabilities.amax(-1, keepdim=True))
        if self._whole:
            self._said, self._scores, self._since = said, scores, 0
            self._inputs_CH = self._next_CH
            return said, scores
        assert self._said is not None, "a canvas begins with a whole pass"
        both = zip(self._said, said, strict=True)
        self._said = Said(*(kept.index_copy(1, rows, new) for kept, new in both))
        self._inputs_CH = self._inputs_CH.index_copy(0, rows, self._next_CH[rows])
        self._since += 1
        if scores is not None and self._scores is not None:
            at = dict(zip(rows.tolist(), scores, strict=True))
            self._scores = [at.get(place, kept) for place, kept in enumerate(self._scores)]
        return self._said, self._scores
