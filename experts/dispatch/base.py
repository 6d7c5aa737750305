"""What a dispatcher is: it brings tokens to the ranks that serve their experts, and rows back.

Legend: T tokens that a rank brings, N rows that it serves, H hidden, K slots a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from experts.dispatch.assignment import Ints
from experts.placement import Placement
from routing import Routing

MOST_EXPERTS = 2**15 - 1
"""Ids travel in 16 bits."""


class Failure(NamedTuple):
    """Why a row has no result; and whether for want of an expert, or for a fault of our own."""

    reason: str
    unreadable: bool


Failures = Mapping[int, Failure]
"""Rows that have no result, and why."""


@dataclass
class Dispatched:
    """Rows to be run through experts of a layer on this rank.

    Attributes:
        layer: MoE layer.
        hidden_states: ``(N, H)``.
        routing: of the N rows; experts that other ranks serve are not in it.
        apart: the results are sums to be continued elsewhere: they are wanted in the dtype in which
            kernels sum (`kernels.reference.sum_dtype`), not in that of the hidden states.
    """

    layer: int
    hidden_states: Tensor
    routing: Routing
    apart: bool


@dataclass(frozen=True)
class Combined:
    """Rows of the tokens that this rank brought.

    Attributes:
        rows: ``(T, H)`` in the dtype of the hidden states; zero where there is a failure.
        failures: tokens with an expert that could not be had or run.
    """

    rows: Tensor
    failures: Failures = field(default_factory=dict)


Handle = TypeVar("Handle", bound=Dispatched)


class Dispatcher(Protocol, Generic[Handle]):
    """The way to experts and back, one layer after the other.

    Every rank calls both for the same layers in the same order, with no tokens where it has none.
    """

    @property
    def local(self) -> bool:
        """Whether all rows stay where they are."""
        ...

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Handle:
        """Bring T tokens to those who serve them; what this rank has to serve."""
        ...

    def combine(self, dispatched: Handle, rows: Tensor, failures: Failures) -> Combined:
        """Bring results back.

        Args:
            dispatched: what `dispatch` returned.
            rows: ``(N, H)`` results of its rows, weighted and summed by its routing.
            failures: of those rows.
        """
        ...

    def check(self) -> None:
        """Raise what broke the connection to the other ranks, if anything did."""
        ...


def fitting(placement: Placement, ranks: int) -> Placement:
    """The placement, or ValueError where it is for other ranks or ids do not fit into 16 bits."""
    if placement.ranks != ranks:
        raise ValueError(f"a placement is for {placement.ranks} ranks; there are {ranks}")
    if placement.num_experts > MOST_EXPERTS:
        raise ValueError(
            f"a layer has {placement.num_experts} experts; dispatch counts to {MOST_EXPERTS}"
        )
    return placement


# ---- All experts are here: tokens stay where they are.


class LocalDispatcher:
    """A `Dispatcher` of one rank."""

    local = True

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Dispatched:
        return Dispatched(layer, hidden_states, routing, apart=False)

    def combine(self, dispatched: Dispatched, rows: Tensor, failures: Failures) -> Combined:
        return Combined(rows, failures)

    def check(self) -> None:
        pass


# ---- What dispatch moved, beside the least that it could have moved.


@dataclass
class DispatchStatistics:
    """Counters of one rank since the last reset.

    Attributes:
        experts_L: of each MoE layer of the model.
        exchanges: layers that were met with the other ranks.
        tokens: that this rank brought, summed over layers.
        pairs: distinct (token, other rank that serves it).
        served: slots that this rank served, for itself and others; the load that is balanced.
        lower_bound_bytes: each pair's row once there and once back.
        bytes_out, bytes_back: rows that this rank sent, of its tokens and of results.
        meta_bytes: ids and sizes that this rank sent.
        seconds: spent waiting for other ranks.
    """

    experts_L: Sequence[int]
    exchanges: int = 0
    tokens: int = 0
    pairs: int = 0
    served: int = 0
    lower_bound_bytes: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    meta_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._loads_LE = np.zeros((len(self.experts_L), max(self.experts_L, default=0)), np.int64)

    def add(
        self,
        layers: range,
        loads_LE: Ints,
        *,
        tokens: int,
        pairs: int,
        served: int,
        sent_bytes: int,
        row_bytes: int,
        meta_bytes: int,
    ) -> None:
        """Tokens have left for successive layers; numbers are of all of these together.

        Args:
            loads_LE: tokens of all ranks that visit each expert.
            tokens, pairs, served: as `Assignment` has them.
            sent_bytes: of their rows.
            row_bytes: of one row of hidden states.
            meta_bytes: of ids.
        """
        self.exchanges += len(layers)
        self.tokens += tokens
        self.pairs += pairs
        self.served += served
        self.lower_bound_bytes += 2 * pairs * row_bytes
        self.bytes_out += sent_bytes
        self.meta_bytes += meta_bytes
        self._loads_LE[layers.start : layers.stop, : loads_LE.shape[1]] += loads_LE

    def take_loads(self) -> Ints:
        """``(L, E)`` tokens of all ranks that visited each expert of each layer since this was last
        called; zeros behind a layer's last expert."""
        taken = self._loads_LE.copy()
        self._loads_LE[:] = 0
        return taken

    def reset(self) -> None:
        self.__init__(self.experts_L)  # type: ignore[misc]

    def as_dict(self) -> dict[str, float]:
        """The counters, for JSON."""
        counters = asdict(self)
        del counters["experts_L"]
        return counters
