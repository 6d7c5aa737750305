"""All experts are here: tokens stay where they are."""

from __future__ import annotations

from torch import Tensor

from experts.dispatch.base import Combined, Dispatched, Failures
from routing import Routing


class LocalDispatcher:
    """A `Dispatcher` of one rank."""

    local = True

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Dispatched:
        return Dispatched(layer, hidden_states, routing, apart=False)

    def combine(self, dispatched: Dispatched, rows: Tensor, failures: Failures) -> Combined:
        return Combined(rows, failures)

    def check(self) -> None:
        pass
