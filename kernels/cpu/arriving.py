"""A layer whose experts come while it is computed, by a compiled library (see arriving.cpp).

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, get_num_threads

from kernels.cpu.calls import NUMBER, POINTER, check_done, declare, integers
from kernels.cpu.layer import LayerCall
from kernels.cpu.reading import NativeReads, ReadJob
from kernels.reference import AnyExperts

_DONE, _FAILED, _LATER = 1, 2, 3


class _Record(ctypes.Structure):
    """`ArrivingCall` of arriving.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("forward", "layer", "activation")),
        *((name, POINTER) for name in ("hidden", "ids", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots", "width")),
        ("coming", POINTER),
        ("count", ctypes.c_int64),
        ("reader", POINTER),
        *((name, ctypes.c_double) for name in ("patience", "waited")),
        *((name, ctypes.c_int64) for name in ("begun", "waves")),
        ("threads", NUMBER),
    )


class Rows(NamedTuple):
    """Addresses and sizes of what a layer is called with: float32, int64, float32; ``out`` is
    ``(T, H)`` float32, to be filled."""

    hidden_TH: int
    ids_TK: int
    weights_TK: int
    out_TH: int
    tokens: int
    slots: int
    width: int
    kept: object

    @classmethod
    def of(cls, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> Rows:
        hidden_TH, ids_TK, weights_TK = (x.contiguous() for x in (hidden_TH, ids_TK, weights_TK))
        return cls(
            hidden_TH.data_ptr(),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            out_TH.data_ptr(),
            tokens=ids_TK.shape[0],
            slots=ids_TK.shape[1],
            width=hidden_TH.shape[1],
            kept=(hidden_TH, ids_TK, weights_TK, out_TH),
        )


class ArrivingCall:
    """One call of a layer, which fills the rows' ``out`` if it comes to the end.

    Args:
        how: what runs the layer, of ``experts``.
        coming: all experts of the ids, ascending, with their slots among ``experts``, and what
            brings them where they are not there yet.
        reads: whoever serves these.
        patience: seconds that `run` waits for one of them.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        how: LayerCall,
        experts: AnyExperts,
        rows: Rows,
        coming: Sequence[tuple[int, int, ReadJob | None]],
        reads: NativeReads | None,
        patience: float,
    ) -> None:
        numbers: list[int] = []
        for expert, slot, job in coming:
            numbers += (expert, slot, 0 if job is None else ctypes.addressof(job))
        told = integers(numbers)
        self._kept: Any = how.kept, rows.kept, coming, told
        self._experts, self._call = experts, library.moe_forward_arriving
        self._record = _Record(
            *(how.forward, how.layer, how.activation),
            *rows[:-1],
            *(ctypes.addressof(told), len(coming), None if reads is None else reads.reader),
            *(patience, 0.0, 0, 0, get_num_threads()),
        )

    def run(self) -> int | None:
        """Compute; None at the end, else which of the experts has failed or is late. When it has
        come, this goes on from there."""
        said = self._call(ctypes.addressof(self._record))
        if said in (_FAILED, _LATER):
            return int(self._record.begun)
        check_done(said, self._experts)
        return None

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return float(self._record.waited)

    @property
    def waves(self) -> int:
        """Runs of experts that were there together."""
        return int(self._record.waves)


def declare_arriving(library: ctypes.CDLL) -> None:
    """Tell ctypes of the function."""
    declare(library, {"moe_forward_arriving": (NUMBER, (POINTER,))})
