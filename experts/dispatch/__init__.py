"""Expert parallelism: tokens go to the ranks that serve their experts, and results come back.

- `Dispatcher`: the protocol, `dispatch` then `combine` at each layer. `LocalDispatcher` is a single
  rank's, `AllToAllDispatcher` that of several.
- `Exchange`: the all-to-all of bytes below it, over a process group or over local sockets.
- routing exchange: the ranks tell each other their tokens' expert ids (`routing_exchange`).
- `Assignment`: from these, which rank serves which slot; every rank computes the same one.
- `NativeDispatch`: the same messages, by compiled code in decode steps.
- `DispatchStatistics`: what was moved.
"""

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
    prefer_local_sockets,
)
from experts.dispatch.routing_exchange import should_inline_rows

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
    "prefer_local_sockets",
    "should_inline_rows",
]
