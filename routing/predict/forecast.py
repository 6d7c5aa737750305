"""What one way of guessing is: evidence for each expert, before it is weighed against others'.

A clue sees the same events as a `Predictor` (`routing.predict.forecast`). What it says is any
number that grows with how likely a visit is; the `Ensemble` turns it into a probability by what
calibration has shown, alone or together with other clues.
Legend: T rows, W tokens of context, H hidden, E experts, L MoE layers.
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

Tensors = Mapping[str, Tensor]
"""What a clue has learnt, as it is kept in a file."""


class Clue(Protocol):
    """One way of guessing.

    Attributes:
        name: as it is chosen in a profile and named in tables.
        context: W, tokens that `start` wants; 1 is only the token itself.
        reach: distances (MoE layers ahead) at which it says something new; None where what it says
            is known from the start and the same at any distance.
    """

    name: str
    context: int
    reach: int | None

    def start(self, tokens: Tensor) -> None: ...

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None: ...

    def evidence(self, layer: int, target: int) -> Floats | None:
        """``(T, E)`` about ``target``, asked when ``layer`` was observed last (-1: none);
        None where there is nothing to say."""
        ...

    def tensors(self) -> Tensors:
        """All that its `restore` needs."""
        ...


class EvidenceSource:
    """A clue that overhears everything and says nothing."""

    context = 1
    reach: int | None = None

    def start(self, tokens: Tensor) -> None:
        del tokens

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        del layer, hidden_states, routing


def floats(tensor: Tensor) -> Floats:
    """The numbers of a tensor on any device, float32; shared where they are that already."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array


# ---- What a predictor says: which experts will be needed, how surely, and how soon.
#
# A `Predictor` follows one forward step of a model: the tokens come first, then each MoE layer in
# order. Whoever wants a forecast asks for it at any moment; nothing is computed unasked. Legend:
# T rows (tokens) of the step, W tokens of context, H hidden, E experts, F forecast experts.

NO_TOKEN = -1
"""Stands in a context where a sequence has no token yet."""


@dataclass(frozen=True)
class Forecast:
    """Experts of layers to come, soonest first and within a layer the most probable first.

    Attributes:
        layer: ``(F,)`` int64, MoE layer, counted over MoE layers only.
        expert: ``(F,)`` int64.
        probability: ``(F,)`` float32: that at least one row of the step visits the expert.
        deadline: ``(F,)`` int64: MoE layers from the one asked at to the one meant; 1 is the next.
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
        """From what each row is expected to do.

        Args:
            layer: the MoE layer asked at; -1 before the first.
            guesses: of each layer meant, ``(T, E)`` probabilities that a row visits an expert.
                Rows are taken as independent of each other.
            at_least: less probable experts are left out.
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
    """Follows one step at a time; the calls of a step come in the order of the layers."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> int:
        """W, the tokens of context that `start` wants; at least 1."""
        ...

    def start(self, tokens: Tensor) -> None:
        """A step begins, and what was known of the last one is forgotten.

        Args:
            tokens: ``(T, W)`` int64: the token that each row reads, last, and those before it in
                its sequence; `NO_TOKEN` where there are none.
        """
        ...

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """Rows ``(T, H)`` that this layer's experts read, and what its router decided."""
        ...

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        """What the layers after ``layer`` will need.

        Args:
            layer: the last MoE layer observed; -1 right after `start`.
            depth: how many layers ahead; None for all that are left.
        """
        ...


def contexts(token_ids: Tensor, width: int) -> Tensor:
    """``(T, width)`` contexts of all tokens ``(T,)`` of one sequence read from its start."""
    pad_contexts = torch.nn.functional.pad(token_ids.long(), (width - 1, 0), value=NO_TOKEN)
    return pad_contexts.unfold(0, width, 1)


def pad_contexts(contexts: Sequence[Sequence[int]], width: int) -> Tensor:
    """The last ``width`` tokens of each: ``(T, width)``, with `NO_TOKEN` before those that have
    fewer."""
    rows = [[NO_TOKEN] * (width - len(ids)) + list(ids[-width:]) for ids in contexts]
    return torch.tensor(rows)


# ---- A predictor that says what it was told: where somebody else knows what a step will need.


@dataclass(frozen=True)
class GivenForecast:
    """See `routing.predict.Predictor`; with nothing told it is silent."""

    told: Forecast = field(default_factory=Forecast.empty)
    name: str = "drafts"
    context: int = 1

    @property
    def silent(self) -> bool:
        return len(self.told) == 0

    def start(self, tokens: Tensor) -> None:
        return None

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        return None

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        kept = self.told.layer > layer
        if depth is not None:
            kept &= self.told.layer <= layer + depth
        layers = self.told.layer[kept]
        return Forecast(layers, self.told.expert[kept], self.told.probability[kept], layers - layer)
