"""The `Dispatcher` protocol: `dispatch` sends tokens to the ranks that serve their experts, and
`combine` brings the results back. `LocalDispatcher` is the one of a single rank; those of several
(`RankDispatcher`) can also begin each half and wait for it later.

Legend: T tokens of this rank, N rows that it serves, H hidden, K slots (top-k).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from experts.dispatch.assignment import Ints
from experts.dispatch.exchange import Exchange, ExchangeError
from experts.placement import Placement
from routing import Routing

CombineMode = Literal["exact", "summed"]

MOST_EXPERTS = 2**15 - 1
"""Ids travel in 16 bits."""


class Failure(NamedTuple):
    """Why a row has no result.

    Attributes:
        reason: for people.
        unreadable: an expert could not be read; else a fault of the program.
    """

    reason: str
    unreadable: bool


Failures = Mapping[int, Failure]
"""Rows that have no result, by their index."""


@dataclass
class Dispatched:
    """Rows to run through experts of a layer on this rank.

    Attributes:
        layer: MoE layer.
        hidden_states: ``(N, H)``.
        routing: of the N rows; experts that other ranks serve are not in it.
        distributed: results go to the rank of each token and are summed there. They are wanted in
            the dtype in which kernels sum (`kernels.reference.sum_dtype`), and a row that fails is
            reported to that rank as a `Failure` instead of raised here.
    """

    layer: int
    hidden_states: Tensor
    routing: Routing
    distributed: bool


@dataclass(frozen=True)
class Combined:
    """Results of this rank's own tokens.

    Attributes:
        rows: ``(T, H)`` in the dtype of the hidden states; zero where there is a failure.
        failures: tokens of which an expert could not be read or run.
        codes: the same, still on a device, so that no layer waits for it; None: `failures` says it.
    """

    rows: Tensor
    failures: Failures = field(default_factory=dict)
    codes: FailureCodes | None = None


class FailureCodes(NamedTuple):
    """Which rows of a layer have no result, for the end of a step.

    Attributes:
        codes_T: int64 on a device; 0 where there is a result, else `experts.dispatch.rows.failure`
            knows what it means.
        settle: waits until the codes are known, for a bounded time.
    """

    codes_T: Tensor
    settle: Callable[[], None]


Handle = TypeVar("Handle", bound=Dispatched)


class Dispatcher(Protocol, Generic[Handle]):
    """Token dispatch and combine, one layer after the other.

    Both are collective: every rank calls them for the same layers in the same order, with no tokens
    where it has none.
    """

    @property
    def local(self) -> bool:
        """Return whether all rows stay where they are."""
        ...

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Handle:
        """Send T tokens to the ranks that serve them; returns the rows that this rank serves."""
        ...

    def combine(
        self,
        dispatched: Handle,
        rows: Tensor,
        failures: Failures,
        meanwhile: Callable[[], None] = ...,
    ) -> Combined:
        """Send results back to the ranks of their tokens; returns those of this rank's tokens.

        Args:
            dispatched: what `dispatch` returned.
            rows: ``(N, H)`` results of its rows, weighted and summed by its routing.
            failures: of those rows.
            meanwhile: may run while results travel.
        """
        ...

    def check(self) -> None:
        """Raise the `ExchangeError` that broke the connection to the other ranks, if one did."""
        ...


def nothing() -> None:
    """Run where there is nothing to do while results travel."""


class LocalDispatcher:
    """The `Dispatcher` of a rank that has all experts: tokens stay where they are."""

    local = True

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Dispatched:
        return Dispatched(layer, hidden_states, routing, distributed=False)

    def combine(
        self,
        dispatched: Dispatched,
        rows: Tensor,
        failures: Failures,
        meanwhile: Callable[[], None] = nothing,
    ) -> Combined:
        return Combined(rows, failures)

    def check(self) -> None:
        pass


class RankDispatcher(ABC, Generic[Handle]):
    """The `Dispatcher` of one of several ranks.

    Args:
        exchange: connects the ranks.
        placements: of each MoE layer: which ranks are asked for which experts. No result depends on
            them, as every rank can read every expert.

    Attributes:
        placements: in force now.
        epoch: of the placements; ranks compare it at every dispatch.
        name: for the status.

    Raises:
        ValueError: placements for another number of ranks, or too many experts.
    """

    local = False
    name: ClassVar[str]

    def __init__(self, exchange: Exchange, placements: Sequence[Placement]) -> None:
        self._exchange = exchange
        self.epoch, self.placements = 0, [self._checked(placement) for placement in placements]
        self._statistics = DispatchStatistics([placement.num_experts for placement in placements])
        self._guard = CollectiveGuard(self._statistics)

    @property
    def statistics(self) -> DispatchStatistics:
        """Return counts of what was moved."""
        return self._statistics

    def apply_placements(self, epoch: int, placements: Mapping[int, Placement]) -> None:
        """Use new placements of some layers, between steps; every rank gets the same ones."""
        changed = {layer: self._checked(placement) for layer, placement in placements.items()}
        self.placements = [changed.get(i, old) for i, old in enumerate(self.placements)]
        self.epoch = epoch

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Handle:
        """See `Dispatcher`."""
        return self.finish_dispatch(self.start_dispatch(layer, hidden_states, routing))

    def combine(
        self,
        dispatched: Handle,
        rows: Tensor,
        failures: Failures,
        meanwhile: Callable[[], None] = nothing,
    ) -> Combined:
        """See `Dispatcher`."""
        flight = self.start_combine(dispatched, rows, failures)
        meanwhile()
        return self.finish_combine(flight)

    def check(self) -> None:
        """See `Dispatcher`."""
        self._guard.check()

    @abstractmethod
    def start_dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Any:
        """The first half of `dispatch`: begin to send the rows."""

    @abstractmethod
    def finish_dispatch(self, flight: Any) -> Handle:
        """The second half of `dispatch`: wait, and put the rows that this rank serves in order."""

    @abstractmethod
    def start_combine(self, dispatched: Handle, rows: Tensor, failures: Failures) -> Any:
        """The first half of `combine`: begin to send results to the ranks of their tokens."""

    @abstractmethod
    def finish_combine(self, flight: Any) -> Combined:
        """The second half of `combine`: wait, and sum the results of this rank's tokens."""

    def _checked(self, placement: Placement) -> Placement:
        if placement.ranks != self._exchange.size:
            raise ValueError(
                f"a placement is for {placement.ranks} ranks; there are {self._exchange.size}"
            )
        if placement.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"a layer has {placement.num_experts} experts; dispatch counts to {MOST_EXPERTS}"
            )
        return placement


