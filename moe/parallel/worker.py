"""Computes a rank's part of a step, and obeys the coordinator.

Every rank has a `RankWorker`, which computes the rank's own sequences and serves its share of the
experts to all ranks. The coordinator calls the one of rank 0 directly. On any other rank a
`WorkerLoop` receives orders over a `CoordinatorLink` and passes them to the `RankWorker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.distributed import Store

from experts.dispatch import (
    AllToAllDispatcher,
    DeviceDispatcher,
    ExchangeError,
    RankDispatcher,
    RowKind,
)
from experts.placement import Placement, first_placement, slots_for, without_ranks
from experts.placement.placement import Ints
from experts.placement.rebalance import Rebalancer
from kernels.cpu import choose_kernel
from moe.errors import LaunchError, ProfileError, RankLostError
from moe.hooks import Hook
from moe.network.moe_layer import MoELayers
from moe.parallel.expected_load import ExpectedLoad
from moe.parallel.group import RankExchanges, form_group, leave_group
from moe.parallel.membership import CONTROL, WATCH, Membership, wake_member
from moe.parallel.remote import EngineMirror
from moe.parallel.transport import Message, WireError
from moe.parallel.watchdog import Heartbeat, Watchdog, exit_now
from moe.settings import ParallelSettings
from offload.layer import OffloadedExperts
from offload.offloaded import Offloaded

MakeDispatcher = Callable[
    [RankExchanges, Sequence[Placement], ParallelSettings, RowKind],
    tuple[DeviceDispatcher | None, str],
]
"""Makes a method's dispatcher for rows on devices, collectively; None: it cannot, with the reason.
A dispatcher of ours with a reason may come in its place."""
DISPATCHER = Hook[MakeDispatcher]("dispatcher")


class RankWorker:
    """The computing side of a rank; alone until `form` or `join` puts it into a group.

    Args:
        rank: of this process, as the launch counts.
        store: where process groups meet; None if none will be formed.
        experts: MoE layers of the model.
        new_mirror: makes the sequences' side, one for each engine of rank 0.
        settings: of the profile.
        heartbeat: of this process.
        offloaded: experts that are read when they are needed; None if all are in memory.
        on_cuda: the model runs on a CUDA device.
        rows: of the model, where a method may carry them; None: nowhere.
        carry: makes the method's dispatcher; None: no method is on.

    Attributes:
        placements: of each MoE layer, in the present group.
        dispatcher: the way to experts of other ranks; None for a rank that is alone.
    """

    def __init__(
        self,
        rank: int,
        store: Store | None,
        experts: MoELayers,
        new_mirror: Callable[[], EngineMirror],
        settings: ParallelSettings,
        heartbeat: Heartbeat,
        offloaded: Offloaded | None = None,
        *,
        on_cuda: bool = False,
        rows: RowKind | None = None,
        carry: MakeDispatcher | None = None,
    ) -> None:
        self._rank, self._store, self._on_cuda = rank, store, on_cuda
        self._rows, self._carry = rows, carry
        self._experts, self._new_mirror = experts, new_mirror
        self._offloaded = offloaded
        self._settings, self._heartbeat = settings, heartbeat
        self._mirrors: dict[int, EngineMirror] = {}
        self._exchanges: RankExchanges | None = None
        self.placements: list[Placement] = []
        self.dispatcher: RankDispatcher[Any] | None = None
        self._why_ours = ""

    @property
    def visits(self) -> Sequence[int]:
        """See `MoELayers`."""
        return self._experts.visits

    def next_placements(self, before: Sequence[int], now: Sequence[int]) -> list[Placement]:
        """Placements for a new group.

        Args:
            before: ranks of the present group; empty if there is none yet.
            now: ranks of the next group, all of them among those before.
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

    def form(self, order: Message) -> None:
        """Form the group that an order describes, together with its other ranks.

        Raises:
            LaunchError: the ranks cannot reach each other.
        """
        ranks, exchanges = order["ranks"], None
        if len(ranks) > 1:
            assert self._store is not None
            exchanges = form_group(
                self._store,
                order["epoch"],
                ranks,
                self._rank,
                self._settings.timeout_s,
                self._heartbeat,
                on_cuda=self._on_cuda,
            )
        placements = [
            Placement(tuple(experts_P), num_experts, size)
            for experts_P, num_experts, size in order["placements"]
        ]
        self.join(exchanges, placements)

    def join(self, exchanges: RankExchanges | None, placements: Sequence[Placement]) -> None:
        """Take part in a new group, with no sequences; without exchanges, alone."""
        self._mirrors.clear()
        self._leave()
        self.placements, self._exchanges = list(placements), exchanges
        for layer in self._experts.layers:
            if isinstance(layer, OffloadedExperts):
                layer.serve_only(None)
        if exchanges is not None:
            self._load_share(exchanges.host.rank, dict(enumerate(placements)))
            how = exchanges, placements, self._settings, self._rows, self._carry
            self.dispatcher, self._why_ours = new_dispatcher(*how)
            self._heartbeat.now("idle")

    def step(self, message: Message) -> Message:
        """Compute this rank's part of a step. Raises `ExchangeError` if a rank is lost in it."""
        self._heartbeat.now("computing")
        for engine in message["ended_engines"]:
            self._mirrors.pop(engine, None)
        if message["reset"] and self.dispatcher is not None:
            self.dispatcher.statistics.reset()
        mirror = self._mirror_of(message["engine"])
        if message["moves"] is not None:
            self._apply_moves(message["moves"])
        visits = self._experts.visits[slice(*message["visits"])]
        try:
            with self._experts.lockstep(visits, self.dispatcher):
                reply = mirror.run(message["order"])
        except ExchangeError:
            self._leave()
            raise
        finally:
            self._heartbeat.now("idle")
        if self.dispatcher is not None:
            reply["traffic"] = self.dispatcher.statistics.as_dict()
        return reply

    def release(self, message: Message) -> None:
        """Free what an engine has given up, without a step."""
        self._mirror_of(message["engine"]).release(message["order"])

    def rebalancer(self, expected_load: ExpectedLoad | None) -> Rebalancer:
        """Moves experts between the ranks of this group, if that saves time."""
        offloaded, seconds_LE = self._offloaded, []
        for index, layer in enumerate(self._experts.layers):
            read = offloaded.read_seconds(index) if offloaded else np.zeros(layer.num_experts)
            seconds_LE.append(np.asarray(read))
        return Rebalancer(
            self.placements,
            seconds_LE=seconds_LE,
            missing=offloaded.miss_ratio if offloaded else None,
            horizon_s=self._settings.rebalance_horizon_s,
            token_loads=None if expected_load is None else expected_load.of_layer,
        )

    def dispatch_status(self) -> dict[str, str]:
        """Return how rows reach other ranks, for JSON; from any thread."""
        name = "local" if self.dispatcher is None else self.dispatcher.name
        return {"name": name, "why_no_method": self._why_ours}

    def take_loads(self) -> Ints | None:
        """``(L, E)`` tokens of each expert of each layer on all ranks in the last step; None for a
        rank that is alone."""
        return None if self.dispatcher is None else self.dispatcher.statistics.take_loads()

    def _leave(self) -> None:
        """Close the exchanges, so that no other rank waits for this one."""
        if self._exchanges is not None:
            self._exchanges.close()
        self._exchanges = self.dispatcher = None

    def _load_share(self, rank: int, placements: Mapping[int, Placement]) -> None:
        """Read this rank's experts of some layers into the cache, as far as there is room.

        First drop the others from the cache: an expert that it has not seen yet would not displace
        one that it knows, even if another rank serves that one now.
        """
        for index, placement in placements.items():
            layer = self._experts.layers[index]
            if isinstance(layer, OffloadedExperts):
                mine_E = placement.copies_ER[:, rank] > 0
                layer.serve_only(np.flatnonzero(mine_E).tolist())
                layer.cache.drop((index, int(expert)) for expert in np.flatnonzero(~mine_E))
                layer.cache.warm((index, int(expert)) for expert in np.flatnonzero(mine_E))

    def _mirror_of(self, engine: int) -> EngineMirror:
        if engine not in self._mirrors:
            self._mirrors[engine] = self._new_mirror()
        return self._mirrors[engine]

    def _apply_moves(self, moves: Message) -> None:
        assert self.dispatcher is not None
        assert self._exchanges is not None
        changed = {
            int(layer): replace(self.placements[int(layer)], experts_P=tuple(experts_P))
            for layer, experts_P in moves["placements"].items()
        }
        self.dispatcher.apply_placements(moves["epoch"], changed)
        self.placements = self.dispatcher.placements
        self._load_share(self._exchanges.host.rank, changed)


