"""Learns for a cache of experts from what is asked for, by a compiled library (see learning.cpp).

Legend: L layers, E experts of the widest, M memories, H heads, R layers looked back to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.all_to_all import address
from kernels.cpu.interface import POINTER, SIZE, Record, declare, integers

Floats = NDArray[np.float64]

_SIGNATURES = {"moe_learn": (None, (POINTER, POINTER, SIZE, SIZE, POINTER))}
_SIZES = ("layers", "width", "memories", "heads", "reach", "depth")
_STEPS = ("cycle", "rate_step", "transition_step", "forget", "margin")
_ARRAYS = (
    *("keep", "discounts", "shares", "memory", "rates", "odds", "tails", "worth", "losses"),
    *("transitions", "parts", "visits", "call_of", "count_of", "asked_of"),
)


class _LearnerRecord(Record, struct="Learner"):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_double) for name in _STEPS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    )


class NativeLearner:
    """Learns rates and transitions, and values units by them; see `offload.policies`.

    Args:
        discounts: ``(L, L)``, what a use is worth of each layer's units where one has just been.
        width: E.
        keep: ``(M,)``, of each memory what a visit leaves.
        shares: ``(M,)``, that each has in the rates at first.
        first: rate of all units at first.
        cycle: what a use is worth that comes a pass later.
        heads: H.
        reach: R; 0 for rates alone.
        rate_step, transition_step, forget: weight of a visit in shares, transitions and losses.
        margin: by which transitions must have predicted better than rates to be used.

    Attributes:
        tails: ``(L, E)``, live: what uses at the usual rates are worth.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        discounts: Floats,
        width: int,
        *,
        keep: Sequence[float],
        shares: Sequence[float],
        first: float,
        cycle: float,
        heads: int,
        reach: int,
        rate_step: float,
        transition_step: float,
        forget: float,
        margin: float,
    ) -> None:
        declare(library, _SIGNATURES)
        self._call, layers = library.moe_learn, len(discounts)
        units, depth = (layers, width), heads + 2
        self.tails = np.full(units, first / (1 - (1 - first) * cycle))
        self._values = np.empty(layers * width)
        self._held: dict[str, NDArray[Any]] = {  # the record points to them
            "keep": np.array(keep),
            "discounts": np.ascontiguousarray(discounts),
            "shares": np.array(shares),
            "memory": np.full((layers, len(keep), width), first),
            "rates": np.full((heads, *units), first),
            "odds": np.full((heads, *units), np.log(first / (1 - first))),
            "tails": self.tails,
            "worth": self.tails.copy(),
            "losses": np.zeros((heads, 2)),
            "transitions": np.zeros((layers, width, heads, reach, width), np.float32),
            "parts": np.zeros((heads, layers, reach, width), np.float32),
            "visits": np.zeros(layers, np.int64),
            "call_of": np.zeros((layers, depth), np.int64),
            "count_of": np.zeros((layers, depth), np.int64),
            "asked_of": np.zeros((layers, depth, width), np.int64),
        }
        sizes = layers, width, len(keep), heads, reach, depth
        steps = cycle, rate_step, transition_step, forget, margin
        self._record = _LearnerRecord(
            *sizes, *steps, **{name: address(array) for name, array in self._held.items()}
        )
        self._places = ctypes.addressof(self._record), address(self._values)

    def learn(self, news: Sequence[tuple[int, Sequence[int], Sequence[int]]], layer: int) -> Floats:
        """Learn from calls, then return what all units are worth behind a call of ``layer``.

        Args:
            news: of each call its number, how many calls before it each head is to foretell it, and
                the units asked for: ascending, of one layer.

        Returns:
            ``(L * E,)``; the next call writes over it.
        """
        told: list[int] = []
        for call, ahead, units in news:
            told += (call, *ahead, len(units), *units)
        numbers = integers(told)
        record, values = self._places
        self._call(record, ctypes.addressof(numbers), len(news), layer, values)
        return self._values
