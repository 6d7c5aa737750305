"""A dispatch and a combine of ranks of one machine, by a compiled library (see meeting.cpp).

Legend: R ranks, T tokens of all ranks, K slots, W bytes of a row, H hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.assign import Assigned, Ints, address, assigned, numbers
from kernels.cpu.calls import DTYPES, NUMBER, POINTER, declare

LOST, BAD_ID, DONE, OTHERWISE = -2, -1, 0, 1
"""What a call says: a rank is lost; an id is no expert; all went well; see the call."""
_SIGNATURES = {
    "moe_dispatch": (NUMBER, (*(POINTER,) * 5, ctypes.c_int64)),
    "moe_return": (NUMBER, (*(POINTER,) * 4, NUMBER, NUMBER)),
}
_SIZES = ("ranks", "rank", "slots", "width", "hidden", "timeout_ms", "rows_at")
_ARRAYS = (
    *("files", "tokens", "slots_R", "message_bytes", "messages", "heads"),
    *("assigned", "served", "returned"),
)


class _Record(ctypes.Structure):
    """`Meeting` of meeting.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in ("experts", "lost", "error")),
    )


class NativeMeeting:
    """What ranks exchange as long as all bring what they brought before.

    Args:
        files: sockets to all ranks; the own is not used.
        heads: ``(R, 40)`` bytes that the ranks say of what they bring.
        shapes: ``(tokens, slots)`` of each rank.
        width: W.
        rows_at: where rows begin in a message, which is ids in 16 bits behind place and head.
        message_bytes: of each rank.
        hidden: H.

    Attributes:
        width: W.
        messages: that the ranks told in the last dispatch.
        served: ``(T K, W)`` bytes of the rows that this rank serves, in the order of its slots.
        returned: ``(own T K, H)`` float32 results of other ranks.
        record: where a code is LOST, `lost` says which rank and `error` why.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        files: Sequence[int],
        rank: int,
        timeout_s: float,
        heads: bytes,
        shapes: Sequence[tuple[int, int]],
        width: int,
        rows_at: int,
        message_bytes: Sequence[int],
        hidden: int,
    ) -> None:
        declare(library, _SIGNATURES)
        self._dispatch, self._return = library.moe_dispatch, library.moe_return
        self._shapes, self._own, self.width = list(shapes), shapes[rank], width
        self._slots = max(slots for _, slots in shapes)
        self.messages = [np.zeros(size, np.uint8) for size in message_bytes]
        most = sum(tokens for tokens, _ in shapes) * self._slots
        self.served = torch.empty(most, width, dtype=torch.uint8)
        self.returned = torch.empty(self._own[0] * self._slots, hidden, dtype=torch.float32)
        self._out = np.empty(0, np.int64)
        tokens_R, slots_R = np.array(self._shapes, np.int64).T.copy()
        pointers = np.array([address(one) for one in self.messages], np.uint64)
        held: dict[str, NDArray[Any]] = {
            "files": np.array(files, np.int32),
            "tokens": tokens_R,
            "slots_R": slots_R,
            "message_bytes": np.array(message_bytes, np.int64),
            "messages": pointers,
            "heads": np.frombuffer(heads, np.uint8).copy(),
        }
        sizes = len(files), rank, self._slots, width, hidden, int(timeout_s * 1000), rows_at
        self._held = held  # the record points to it
        self.record = _Record(
            **dict(zip(_SIZES, sizes, strict=True)),
            **{name: address(array) for name, array in held.items()},
            served=self.served.data_ptr(),
            returned=self.returned.data_ptr(),
        )
        self._place, self._pointer = (ctypes.c_int64 * 2)(), ctypes.addressof(self.record)

    def dispatch(
        self, place: tuple[int, int], ids_TK: Tensor, rows: Tensor, holders: Ints, experts: int
    ) -> int:
        """One of the codes; DONE: `assigned` and `served` hold what this rank serves.

        Args:
            place: layer and epoch, where all must be.
            ids_TK, rows: contiguous, of the shapes that were told.
        """
        size = numbers(self._shapes, self._own[0], experts)
        if len(self._out) != size:
            self._out = np.empty(size, np.int64)
            self.record.assigned = address(self._out)
        self._place[:] = [*place]
        done: int = self._dispatch(
            self._pointer,
            self._place,
            ids_TK.data_ptr(),
            rows.data_ptr(),
            address(holders),
            experts,
        )
        return done

    def assigned(self) -> Assigned:
        """Of the last dispatch; the next one writes over it."""
        return assigned(self._out, self._shapes, self._own[0], self.record.experts)

    def combine(self, rows: Tensor, weights_TK: Tensor, out_TH: Tensor) -> int:
        """One of the codes; DONE or OTHERWISE: ``out`` holds the sums; OTHERWISE: some are NaN."""
        done: int = self._return(
            self._pointer,
            rows.data_ptr(),
            weights_TK.data_ptr(),
            out_TH.data_ptr(),
            DTYPES[out_TH.dtype],
            torch.get_num_threads(),
        )
        return done
