"""Forecasts of a predictor: which experts will be needed, how probably, and how soon.

A `Predictor` follows one step of a model: it is shown the tokens first, then each MoE layer in
order. It computes a forecast only when it is asked for one.
Legend: T rows (tokens) of the step, W tokens of context, H hidden, E experts, F forecast experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing.routing import Routing, RoutingError

Floats = NDArray[np.float32]

NO_TOKEN = -1
"""Fills a context before the first token of its sequence."""


@dataclass(frozen=True)
class Forecast:
    """Experts of later layers: the nearest layer first, in a layer the most probable expert first.

    Attributes:
        layer: ``(F,)`` int64, index among the MoE layers.
        expert: ``(F,)`` int64.
        probability: ``(F,)`` float32: that at least one row of the step needs the expert.
        deadline: ``(F,)`` int64: how many MoE layers ahead; 1 is the next layer.
    """

    layer: Tensor
    expert: Tensor
    probability: Tensor
    deadline: Tensor

    def __len__(self) -> int:
        return self.layer.shape[0]

    @classmethod
    def empty(cls) -> Forecast:
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none, torch.zeros(0), none)

    @classmethod
    def of_rows(cls, layer: int, guesses: Mapping[int, Floats], at_least: float = 0.0) -> Forecast:
        """Combine what each row is expected to do, as if rows were independent.

        Args:
            layer: the last MoE layer observed; -1 before the first.
            guesses: for each later layer ``(T, E)`` probabilities that a row needs an expert.
            at_least: leave out less probable experts.
        """
        if not guesses:
            return cls.empty()
        parts = []
        for target in sorted(guesses):
            rows = guesses[target]
            probability = rows[0] if len(rows) == 1 else 1 - np.prod(1 - rows, 0)
            expert = np.argsort(-probability, kind="stable")
            probability = probability[expert]
            count = int(np.searchsorted(-probability, -at_least, "right"))
            parts.append((np.full(count, target), expert[:count], probability[:count]))
        layers, experts, probabilities = (
            part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*parts, strict=True)
        )
        return cls(
            torch.from_numpy(layers),
            torch.from_numpy(experts),
            torch.from_numpy(probabilities),
            torch.from_numpy(layers - layer),
        )

    def validate(self, experts_per_layer: list[int]) -> Forecast:
        """Return self, or raise `RoutingError` naming what does not hold; for tests and fakes."""
        shapes = {
            tuple(t.shape) for t in (self.layer, self.expert, self.probability, self.deadline)
        }
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise RoutingError(f"the four tensors of a forecast must all be (F,); got {shapes}")
        if bool(((self.layer < 0) | (self.layer >= len(experts_per_layer))).any()):
            raise RoutingError(f"layers must be in [0, {len(experts_per_layer)})")
        sizes = torch.tensor(experts_per_layer)[self.layer]
        if bool(((self.expert < 0) | (self.expert >= sizes)).any()):
            raise RoutingError("expert ids must be in [0, experts of their layer)")
        if not bool(((self.probability >= 0) & (self.probability <= 1)).all()):
            raise RoutingError("probabilities must be in [0, 1]")
        later = self.deadline[1:] > self.deadline[:-1]
        falling = self.probability[1:] <= self.probability[:-1]
        if not bool((later | ((self.deadline[1:] == self.deadline[:-1]) & falling)).all()):
            raise RoutingError("a forecast must be sorted by deadline, then by probability")
        return self


class Predictor(Protocol):
    """Follows one step at a time; within a step, calls come in the order of the layers."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> int:
        """W, the tokens of context that `start` takes for each row; at least 1."""
        ...

    def start(self, tokens: Tensor) -> None:
        """Begin a step and forget the last one.

        Args:
            tokens: ``(T, W)`` int64: for each row its token, last, after the tokens before it in
                its sequence, `NO_TOKEN` where there are none.
        """
        ...

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """Take in the rows ``(T, H)`` that a layer's experts read and what its router chose."""
        ...

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        """Experts that the layers after ``layer`` will need.

        Args:
            layer: the last MoE layer observed; -1 right after `start`.
            depth: how many layers ahead; None for all remaining layers.
        """
        ...


@dataclass(frozen=True)
class GivenForecast:
    """A `Predictor` that repeats the forecast it was given, as far as its layers are still ahead.

    The engine uses it where drafts say which experts the next tokens need.
    """

    given: Forecast = field(default_factory=Forecast.empty)
    name: str = "drafts"
    context: int = 1

    @property
    def silent(self) -> bool:
        """True if nothing was given."""
        return len(self.given) == 0

    def start(self, tokens: Tensor) -> None:
        return None

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        return None

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        kept = self.given.layer > layer
        if depth is not None:
            kept &= self.given.layer <= layer + depth
        layers = self.given.layer[kept]
        return Forecast(
            layers, self.given.expert[kept], self.given.probability[kept], layers - layer
        )


def contexts(token_ids: Tensor, width: int) -> Tensor:
    """``(T, width)``: the contexts of all tokens ``(T,)`` of one sequence."""
    pad_contexts = torch.nn.functional.pad(token_ids.long(), (width - 1, 0), value=NO_TOKEN)
    return pad_contexts.unfold(0, width, 1)


def pad_contexts(contexts: Sequence[Sequence[int]], width: int) -> Tensor:
    """``(T, width)``: the last tokens of each context, filled up with `NO_TOKEN` in front."""
    rows = [[NO_TOKEN] * (width - len(ids)) + list(ids[-width:]) for ids in contexts]
    return torch.tensor(rows)