@dataclass
class DispatchStatistics:
    """Counters of one rank since the last reset: what dispatch moved, and the least that it could.

    Attributes:
        experts_L: experts of each MoE layer of the model.
        exchanges: layers dispatched.
        tokens: of this rank, summed over layers.
        pairs: distinct (token of this rank, other rank that serves it).
        served: slots that this rank served, for itself and others; the load that is balanced.
        lower_bound_bytes: each pair's row once in each direction.
        bytes_out, bytes_back: rows that this rank sent, of hidden states and of results.
        meta_bytes: ids and sizes that this rank sent.
        seconds: spent in collectives, waiting for other ranks included.
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
        """Count the dispatches of successive layers; numbers are of all of them together.

        Args:
            layers: which ones.
            loads_LE: tokens of all ranks that visit each expert.
            tokens, pairs, served: as `Assignment` has them.
            sent_bytes: of the rows that this rank sent.
            row_bytes: of one row of hidden states.
            meta_bytes: of the ids that this rank sent.
        """
        self.exchanges += len(layers)
        self.tokens += tokens
        self.bytes_out += sent_bytes
        self.meta_bytes += meta_bytes
        self.add_counted(loads_LE, pairs, served, row_bytes, layers.start)

    def add_counted(
        self, loads_LE: Ints, pairs: int, served: int, row_bytes: int, first: int = 0
    ) -> None:
        """Add what follows from ids alone, of layers from ``first`` on; see `add`."""
        self.pairs += pairs
        self.served += served
        self.lower_bound_bytes += 2 * pairs * row_bytes
        self._loads_LE[first : first + len(loads_LE), : loads_LE.shape[1]] += loads_LE

    def take_loads(self) -> Ints:
        """``(L, E)`` tokens of all ranks that visited each expert since the last call; zeros behind
        a layer's last expert."""
        taken = self._loads_LE.copy()
        self._loads_LE[:] = 0
        return taken

    def reset(self) -> None:
        vars(self).update(vars(DispatchStatistics(self.experts_L)))

    def as_dict(self) -> dict[str, float]:
        """The counters, for JSON."""
        counters = asdict(self)
        del counters["experts_L"]
        return counters


class CollectiveGuard:
    """A context for collectives: it counts their time, and after an `ExchangeError` in one of them
    raises that error again for every later one."""

    def __init__(self, statistics: DispatchStatistics) -> None:
        self._statistics = statistics
        self._error: ExchangeError | None = None
        self._began = 0.0

    def check(self) -> None:
        """Raise the error that an earlier collective failed with, if one did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> None:
        self.check()
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._statistics.seconds += time.perf_counter() - self._began
        if isinstance(error, ExchangeError):
            self._error = error

    def all_to_all(
        self, exchange: Exchange, message: Tensor, send_R: Sequence[int], receive_R: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send rows of bytes to the other ranks.

        Args:
            message: ``(rows, bytes)``, those for rank 0 first.
            send_R, receive_R: rows to and from each rank; those of this rank are not sent.

        Returns:
            The received rows, complete after the wait; and the wait.
        """
        to_R, from_R = [*send_R], [*receive_R]
        to_R[exchange.rank] = from_R[exchange.rank] = 0
        received = message.new_empty(sum(from_R), message.shape[1])
        with self:
            wait = exchange.all_to_all(message, received, to_R, from_R)
        return received, wait
