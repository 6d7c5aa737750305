"""What a rank computes in a step: its own sequences, and experts for everybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from experts.dispatch import AllToAllDispatcher, ExchangeError
from experts.placement import Placement, first_placement, slots_for, without_ranks
from experts.placement.placement import Ints
from experts.placement.rebalance import Rebalancer
from moe.moe_layer import MoELayers
from moe.parallel.arrivals import Arrivals
from moe.parallel.group import WatchedExchange
from moe.parallel.mirror import Mirror
from moe.parallel.watch import Pulse
from moe.parallel.wire import Message
from moe.settings import ParallelSettings
from offload.experts import OffloadedExperts
from offload.offloaded import Offloaded


class Station:
    """The computing side of a rank.

    Args:
        experts: MoE layers of the model.
        new_mirror: makes the sequences' side, one for each engine of rank 0.
        settings: of the profile.
        pulse: of this process.
        offloaded: experts that are read when they are needed; None where all are in memory.

    Attributes:
        placements: of each MoE layer, in the present group.
        dispatcher: the way to experts of other ranks; None for a rank that is alone.
    """

    def __init__(
        self,
        experts: MoELayers,
        new_mirror: Callable[[], Mirror],
        settings: ParallelSettings,
        pulse: Pulse,
        offloaded: Offloaded | None = None,
    ) -> None:
        self._experts, self._new_mirror = experts, new_mirror
        self._offloaded = offloaded
        self._settings, self._pulse = settings, pulse
        self._mirrors: dict[int, Mirror] = {}
        self._exchange: WatchedExchange | None = None
        self.placements: list[Placement] = []
        self.dispatcher: AllToAllDispatcher | None = None

    @property
    def num_layers(self) -> int:
        return len(self._experts.layers)

    def placed(self, before: Sequence[int], now: Sequence[int]) -> list[Placement]:
        """Placements for these ranks.

        Args:
            before: of the present group; none where there is none yet.
            now: of the next one, all of them among those before.
        """
        layers, settings, ranks = self._experts.layers, self._settings, len(now)
        kind, copies = settings.placement, settings.replicas
        if not before:
            return [first_placement(kind, layer.num_experts, ranks, copies) for layer in layers]
        lost = {before.index(rank) for rank in before if rank not in now}
        return [
            without_ranks(old, lost, slots_for(old.num_experts, ranks, copies))
            for old in self.placements
        ]

    def join(self, exchange: WatchedExchange | None, placements: Sequence[Placement]) -> None:
        """Take part in a new group, with no sequences; without an exchange, alone."""
        self._mirrors.clear()
        self._leave()
        self.placements, self._exchange = list(placements), exchange
        if exchange is not None:
            self._hold(exchange.rank, dict(enumerate(placements)))
            self.dispatcher = AllToAllDispatcher(
                exchange,
                placements,
                combine=self._settings.combine,
                payload=self._settings.payload,
                buffer_rows=self._settings.buffer_rows,
            )

    def step(self, message: Message) -> Message:
        """Compute this rank's part of a step. Raises `ExchangeError` if a rank is lost in it."""
        self._pulse.now("computing")
        for engine in message["ended_engines"]:
            self._mirrors.pop(engine, None)
        if message["reset"] and self.dispatcher is not None:
            self.dispatcher.statistics.reset()
        mirror = self._mirror(message)
        if message["moves"] is not None:
            self._place(message["moves"])
        local = self._experts.dispatcher
        if self.dispatcher is not None:
            self._experts.dispatcher = self.dispatcher
        try:
            with self._experts.lockstep(range(*message["layers"])):
                reply = mirror.run(message["order"], message["halves"])
        except ExchangeError:
            self._leave()
            raise
        finally:
            self._experts.dispatcher = local
            self._pulse.now("idle")
        if self.dispatcher is not None:
            reply["traffic"] = self.dispatcher.statistics.as_dict()
        return reply

    def rebalancer(self, arrivals: Arrivals | None) -> Rebalancer:
        """What changes the placements of this group where that pays."""
        offloaded, seconds_LE = self._offloaded, []
        for index, layer in enumerate(self._experts.layers):
            read = offloaded.read_seconds(index) if offloaded else np.zeros(layer.num_experts)
            seconds_LE.append(np.asarray(read))
        return Rebalancer(
            self.placements,
            seconds_LE=seconds_LE,
            missing=offloaded.miss_ratio if offloaded else None,
            horizon_s=self._settings.rebalance_horizon_s,
            foreseen=None if arrivals is None else arrivals.of_layer,
        )

    def take_loads(self) -> Ints | None:
        """``(L, E)`` tokens of each expert of each layer on all ranks in the last step; None for a
        rank that is alone."""
        return None if self.dispatcher is None else self.dispatcher.statistics.take_loads()

    def prepare(self, message: Message) -> None:
        """Free what an engine has given up, without a step."""
        self._mirror(message).rest(message["order"])

    def _leave(self) -> None:
        """Let nobody wait for this rank any more."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self.dispatcher = None

    def _hold(self, rank: int, placements: Mapping[int, Placement]) -> None:
        """Read this rank's share of the experts of some layers, as far as there is room. To the
        cache, what it does not know is worth less than what others serve now: that has to go."""
        for index, placement in placements.items():
            layer = self._experts.layers[index]
            if isinstance(layer, OffloadedExperts):
                mine_E = placement.copies_ER[:, rank] > 0
                layer.cache.drop((index, int(expert)) for expert in np.flatnonzero(~mine_E))
                layer.cache.warm((index, int(expert)) for expert in np.flatnonzero(mine_E))

    def _mirror(self, message: Message) -> Mirror:
        engine = message["engine"]
        if engine not in self._mirrors:
            self._mirrors[engine] = self._new_mirror()
        return self._mirrors[engine]

    def _place(self, moves: Message) -> None:
        assert self.dispatcher is not None
        assert self._exchange is not None
        changed = {
            int(layer): replace(self.placements[int(layer)], experts_P=tuple(experts_P))
            for layer, experts_P in moves["placements"].items()
        }
        self.dispatcher.place(moves["epoch"], changed)
        self.placements = self.dispatcher.placements
        self._hold(self._exchange.rank, changed)
