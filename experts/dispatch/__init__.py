"""The way to experts that other ranks serve, and back."""

from experts.dispatch.all_to_all import AllToAllDispatcher
from experts.dispatch.base import (
    Combined,
    Dispatched,
    Dispatcher,
    DispatchStatistics,
    Failure,
    LocalDispatcher,
)
from experts.dispatch.exchange import (
    Exchange,
    ExchangeError,
    GroupExchange,
    SocketExchange,
    nearest,
)
from experts.dispatch.routing_exchange import rows_go_along

__all__ = [
    "AllToAllDispatcher",
    "Combined",
    "DispatchStatistics",
    "Dispatched",
    "Dispatcher",
    "Exchange",
    "ExchangeError",
    "Failure",
    "GroupExchange",
    "LocalDispatcher",
    "SocketExchange",
    "nearest",
    "rows_go_along",
]
