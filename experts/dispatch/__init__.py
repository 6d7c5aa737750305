"""Expert parallelism: tokens go to the ranks that serve their experts, and results come back.

- `Dispatcher`: the protocol, `dispatch` then `combine` at each layer. `LocalDispatcher` is a single
  rank's. `RankDispatcher`s of several ranks: `AllToAllDispatcher` for rows in main memory,
  `DeviceDispatcher` for rows on GPUs, whose host must not wait at each layer.
- `Exchange`: the all-to-all of bytes below it, over a process group or over local sockets.
- routing exchange: the ranks tell each other their tokens' expert ids (`routing_exchange`).
- `Assignment`: from these, which rank serves which slot; every rank computes the same one.
- `DeviceCopies`: the same on a device, by a simpler rule.
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
    FailureCodes,
    LocalDispatcher,
    RankDispatcher,
)
from experts.dispatch.exchange import (
    Exchange,
    ExchangeError,
    GroupExchange,
    SocketExchange,
    prefer_local_sockets,
)
from experts.dispatch.on_device import DeviceDispatcher, RowKind
from experts.dispatch.routing_exchange import should_inline_rows

__all__ = [
    "AllToAllDispatcher",
    "Combined",
    "DeviceDispatcher",
    "DispatchStatistics",
    "Dispatched",
    "Dispatcher",
    "Exchange",
    "ExchangeError",
    "Failure",
    "FailureCodes",
    "GroupExchange",
    "LocalDispatcher",
    "RankDispatcher",
    "RowKind",
    "SocketExchange",
    "prefer_local_sockets",
    "should_inline_rows",
]
