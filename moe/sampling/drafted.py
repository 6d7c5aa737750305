"""Drafted tokens of several sequences, drawn where their logits are: the next pass of a draft reads
them there, and the host learns them when the draft is done.

A token drawn by chance comes with the probabilities that it was drawn from, for rejection sampling
(`moe.sampling.sampler.verify`). They need not be those of the sampler, but known; so a draft looks
at no more than `CANDIDATES` tokens, and never asks the host whether that is enough.

Shape suffixes: B drafts, V vocabulary, C candidates in falling order of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe.sampling import draws
from moe.sampling.batch import Draws, Proposal, Row, parts_of
from moe.sampling.sampler import Sampler
from moe.settings.device import to_device

CANDIDATES = 1024
"""Most tokens that a drafted one is drawn from by chance: the likeliest."""


class DraftedTokens:
    """The next token of each of some drafts.

    Args:
        forks: `Sampler.fork` of each sequence; none `needs_tokens`.
        logits_BV: of any float dtype, what each draws from.
        place: how many tokens each has drafted before.

    Attributes:
        ids_B: int64, on the device.
        told_B2: float64, for the host: the tokens, and how likely they are as the draft states it;
            NaN where logits are no numbers.
    """

    def __init__(self, forks: Sequence[Sampler], logits_BV: Tensor, place: int) -> None:
        rows = [fork.row(place) for fork in forks]
        self._by_chance = [at for at, fork in enumerate(forks) if fork.is_random]
        others = [at for at, fork in enumerate(forks) if not fork.is_random]
        self._candidates: Sequence[Tensor] = ()  # of the former: ids_BC, chances_BC
        parts = []
        if self._by_chance:
            own_BV, own = _chosen(logits_BV, rows, self._by_chance)
            ids_B1, chances_B1, *self._candidates = _drawn(own_BV, own)
            parts.append((ids_B1, chances_B1))
        if others:
            parts.append(_predicted(*_chosen(logits_BV, rows, others)))
        ids_B1, chances_B1 = (torch.cat(own) for own in zip(*parts, strict=True))
        if len(parts) > 1:
            order = to_device(np.argsort([*self._by_chance, *others]), logits_BV.device)
            ids_B1, chances_B1 = ids_B1[order], chances_B1[order]
        self.ids_B = ids_B1[:, 0]
        self.told_B2 = torch.cat((ids_B1.double(), chances_B1), 1)

    def proposals(self, token_ids: Sequence[int]) -> list[Proposal | None]:
        """Return what each draft's token was drawn from; None: it was not drawn at random.

        Args:
            token_ids: as read from `told_B2`.
        """
        found: list[Proposal | None] = [None] * len(token_ids)
        for at, *candidates in zip(self._by_chance, *self._candidates, strict=True):
            found[at] = Proposal(token_ids[at], *candidates)
        return found


def _chosen(
    logits_BV: Tensor, rows: Sequence[Row], places: Sequence[int]
) -> tuple[Tensor, list[Row]]:
    if len(places) < len(rows):
        logits_BV = logits_BV[to_device(np.array(places), logits_BV.device)]
    return logits_BV, [rows[place] for place in places]


def _predicted(logits_BV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """``(B, 1)`` tokens that the samplers will draw if these are the model's logits, and float64
    probabilities."""
    ids_B1 = Draws([logits_BV], rows).ids_B[:, None]
    return ids_B1, logits_BV.softmax(-1).gather(1, ids_B1).double()


def _drawn(logits_BV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, ...]:
    """``(B, 1)`` tokens and their float64 probabilities, and ``(B, C)`` of all candidates."""
    vocab_size = logits_BV.shape[1]
    limits = [min(row.params.top_k or CANDIDATES, CANDIDATES, vocab_size) for row in rows]
    found = []
    for part in parts_of(len(rows), logits_BV[0]):
        scores_BV, own = logits_BV[part.start : part.stop].float(), rows[part.start : part.stop]
        numbers = [
            (row.params.temperature, min(row.uniform, draws.MOST_UNIFORM), row.params.kept_mass,
             row.params.min_p, limit)
            for row, limit in zip(own, limits[part.start : part.stop], strict=True)
        ]  # fmt: skip
        numbers_5B1 = to_device(np.array(numbers).T[..., None].copy(), logits_BV.device)
        temperature_B1, uniform_B1, top_p_B1, min_p_B1, limit_B1 = numbers_5B1
        ids_BC, weights_BC, _ = draws.nucleus(
            scores_BV, scores_BV.amax(-1, keepdim=True), temperature_B1, limit_B1, None, top_p_B1,
            min_p_B1, max(limits),
        )  # fmt: skip
        place_B1 = draws.draw(weights_BC, uniform_B1)
        chances_BC = weights_BC / weights_BC.sum(-1, keepdim=True)
        ids_B1, chances_B1 = ids_BC.gather(1, place_B1), chances_BC.gather(1, place_B1)
        found.append((ids_B1, chances_B1, ids_BC, chances_BC))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
