"""Expert parallelism on one machine by the compiled library: who serves what, dispatch and combine.

`NativeAssign` chooses the rank that serves each slot (kernels/cpu/assign.cpp). `NativeAllToAll`
exchanges rows and results with the other ranks over sockets (kernels/cpu/all_to_all.h), as long as
all ranks bring what they brought to the step before.

Legend: R ranks, T tokens of all ranks, K slots, E experts, W bytes of a row, H hidden, L layers,
A slots that this rank serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.interface import (
    DTYPES,
    NUMBER,
    POINTER,
    SIZE,
    Record,
    declare,
    doubles,
    pointers,
    sizes,
)

Ids = NDArray[np.int16]
Ints = NDArray[np.int64]
Shapes = Sequence[tuple[int, ...]]

LOST, BAD_ID, DONE, OTHERWISE = -2, -1, 0, 1
"""Results of a call: a rank is lost; an id is no expert; done; for the last see each function."""
_SIGNATURES = {
    "moe_dispatch": (NUMBER, (POINTER, SIZE, POINTER, POINTER)),
    "moe_return": (NUMBER, (*(POINTER,) * 4, NUMBER, NUMBER)),
}
_SIZES = ("ranks", "rank", "slots", "width", "hidden", "timeout_ms", "rows_at", "epoch")
_ARRAYS = (
    *("files", "tokens", "slots_R", "message_bytes", "messages", "heads", "layers"),
    *("served", "returned", "results", "ones", "chosen"),
)


class Assigned(NamedTuple):
    """The fields of `experts.dispatch.assignment.Assignment` and of its `slots`."""

    loads_E: Ints
    ids_TK: Ints
    serving_TK: Ints
    token_A: Ints
    experts_A: Ints
    served_R: list[int]
    returned_R: list[int]
    position_TK: NDArray[np.int32]
    pairs: int


class NativeAssign:
    """The choice of ranks: which slots this rank serves, and where its own slots are served."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, {"moe_assign": (NUMBER, (*(POINTER,) * 4, *(SIZE,) * 4, POINTER))})
        self._call = library.moe_assign

    def __call__(self, tables: Sequence[Ids], rank: int, holders: Ints, experts: int) -> Assigned:
        """The part of one rank.

        Args:
            tables: contiguous ``(tokens, slots)`` ids of each rank, -1 for unused slots.
            holders: as `experts.placement.Placement.holders`.
            experts: E.

        Raises:
            IndexError: an id outside [-1, E).
        """
        shapes, ranks = [table.shape for table in tables], len(tables)
        out = np.empty(_total_size(shapes, shapes[rank][0], experts), np.int64)
        done = self._call(
            (POINTER * ranks)(*[address(table) for table in tables]),
            (SIZE * ranks)(*[tokens for tokens, _ in shapes]),
            (SIZE * ranks)(*[slots for _, slots in shapes]),
            address(holders),
            ranks,
            max(slots for _, slots in shapes),
            experts,
            rank,
            address(out),
        )
        if done:
            raise bad_id(experts)
        return _read_assigned(out, shapes, shapes[rank][0], experts)


class _AllToAllRecord(Record, struct="AllToAll"):
    _fields_ = (
        *sizes(*_SIZES),
        *pointers(*_ARRAYS),
        *sizes("layer", "had", "lost", "error"),
        *doubles("seconds"),
    )


class _AllToAllLayerRecord(Record, struct="AllToAllLayer"):
    _fields_ = (
        *pointers("holders"),
        *sizes("experts"),
        *pointers("assigned"),
    )


class Counted(NamedTuple):
    """The counts of `moe_assign` in several layers.

    Attributes:
        loads_LE: tokens of each expert on all ranks; zeros after a layer's last expert.
        pairs, served: the sums over the layers of `experts.dispatch.assignment.Assignment`'s.
        sent_back: how many of the served slots' results go to other ranks.
    """

    loads_LE: Ints
    pairs: int
    served: int
    sent_back: int


