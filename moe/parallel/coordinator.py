"""Rank 0: it leads all ranks through steps, and into a new group after a loss.

A `Coordinator` sends every rank its orders for a step and gathers the replies. It talks over
`WorkerLinks`: to each rank a connection for orders and replies, which only the computing thread
uses, and another for the watchdog.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from experts.dispatch import ExchangeError
from experts.placement.rebalance import Rebalancer
from moe.errors import LaunchError, RankLostError
from moe.fair_pool import starts
from moe.parallel.expected_load import ExpectedLoad, PlannedSteps
from moe.parallel.group import leave_group
from moe.parallel.membership import CONTROL, WATCH, Membership, kill_member
from moe.parallel.transport import Message, WireError, readable
from moe.parallel.watchdog import Heartbeat, WakePipe, Watchdog, exit_now
from moe.parallel.worker import RankWorker
from moe.settings import ParallelSettings

NAMED_S = 2.0
"""Seconds that the watchdog has to name the lost rank once an exchange has failed."""
ANSWER_S = 5.0
"""Seconds that rank 0 has to tell its callers of a loss; then the process ends in any case."""
_logger = logging.getLogger("moe")


class Coordinator:
    """Leads the ranks of a launch. Made on rank 0 once its model is loaded.

    The constructor waits until every other rank has loaded, and forms the first group.

    Args:
        links: to the other ranks.
        worker: what rank 0 computes itself.
        settings: of the profile.
        kv_tokens: tokens of keys and values that rank 0 has room for.
        expected_load: predicts the experts' load from planned tokens; None without a token table.

    Attributes:
        ended_engines: engines that were garbage-collected since the last step.
        epoch: number of groups before this one.
        kv_tokens: tokens of keys and values that each rank has room for.
        traffic: what each rank's dispatcher has counted, after the last step.

    Raises:
        RankLostError: a rank is lost.
    """

    def __init__(
        self,
        links: WorkerLinks,
        worker: RankWorker,
        settings: ParallelSettings,
        kv_tokens: int,
        expected_load: ExpectedLoad | None = None,
    ) -> None:
        self.links, self.worker = links, worker
        self._expected_load = expected_load
        self._numbers = itertools.count(1)
        self._engines = itertools.count()
        self.ended_engines: deque[int] = deque()
        self._reset = False
        self._formed: list[int] = []
        self.epoch = 0
        self.traffic: dict[int, Any] = {}
        others = links.ranks[1:]
        ready = links.gather(others, 0)
        self.kv_tokens = {0: kv_tokens} | {rank: ready[rank]["kv_tokens"] for rank in others}
        self._form()
        if settings.on_rank_loss == "continue":
            links.accept_losses()
        rebalance = settings.rebalance == "auto"
        self._rebalancer: Rebalancer | None = (
            worker.rebalancer(expected_load) if rebalance else None
        )

    def new_engine(self) -> int:
        """The number of another `ParallelEngine`."""
        return next(self._engines)

    def step(
        self, message: Message, orders: Mapping[int, Message], planned: PlannedSteps
    ) -> dict[int, Message]:
        """Let every rank compute its part of a step; the replies by rank.

        Raises:
            RankLostError: a rank is lost, and with it what was computed.
        """
        number, others, began = next(self._numbers), self.links.ranks[1:], time.perf_counter()
        ended = [self.ended_engines.popleft() for _ in range(len(self.ended_engines))]
        reset, self._reset = self._reset, False
        if self._expected_load is not None:
            self._expected_load.see(planned)
        message = message | {
            "do": "step",
            "number": number,
            "ended_engines": ended,
            "moves": self._moves(),
            "reset": reset,
        }
        for rank in others:
            self.links.send(rank, message | {"order": orders[rank]})
        try:
            own = self.worker.step(message | {"order": orders[0]})
        except ExchangeError as error:
            raise self.links.loss(str(error)) from None
        replies = {0: own} | self.links.gather(others, number)
        self._check(replies)
        seconds = time.perf_counter() - began
        self.traffic = {rank: reply.get("traffic") for rank, reply in replies.items()}
        loads_LE = self.worker.take_loads()
        if self._rebalancer is not None and loads_LE is not None:
            self._rebalancer.observe(loads_LE, seconds)
        return replies

    def release(self, rank: int, order: Message) -> None:
        """Let a rank free what an engine has given up, without a step.

        There is no reply. If the rank is lost, nothing happens: the next step finds out.
        """
        if rank == 0:
            self.worker.release(order)
        else:
            with suppress(RankLostError):
                self.links.send(rank, {"do": "release", **order})

    def regroup(self) -> None:
        """Go on without the lost ranks, in a new group that has no sequences yet.

        Raises:
            RankLostError: another rank was lost meanwhile; call again.
        """
        for rank in self.links.drop_lost():
            _logger.warning("rank %d %s; going on without it", rank, self.links.dropped[rank])
        number, others = next(self._numbers), self.links.ranks[1:]
        for rank in others:
            self.links.send(rank, {"do": "leave", "number": number})
        self.links.gather(others, number)
        self.epoch += 1
        self._form()
        if self._rebalancer is not None:
            self._rebalancer.reset(self.worker.placements)
        if self._expected_load is not None:
            self._expected_load.reset()

    def status(self) -> dict[str, Any]:
        """Who takes part, for JSON; from any thread."""
        return {
            "ranks": list(self.links.ranks),
            "epoch": self.epoch,
            "lost": self.links.dropped,
            "dispatch": self.worker.dispatch_status(),
        }

    def statistics(self) -> dict[str, Any]:
        """Return counts of what the ranks have sent, for JSON; from any thread."""
        sent = [(rank, self.traffic.get(rank)) for rank in self.links.ranks]
        ranks = [own and {"rank": rank, **own} for rank, own in sent]
        return {"ranks": ranks}

    def reset_statistics(self) -> None:
        """Count from the next step on."""
        self._reset, self.traffic = True, {}

    def close(self) -> None:
        """End the other ranks, and leave the group."""
        if self._rebalancer is not None:
            self._rebalancer.close()
        self.links.close()
        leave_group()

    def _form(self) -> None:
        ranks, number = list(self.links.ranks), next(self._numbers)
        placements = [
            [list(placement.experts_P), placement.num_experts, placement.ranks]
            for placement in self.worker.next_placements(self._formed, ranks)
        ]
        order = {"do": "form", "number": number, "epoch": self.epoch, "ranks": ranks}
        order["placements"] = placements
        for rank in ranks[1:]:
            self.links.send(rank, order)
        leave_group()
        try:
            self.worker.form(order)
        except LaunchError as error:
            raise self.links.loss(str(error)) from None
        self._formed = ranks
        self._check(self.links.gather(ranks[1:], number))

    def _check(self, replies: Mapping[int, Message]) -> None:
        """Raises `RankLostError` if a rank could not do its part."""
        if broken := [reply["broken"] for reply in replies.values() if "broken" in reply]:
            raise self.links.loss("; ".join(broken))

    def _moves(self) -> Message | None:
        """New placements that all ranks apply before this step."""
        moves = None if self._rebalancer is None else self._rebalancer.poll()
        if moves is None or self.worker.dispatcher is None:
            return None
        placements = {layer: list(new.experts_P) for layer, new in moves.placements.items()}
        return {"epoch": moves.epoch, "placements": placements}


class WorkerLinks:
    """Rank 0's connections to the other ranks, and its watchdog.

    Until `accept_losses` a lost rank ends the launch.

    Args:
        membership: the ranks of the launch.
        timeout_s: after which a rank is lost.
        progress_s: see `Watchdog`.

    Attributes:
        rank: of this process, 0.
        ranks: that are not lost, in order; numbers of the launch.
        heartbeat: of this process.
        dropped: ranks that were given up, and why each was lost.
    """

    def __init__(
        self, membership: Membership, timeout_s: float, progress_s: float | None = None
    ) -> None:
        self.heartbeat, self.rank = Heartbeat(), 0
        self.ranks = list(range(len(membership.members)))
        self.dropped: dict[int, str] = {}
        self._tell: Callable[[RankLostError], object] | None = None
        self._accepts_losses = False
        self._membership = membership
        self._control = membership.connections[CONTROL]
        self._lost: dict[int, str] = {}
        self._named = threading.Event()
        self._wake = WakePipe()
        for connection in self._control.values():
            connection.socket.settimeout(timeout_s)
        peers = membership.connections[WATCH]
        self._watchdog = Watchdog(
            0, peers, self.heartbeat, timeout_s, self._on_loss, self._on_message, progress_s
        )
        self._watchdog.start()

    def accept_losses(self) -> None:
        """Let the others go on without a lost rank from now on."""
        self._accepts_losses = True

    def on_loss(self, tell: Callable[[RankLostError], object]) -> None:
        """Call ``tell`` in the watchdog's thread if a loss ends the launch.

        So callers learn of it although the computing thread may hang.
        """
        self._tell = tell

    def send(self, rank: int, message: Message) -> None:
        """Send an order. Raises `RankLostError`."""
        self._raise_if_lost()
        try:
            self._control[rank].send(message)
        except WireError:
            raise self.loss() from None

    def gather(self, ranks: Iterable[int], number: int) -> dict[int, Message]:
        """Each rank's reply to the order of a number. Raises `RankLostError`."""
        wake = self._wake.fileno()
        pending = {self._control[rank].fileno(): rank for rank in ranks}
        replies: dict[int, Message] = {}
        while pending:
            self._raise_if_lost()
            for file in (file for file in readable([*pending, wake]) if file != wake):
                rank = pending[file]
                try:
                    reply = self._control[rank].receive()
                except WireError:
                    raise self.loss() from None
                if reply["number"] == number:  # else it answers a step that was given up
                    replies[rank] = reply
                    del pending[file]
        return replies

    def loss(self, noticed: str = "a rank has left a step") -> RankLostError:
        """Which ranks are lost; ``noticed`` if the watchdog cannot name one."""
        self._named.wait(NAMED_S)
        reasons = [f"rank {rank} {why}" for rank, why in sorted(self._lost.items())]
        return RankLostError("; ".join(reasons) or noticed)

    def drop_lost(self) -> list[int]:
        """Forget the lost ranks. Returns those."""
        lost = sorted(self._lost)
        self.ranks = [rank for rank in self.ranks if rank not in self._lost]
        for rank in lost:
            self._control.pop(rank).close()
            self.dropped[rank] = self._lost.pop(rank)
        self._named.clear()
        self._wake.reset()
        return lost

    def close(self) -> None:
        """Stop the other ranks, and wait until they have closed their ends."""
        self._watchdog.close()
        for connection in self._control.values():
            with suppress(WireError):
                connection.send({"do": "stop"})
        for connection in self._control.values():
            connection.socket.settimeout(ANSWER_S)
            with suppress(WireError):
                connection.receive()  # no message comes: the other end closes

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise self.loss()

    def _on_message(self, rank: int, message: Message) -> None:
        self._on_loss(rank, f"has failed: {message['failed']}")

    def _on_loss(self, rank: int, why: str) -> None:
        self._lost.setdefault(rank, why)
        self._named.set()
        self._wake.wake()
        kill_member(self._membership.members[rank])  # it may be stopped, or hang for ever
        if self._accepts_losses and rank != 0:
            return
        error = self.loss()
        for other in self.ranks[1:]:
            self._watchdog.say(other, {"end": str(error)})
        ending = threading.Timer(ANSWER_S, exit_now, [str(error)])
        ending.daemon = True
        if not starts(ending):
            exit_now(str(error))
        if self._tell is not None:
            _logger.error("%s", error)
            self._tell(error)
