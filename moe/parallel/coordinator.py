"""Rank 0 with its model: it leads all ranks through steps, and into new groups after losses."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from experts.dispatch import ExchangeError
from experts.placement.rebalance import Rebalancer
from moe.errors import LaunchError, RankLostError
from moe.parallel.expected_load import ExpectedLoad, PlannedSteps
from moe.parallel.group import leave_group
from moe.parallel.overlap import Overlap
from moe.parallel.rank_worker import RankWorker
from moe.parallel.team import WorkerLinks
from moe.parallel.transport import Message
from moe.parallel.worker import join_group
from moe.settings import ParallelSettings

_logger = logging.getLogger("moe")


class Coordinator:
    """Rank 0 and the others.

    Args:
        team: the other ranks.
        station: what rank 0 computes itself.
        store: for process groups.
        settings: of the profile.

    Attributes:
        arrivals: what tokens that are known let expect, where there is a table of them.
        ended: engines that are garbage, since the last step.
        epoch: how many groups there were before this one.
        kv_tokens: tokens of keys and values that each rank has room for.
        traffic: what each rank's dispatcher has counted, after the last step.
    """

    def __init__(
        self, team: WorkerLinks, station: RankWorker, store: Store, settings: ParallelSettings
    ) -> None:
        self.team, self.station = team, station
        self.arrivals: ExpectedLoad | None = None
        self._store, self._settings = store, settings
        self._numbers = itertools.count(1)
        self._engines = itertools.count()
        self.ended: deque[int] = deque()
        self._reset = False
        self._formed: list[int] = []
        self._rebalancer: Rebalancer | None = None
        self._overlap = Overlap(settings.overlap)
        self.epoch = 0
        self.kv_tokens: dict[int, int] = {}
        self.traffic: dict[int, Any] = {}

    def begin(self, kv_tokens: int) -> None:
        """Wait until every rank has loaded, and form the first group. Raises `RankLostError`."""
        others = self.team.ranks[1:]
        ready = self.team.gather(others, 0)
        self.kv_tokens = {0: kv_tokens} | {rank: ready[rank]["kv_tokens"] for rank in others}
        self._form()
        self.team.goes_on = self._settings.on_rank_loss == "continue"
        if self._settings.rebalance == "auto":
            self._rebalancer = self.station.rebalancer(self.arrivals)

    def new_engine(self) -> int:
        return next(self._engines)

    def step(
        self, message: Message, orders: Mapping[int, Message], planned: PlannedSteps
    ) -> dict[int, Message]:
        """Let every rank compute its part of a step.

        Raises:
            RankLostError: somebody is lost, and with it what was computed.
        """
        number, others, began = next(self._numbers), self.team.ranks[1:], time.perf_counter()
        ended = [self.ended.popleft() for _ in range(len(self.ended))]
        reset, self._reset = self._reset, False
        if self.arrivals is not None:
            self.arrivals.see(planned)
        message = message | {
            "do": "step",
            "number": number,
            "ended_engines": ended,
            "moves": self._moves(),
            "reset": reset,
            "halves": bool(others) and self._overlap.choose(_num_rows(orders)),
        }
        for rank in others:
            self.team.tell(rank, message | {"order": orders[rank]})
        try:
            own = self.station.step(message | {"order": orders[0]})
        except ExchangeError as error:
            raise self.team.loss(str(error)) from None
        replies = {0: own} | self.team.gather(others, number)
        self._whole(replies)
        seconds = time.perf_counter() - began
        self._overlap.observe(seconds)
        self.traffic = {rank: reply.get("traffic") for rank, reply in replies.items()}
        loads_LE = self.station.take_loads()
        if self._rebalancer is not None and loads_LE is not None:
            self._rebalancer.observe(loads_LE, seconds)
        return replies

    def tell(self, rank: int, message: Message) -> None:
        """An order that has no reply; nothing where the rank is lost, which the next step sees."""
        with suppress(RankLostError):
            self.team.tell(rank, message)

    def regroup(self) -> None:
        """Go on without the lost ranks; nobody has any sequences afterwards.

        Raises:
            RankLostError: more were lost meanwhile: once more, then.
        """
        for rank in self.team.give_up():
            _logger.warning("rank %d %s; going on without it", rank, self.team.gone[rank])
        number, others = next(self._numbers), self.team.ranks[1:]
        for rank in others:
            self.team.tell(rank, {"do": "leave", "number": number})
        self.team.gather(others, number)
        self.epoch += 1
        self._form()
        if self._rebalancer is not None:
            self._rebalancer.reset(self.station.placements)
        if self.arrivals is not None:
            self.arrivals.reset()

    def status(self) -> dict[str, Any]:
        """Who takes part, for JSON; from any thread."""
        return {"ranks": list(self.team.ranks), "epoch": self.epoch, "lost": self.team.gone}

    def statistics(self) -> dict[str, Any]:
        """What the ranks have sent, for JSON; from any thread."""
        sent = [(rank, self.traffic.get(rank)) for rank in self.team.ranks]
        ranks = [own and {"rank": rank, **own} for rank, own in sent]
        return {"ranks": ranks, "overlap": self._overlap.as_dict()}

    def reset_statistics(self) -> None:
        """Count from the next step on."""
        self._reset, self.traffic = True, {}

    def close(self) -> None:
        """End the other ranks, and leave."""
        if self._rebalancer is not None:
            self._rebalancer.close()
        self.team.close()
        leave_group()

    def _form(self) -> None:
        ranks, number = list(self.team.ranks), next(self._numbers)
        placements = [
            [list(placement.experts_P), placement.num_experts, placement.ranks]
            for placement in self.station.placed(self._formed, ranks)
        ]
        order = {"do": "form", "number": number, "epoch": self.epoch, "ranks": ranks}
        order["placements"] = placements
        for rank in ranks[1:]:
            self.team.tell(rank, order)
        leave_group()
        try:
            join_group(self.station, self._store, order, self.team, self._settings)
        except LaunchError as error:
            raise self.team.loss(str(error)) from None
        self._formed = ranks
        self._whole(self.team.gather(ranks[1:], number))

    def _whole(self, replies: Mapping[int, Message]) -> None:
        """Raises `RankLostError` if a rank could not do its part."""
        if broken := [reply["broken"] for reply in replies.values() if "broken" in reply]:
            raise self.team.loss("; ".join(broken))

    def _moves(self) -> Message | None:
        """New placements that all ranks apply before this step."""
        moves = None if self._rebalancer is None else self._rebalancer.poll()
        if moves is None or self.station.dispatcher is None:
            return None
        placements = {layer: list(new.experts_P) for layer, new in moves.placements.items()}
        return {"epoch": moves.epoch, "placements": placements}


def _num_rows(orders: Mapping[int, Message]) -> int | None:
    """Tokens that all ranks read in a step; None while a batch goes by layer groups."""
    batches = [order["prefill"] for order in orders.values() if order["prefill"] is not None]
    if not all("chunks" in batch and not batch["pauses"] for batch in batches):
        return None
    prompts = sum(chunk["size"] for batch in batches for chunk in batch["chunks"])
    return prompts + sum(len(order["decode"]) for order in orders.values())