class NativeAllToAll:
    """Dispatch and combine between ranks whose shapes are those of the step before.

    Args:
        files: descriptors of the sockets to all ranks; this rank's own is not used.
        heads: ``(R, 40)`` bytes, the header that each rank is expected to send.
        shapes: ``(tokens, slots)`` of each rank.
        width: W.
        rows_at: offset of the rows in a message: place, header, ids in 16 bits, rows.
        message_bytes: size of each rank's message.
        hidden: H.
        epoch: the placements' version.
        layers: ``(holders, E)`` of each MoE layer, as in `experts.placement.Placement`.

    Attributes:
        own_tokens: tokens of this rank.
        width: W.
        address: of the C++ record, for compiled callers that exchange at every layer themselves.
        messages: what the ranks sent in the last dispatch.
        served: ``(T K, W)`` bytes of the rows that this rank serves, in the order of its slots.
        returned: ``(own T K, H)`` float32 results of other ranks.
        ones: ``(T K, 1)`` weights of 1.
        record: after LOST, ``lost`` is the lost rank and ``error`` the errno.
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
        epoch: int,
        layers: Sequence[tuple[Ints, int]],
    ) -> None:
        declare(library, _SIGNATURES)
        self._dispatch, self._return = library.moe_dispatch, library.moe_return
        self._shapes, self.width = list(shapes), width
        self.own_tokens = shapes[rank][0]
        self._slots = max(slots for _, slots in shapes)
        self.messages = [np.zeros(size, np.uint8) for size in message_bytes]
        most = sum(tokens for tokens, _ in shapes) * self._slots
        self.served = torch.empty(most, width, dtype=torch.uint8)
        self.returned = torch.empty(self.own_tokens * self._slots, hidden, dtype=torch.float32)
        self._chosen = torch.empty(most, dtype=torch.int64)
        self._results = torch.empty(most, hidden, dtype=torch.float32)
        self.ones = torch.ones(most, 1)
        self._experts = [experts for _, experts in layers]
        most_numbers = _total_size(shapes, self.own_tokens, max(self._experts, default=0))
        self._out_LN = np.zeros((len(layers), most_numbers), np.int64)
        self._rank, self._at = rank, _counts_offset(shapes)
        records = [
            _AllToAllLayerRecord(address(holders), experts, address(out))
            for (holders, experts), out in zip(layers, self._out_LN, strict=True)
        ]
        self._layers = (_AllToAllLayerRecord * len(records))(*records)
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
        timeout_ms = int(timeout_s * 1000)
        own_sizes = len(files), rank, self._slots, width, hidden, timeout_ms, rows_at, epoch
        self._held = held, layers  # the record points to them
        self.record = _AllToAllRecord(
            **dict(zip(_SIZES, own_sizes, strict=True)),
            **{name: address(array) for name, array in held.items()},
            layers=ctypes.addressof(self._layers),
            served=self.served.data_ptr(),
            returned=self.returned.data_ptr(),
            results=self._results.data_ptr(),
            ones=self.ones.data_ptr(),
            chosen=self._chosen.data_ptr(),
            lost=-1,
        )
        self.address = ctypes.addressof(self.record)

    def dispatch(self, layer: int, ids_TK: Tensor, rows: Tensor) -> int:
        """Exchange ids and rows; returns a code. After DONE, `assigned` and `served` are filled.

        OTHERWISE: a rank is at another layer or has other shapes, see `messages`.

        Args:
            ids_TK, rows: contiguous, of the shapes given to the constructor.
        """
        done: int = self._dispatch(self.address, layer, ids_TK.data_ptr(), rows.data_ptr())
        return done

    def assigned(self, layer: int) -> Assigned:
        """The last dispatch of a layer; the next one overwrites it."""
        return _read_assigned(
            self._out_LN[layer], self._shapes, self.own_tokens, self._experts[layer]
        )

    def counted(self, layers: range) -> Counted:
        """Counts of the last dispatches of successive layers."""
        out_LN, ranks, at = self._out_LN[layers.start : layers.stop], len(self._shapes), self._at
        counts_N = out_LN[:, at : at + 2 * ranks + 2].sum(0).tolist()
        served = counts_N[-1]
        loads_LE = out_LN[:, _loads_offset(self._shapes, self.own_tokens) :]
        return Counted(loads_LE, counts_N[-2], served, served - counts_N[self._rank])

    def experts(self, layers: range) -> list[list[int]]:
        """Experts that this rank served in the last dispatches of successive layers, ascending."""
        out_LN, at = self._out_LN[layers.start : layers.stop], self._at
        size, served_L = at // 4, out_LN[:, at + 2 * len(self._shapes) + 1]
        layer, slot = np.nonzero(np.arange(size) < served_L[:, None])
        found_LE = np.zeros((len(layers), max(self._experts)), bool)
        found_LE[layer, out_LN[layer, 3 * size + slot]] = True
        return [np.flatnonzero(found_E).tolist() for found_E in found_LE]

    def combine(self, rows: Tensor, weights_TK: Tensor, out_TH: Tensor) -> int:
        """Send results back, and sum this rank's own; returns a code. DONE or OTHERWISE: ``out_TH``
        holds the sums, after OTHERWISE some of them NaN."""
        done: int = self._return(
            self.address,
            rows.data_ptr(),
            weights_TK.data_ptr(),
            out_TH.data_ptr(),
            DTYPES[out_TH.dtype],
            torch.get_num_threads(),
        )
        return done


def _total_size(shapes: Shapes, own: int, experts: int) -> int:
    """Integers that `moe_assign` writes; `shapes` are all ranks', `own` this rank's tokens."""
    return _loads_offset(shapes, own) + experts


def _loads_offset(shapes: Shapes, own: int) -> int:
    """Return the begin of `Assigned.loads_E` in them; it is the last part."""
    size, slots = _size(shapes)
    return 4 * size + 2 * len(shapes) + 2 + (own * slots + 1) // 2


def _counts_offset(shapes: Shapes) -> int:
    """Return the begin of the counts in them: `served_R`, `returned_R`, pairs and A."""
    return 4 * _size(shapes)[0]


def _read_assigned(out: Ints, shapes: Shapes, own: int, experts: int) -> Assigned:
    """The parts of what `moe_assign` wrote to ``out``."""
    (size, slots), ranks, at = _size(shapes), len(shapes), _counts_offset(shapes)
    ends, loads = at + 2 * ranks + 2, _loads_offset(shapes, own)
    *told, pairs, served = out[at:ends].tolist()
    ids_TK, serving_TK = out[: 2 * size].reshape(2, -1, slots)
    return Assigned(
        loads_E=out[loads : loads + experts],
        ids_TK=ids_TK,
        serving_TK=serving_TK,
        token_A=out[2 * size : 2 * size + served],
        experts_A=out[3 * size : 3 * size + served],
        served_R=told[:ranks],
        returned_R=told[ranks:],
        position_TK=out[ends:loads].view(np.int32)[: own * slots].reshape(-1, slots),
        pairs=pairs,
    )


def _size(shapes: Shapes) -> tuple[int, int]:
    """T K and K, of all ranks together."""
    slots = max(slots for _, slots in shapes)
    return sum(tokens for tokens, _ in shapes) * slots, slots


def bad_id(experts: int) -> IndexError:
    return IndexError(f"an expert id is outside [-1, {experts})")


def address(array: NDArray[Any]) -> int:
    """Address of the array's first element; `array.ctypes.data` takes three times as long."""
    found: int = array.__array_interface__["data"][0]
    return found
