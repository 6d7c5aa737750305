"""How soon experts are asked for next, by a compiled library (see foresight.cpp).

Legend: L layers, E experts of the widest, F memories, H hidden, D hidden units of the network.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.all_to_all import address
from kernels.cpu.interface import POINTER, SIZE, Record, declare, integers

Floats = NDArray[np.float32]
Values = NDArray[np.float64]

_SIGNATURES = {
    "moe_hear": (None, (POINTER, SIZE, POINTER, POINTER)),
    "moe_foresee": (None, (POINTER, POINTER, SIZE, SIZE, POINTER, POINTER)),
}
_SIZES = ("layers", "width", "memories", "hidden", "units")
_NUMBERS = ("discount", "correction", "least")
_ARRAYS = (
    *("experts", "keep", "gates", "gate_bias", "shares", "down", "down_bias"),
    *("up_now", "up_before", "up_row", "up_layer"),
    *("means", "said", "scores", "before", "row", "sums", "drift", "soon", "visits"),
)


class _Record(Record, struct="Foresight"):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_double) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    )


class NativeForesight:
    """The arithmetic of `offload.policies.foresight.Foresight`.

    Args:
        experts: of each layer.
        keep: ``(F,)``, of each memory what a visit leaves.
        gates, gate_bias: ``(L, E, H)`` and ``(L, E)``.
        usual: ``(L, E)``, how often each is asked for at first.
        shares: ``(F + 1, L, L)``.
        up, up_bias: ``(2 L E + H + L, D)`` and ``(D,)``.
        down, down_bias: ``(L, E, D)`` and ``(L, E)``.
        discount, correction, least: see `offload.policies.next_use` and `offload.policies.base`.

    Attributes:
        soon: ``(L, E)``, live.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        experts: Sequence[int],
        *,
        keep: Floats,
        gates: Floats,
        gate_bias: Floats,
        usual: Floats,
        shares: Floats,
        up: Floats,
        up_bias: Floats,
        down: Floats,
        down_bias: Floats,
        discount: float,
        correction: float,
        least: float,
    ) -> None:
        declare(library, _SIGNATURES)
        self._hear, self._foresee = library.moe_hear, library.moe_foresee
        (layers, width), hidden, memories = usual.shape, gates.shape[2], len(keep)
        units = layers * width
        now, before, row, layer = np.split(up, np.cumsum([units, units, hidden]))
        means = np.repeat(usual[None], memories, 0)
        kept = np.clip(means, np.float32(least), np.float32(1 - least))
        self.soon = usual.copy()
        given = {
            **{"keep": keep, "gates": gates.swapaxes(1, 2), "gate_bias": gate_bias},
            **{"shares": shares, "down": down.swapaxes(1, 2), "down_bias": down_bias},
            **{"up_now": now, "up_before": before, "up_row": row, "up_layer": layer},
        }
        self._held = {  # the record points to them
            "experts": np.array(experts, np.int64),
            **{name: np.ascontiguousarray(array) for name, array in given.items()},
            **{"means": means, "said": np.log(kept / (1 - kept))},
            **{name: np.zeros_like(usual) for name in ("scores", "before", "drift")},
            **{"row": np.zeros(hidden, np.float32), "sums": up_bias.copy()},
            **{"soon": self.soon, "visits": np.zeros(layers, np.int64)},
        }
        sizes = layers, width, memories, hidden, len(up_bias)
        self._record = _Record(
            *sizes, discount, correction, least,
            **{name: address(self._held[name]) for name in _ARRAYS},
        )  # fmt: skip
        self._place = ctypes.addressof(self._record)

    def hear(self, layer: int, row: Floats, scores: Floats | None) -> None:
        """A router has read a row ``(H,)``, to which it gave these ``(E,)``; None: find them."""
        found = None if scores is None else np.ascontiguousarray(scores, np.float32)
        row = np.ascontiguousarray(row, np.float32)
        self._hear(self._place, layer, address(row), None if found is None else address(found))

    def foresee(
        self,
        news: Sequence[tuple[int, Sequence[int]]],
        learning: Values,
        discounts: Values,
        *,
        whole: bool,
    ) -> None:
        """Take in visits, the last of which was just now, and make `soon` new.

        Args:
            news: layers, and the experts they ask for; at least one visit.
            learning: ``(L * E,)``, what units are worth by who learns on the way.
            discounts: ``(L,)``, what of this is due to when their layers come.
            whole: of all layers, not only of those that have been.
        """
        told: list[int] = []
        for layer, experts in news:
            told += (layer, len(experts), *experts)
        numbers = integers(told)
        self._foresee(
            self._place, ctypes.addressof(numbers), len(news), whole,
            address(learning), address(discounts),
        )  # fmt: skip
