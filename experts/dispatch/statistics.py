"""What dispatch moved, beside the least that it could have moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experts.dispatch.assignment import Ints


@dataclass
class DispatchStatistics:
    """Counters of one rank since the last reset.

    Attributes:
        experts_L: of each MoE layer of the model.
        exchanges: layers that were met with the other ranks.
        tokens: that this rank brought, summed over layers.
        pairs: distinct (token, other rank that serves it).
        served: slots that this rank served, for itself and others; the load that is balanced.
        lower_bound_bytes: each pair's row once there and once back.
        bytes_out, bytes_back: rows that this rank sent, of its tokens and of results.
        meta_bytes: ids and sizes that this rank sent.
        seconds: spent waiting for other ranks.
    """

    experts_L: Sequence[int]
    exchanges: int = 0
    tokens: int = 0
    pairs: int = 0
    served: int = 0
    lower_bound_bytes: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    meta_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._loads_LE = np.zeros((len(self.experts_L), max(self.experts_L, default=0)), np.int64)

    def add(
        self,
        layers: range,
        loads_LE: Ints,
        *,
        tokens: int,
        pairs: int,
        served: int,
        sent_bytes: int,
        row_bytes: int,
        meta_bytes: int,
    ) -> None:
        """Tokens have left for successive layers; numbers are of all of these together.

        Args:
            loads_LE: tokens of all ranks that visit each expert.
            tokens, pairs, served: as `Assignment` has them.
            sent_bytes: of their rows.
            row_bytes: of one row of hidden states.
            meta_bytes: of ids.
        """
        self.exchanges += len(layers)
        self.tokens += tokens
        self.pairs += pairs
        self.served += served
        self.lower_bound_bytes += 2 * pairs * row_bytes
        self.bytes_out += sent_bytes
        self.meta_bytes += meta_bytes
        self._loads_LE[layers.start : layers.stop, : loads_LE.shape[1]] += loads_LE

    def take_loads(self) -> Ints:
        """``(L, E)`` tokens of all ranks that visited each expert of each layer since this was last
        called; zeros behind a layer's last expert."""
        taken = self._loads_LE.copy()
        self._loads_LE[:] = 0
        return taken

    def reset(self) -> None:
        self.__init__(self.experts_L)  # type: ignore[misc]

    def as_dict(self) -> dict[str, float]:
        """The counters, for JSON."""
        counters = asdict(self)
        del counters["experts_L"]
        return counters
