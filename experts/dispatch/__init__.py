"""The way to experts that other ranks serve, and back."""

from experts.dispatch.all_to_all import AllToAllDispatcher
from experts.dispatch.base import Combined, Dispatched, Dispatcher, Failure
from experts.dispatch.exchange import Exchange, ExchangeError, GroupExchange
from experts.dispatch.local import LocalDispatcher
from experts.dispatch.rooms import rows_go_along
from experts.dispatch.sockets import SocketExchange, nearest
from experts.dispatch.statistics import DispatchStatistics

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
