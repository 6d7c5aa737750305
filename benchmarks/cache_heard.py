"""What `benchmarks.cache_mixed` hears of a text, and which texts it learns from.

Legend: N tokens, V visits, L layers, E experts of a layer, U = L * E units, F estimates, C context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from benchmarks.cache_calibrated import DISCOUNT, HALF_LIVES, asked, often, scores
from benchmarks.cache_traces import Recorded, record_text
from benchmarks.predict import TEXTS, other_texts
from moe import MoE
from moe.selection import FoundSelector
from offload.policies import ForecastPolicy
from offload.policies.rates import discounts

START, LONGEST, LEAST = 1024, 4096, 256
"""Tokens of a text to learn from: it starts anew after so many; of a file; of a rest."""
DEVELOPMENT = (768, 4)
"""Tokens of a text, and texts of each domain."""


class Heard:
    """What is known behind each visit of a text, and what it should have led to.

    Attributes:
        visits: ``(V,)`` token and layer, all visits or one of each token.
    """

    def __init__(
        self,
        recorded: Recorded,
        routers: Sequence[FoundSelector],
        usual: Tensor,
        *,
        all_visits: bool,
    ) -> None:
        trace, self._layers, self._width = recorded.trace, recorded.num_layers, recorded.width
        assert trace.rows is not None
        self.asked = torch.from_numpy(asked(recorded))
        tokens, layers = torch.arange(len(self.asked)), torch.arange(self._layers)
        self.visits = torch.cartesian_prod(tokens, layers)
        if not all_visits:
            self.visits = torch.stack([tokens, (tokens * 5 + tokens // 6) % self._layers], 1)
        memories = [often(self.asked.numpy(), each, usual.numpy()) for each in HALF_LIVES]
        first = usual.expand(2, len(HALF_LIVES), -1)
        self._often = torch.cat([first, torch.from_numpy(np.stack(memories, 1))])
        own = torch.from_numpy(scores(recorded, routers))
        self._scores, self._last = (
            pad(rows, (0, 0, 2, 0)) for rows in (own, trace.rows.read[-1].float())
        )
        self._estimates = _estimates(recorded, self.visits)

    def clues(self) -> tuple[Tensor, Tensor]:
        """``(V, F, U)`` log-odds of each unit, and ``(V, C)`` of what else is known."""
        at, layer = self.visits.T
        at = at + 2
        been = self._been()
        own = torch.where(been[:, None], self._often[at], self._often[at - 1])
        now, before, old = (self._scores[at - back] for back in range(3))
        context = [
            torch.where(been, now, before),
            torch.where(been, before, old),
            self._last[at - (layer < self._layers - 1).long()],
            one_hot(layer, self._layers).float(),
        ]
        return torch.cat([_log_odds(own), self._estimates[:, None]], 1), torch.cat(context, 1)

    def next_uses(self) -> Tensor:
        """``(V, U)``: `DISCOUNT` to the power of the visits until each unit is asked for."""
        soon = torch.cat([self.asked, self.asked.mean(0, keepdim=True)])
        for token in range(len(self.asked) - 1, -1, -1):
            soon[token] += (1 - soon[token]) * DISCOUNT * soon[token + 1]
        at = self.visits[:, 0]
        return torch.where(self._been(), soon[at + 1], soon[at])

    def _been(self) -> Tensor:
        """``(V, U)``: whether the unit's layer has been visited for this token."""
        layer_of = torch.arange(self._layers).repeat_interleave(self._width)
        return layer_of <= self.visits[:, 1:]


def to_learn_from(model: MoE, tokens: int) -> Iterator[Recorded]:
    """At least so many of each domain, of texts behind the development texts."""
    for name in TEXTS:
        texts, read, skipped = other_texts(name), 0, 0
        size, count = DEVELOPMENT
        while skipped < count:
            ids: list[int] = []
            while len(ids) < size:
                ids += model.codec.encode(next(texts))
            skipped += 1
        while read < tokens and (text := next(texts, None)) is not None:
            ids = model.codec.encode(text)[:LONGEST]
            for at in range(0, len(ids) - LEAST + 1, START):
                piece = ids[at : at + START]
                yield record_text(model, f"{name} {read}", piece)
                read += len(piece)


def _estimates(recorded: Recorded, visits: Tensor) -> Tensor:
    """``(V, U)``: log-odds of the default's worths behind visits, distances left out."""
    layers, width = recorded.num_layers, recorded.width
    default, found, wanted = ForecastPolicy(layers, width), [], set(map(tuple, visits.tolist()))
    for number, units in enumerate(recorded.calls(1)):
        token, layer = divmod(number, layers)
        default.touch(layer, units)
        if (token, layer) in wanted:
            found.append(default.values() / np.repeat(discounts(layers)[layer], width))
    return _log_odds(torch.from_numpy(np.array(found, np.float32)))


def _log_odds(probability: Tensor) -> Tensor:
    return torch.logit(probability, 1e-3)