def new_dispatcher(
    exchanges: RankExchanges,
    placements: Sequence[Placement],
    settings: ParallelSettings,
    rows: RowKind | None = None,
    carry: MakeDispatcher | None = None,
) -> tuple[RankDispatcher[Any], str]:
    """The way to experts of other ranks, for rows where the exchanges carry them; and why a method
    that is on does not carry those of prompts.

    Args:
        rows, carry: see `RankWorker`.
    """
    kernels, why = choose_kernel()
    if kernels is None:
        raise ProfileError(
            f"parallel.enabled: true needs the compiled CPU kernels: {why}; install a C++ "
            "compiler, or set parallel.enabled: false"
        )
    how: dict[str, Any] = {"payload": settings.payload, "buffer_rows": settings.buffer_rows}
    combine, device, host = settings.combine, exchanges.device, exchanges.host
    if device is None:
        how["combine"] = "exact" if combine == "auto" else combine
        return AllToAllDispatcher(host, placements, **how), ""
    how["combine"] = "summed" if combine == "auto" else combine
    made, why_not = None, ""
    if rows is not None and carry is not None:
        made, why_not = carry(exchanges, placements, settings, rows)
    return made or DeviceDispatcher(device, host, placements, **how), why_not


class WorkerLoop:
    """Any rank but the first, with its model: does what the coordinator orders.

    Args:
        link: to the coordinator.
        worker: what this rank computes.
        kv_tokens: tokens of keys and values that this rank has room for.
    """

    def __init__(self, link: CoordinatorLink, worker: RankWorker, kv_tokens: int) -> None:
        self.link, self.worker = link, worker
        self._kv_tokens = kv_tokens

    def serve(self) -> None:
        """Execute orders until rank 0 says stop. Raises whatever makes that impossible."""
        try:
            self.link.reply({"number": 0, "kv_tokens": self._kv_tokens})
            while (order := self.link.order())["do"] != "stop":
                if (reply := self._execute(order)) is not None:
                    self.link.reply({"number": order["number"], **reply})
        except BaseException as error:
            self.link.fail(error)
            raise

    def close(self) -> None:
        """Leave; rank 0 has said stop, or counts this rank as lost."""
        self.link.close()
        leave_group()

    def _execute(self, order: Message) -> Message | None:
        match order["do"]:
            case "step":
                try:
                    return self.worker.step(order)
                except ExchangeError as error:  # the watchdogs find out which rank is lost
                    return {"broken": str(error)}
            case "release":
                self.worker.release(order)
            case "leave":
                leave_group()
                return {}
            case "form":
                try:
                    self.worker.form(order)
                except LaunchError as error:
                    return {"broken": str(error)}
                return {}
        return None


