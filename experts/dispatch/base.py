"""What a dispatcher is: it brings tokens to the ranks that serve their experts, and rows back.

Legend: T tokens that a rank brings, N rows that it serves, H hidden, K slots a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

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
