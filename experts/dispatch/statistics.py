"""What dispatch moved, beside the least that it could have moved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from experts.dispatch.assignment import Ints


@dataclass
class DispatchStatistics:
    """Counters of one rank since the last reset.

    Attributes:
        layers: MoE layers of the model.
        exchanges: layers that were met with the other ranks.
        tokens: that this rank brought, summed over layers.
        pairs: distinct (token, other rank that serves it).
        served: slots that this rank served, for itself and others; the load that is balanced.
        lower_bound_bytes: each pair's row once there and once back.
        bytes_out, bytes_back: rows that this rank sent, of its tokens and of results.
        meta_bytes: ids and sizes that this rank sent.
        seconds: spent waiting for other ranks.
    """

    layers: int
    exchanges: int = 0
    tokens: int = 0
    pairs: int = 0
    served: int = 0
    lower_bound_bytes: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    meta_bytes: int = 0
    seconds: float = 0.0
    _loads: dict[int, Ints] = field(default_factory=dict, repr=False)

    def add(
        self,
        layer: int,
        loads_E: Ints,
        tokens: int,
        pairs: int,
        served: int,
        sent_bytes: int,
        row_bytes: int,
        meta_bytes: int,
    ) -> None:
        """Tokens have left for a layer.

        Args:
            loads_E, tokens, pairs, served: as `Assignment` has them.
            sent_bytes: of their rows.
            row_bytes: of one row of hidden states.
            meta_bytes: of ids.
        """
        self.exchanges += 1
        self.tokens += tokens
        self.pairs += pairs
        self.served += served
        self.lower_bound_bytes += 2 * pairs * row_bytes
        self.bytes_out += sent_bytes
        self.meta_bytes += meta_bytes
        seen = self._loads.get(layer)
        self._loads[layer] = loads_E.copy() if seen is None else seen + loads_E

    def take_loads(self) -> list[Ints | None]:
        """Tokens of all ranks that visited each expert of each layer since this was last called."""
        taken, self._loads = self._loads, {}
        return [taken.get(layer) for layer in range(self.layers)]

    def reset(self) -> None:
        self.__init__(self.layers)  # type: ignore[misc]

    def as_dict(self) -> dict[str, float]:
        """The counters, for JSON."""
        counters = asdict(self)
        del counters["layers"], counters["_loads"]
        return counters