class CoordinatorLink:
    """A worker's connection to rank 0, and its watchdog: the process ends with rank 0.

    Args:
        membership: the ranks of the launch.
        rank: of this process.
        timeout_s: after which rank 0 is lost.
        progress_s: see `Watchdog`.

    Attributes:
        heartbeat: of this process.
    """

    def __init__(
        self,
        membership: Membership,
        rank: int,
        timeout_s: float,
        progress_s: float | None = None,
    ) -> None:
        self.heartbeat, self.rank = Heartbeat(), rank
        self._coordinator = membership.members[0]
        self._control = membership.connections[CONTROL][0]
        self._control.socket.settimeout(None)
        peers = membership.connections[WATCH]
        self._watchdog = Watchdog(
            rank, peers, self.heartbeat, timeout_s, self._on_loss, self._on_message, progress_s
        )
        self._watchdog.start()

    def order(self) -> Message:
        """The next order, whenever it comes. Raises `RankLostError`."""
        try:
            return self._control.receive()
        except WireError as error:
            raise self._ended(error) from error

    def reply(self, message: Message) -> None:
        """Answer an order. Raises `RankLostError`."""
        try:
            self._control.send(message)
        except WireError as error:
            raise self._ended(error) from error

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 that this rank cannot go on."""
        self._watchdog.say(0, {"failed": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        self._watchdog.close()
        self._control.close()

    def _ended(self, error: WireError) -> RankLostError:
        # The same words as the watchdog's, which may notice first.
        return RankLostError(
            f"rank {self.rank} ends: rank 0 has ended or cannot be reached ({error})"
        )

    def _on_message(self, rank: int, message: Message) -> None:
        exit_now(f"rank {self.rank} ends: {message['end']}")

    def _on_loss(self, rank: int, why: str) -> None:
        if rank == self.rank:  # this process hangs; rank 0 sees that too
            return
        # Rank 0 is not killed: it may only be cut off, and have callers to answer. If it was
        # stopped, it goes on, finds that this rank has left, and tells them.
        wake_member(self._coordinator)
        exit_now(f"rank {self.rank} ends: rank {rank} {why}")
