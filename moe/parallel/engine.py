"""The step loop over several ranks: rank 0 has a scheduler for each, and sends it orders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from moe.engine.engine import Engine, Event, is_last
from moe.engine.prefill_batch import ScheduledStep, SequenceGroup
from moe.errors import RankLostError, RequestError
from moe.parallel.coordinator import Coordinator
from moe.parallel.remote import OrderQueue, RankScheduler
from moe.sequence import RunningSequence

NewEngine = Callable[[int], Engine]
"""Makes a planning engine for a rank with room for this many tokens of keys and values."""


class ParallelEngine:
    """Drives sequences through a model on several ranks; used as `Engine` is, on rank 0.

    A sequence stays on its rank (home), which has its keys and values.

    Args:
        coordinator: of the ranks.
        new_engine: see `NewEngine`.
        continue_on_loss: if a rank is lost, the others read its sequences again.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        new_engine: NewEngine,
        *,
        continue_on_loss: bool,
    ) -> None:
        self._coordinator, self._new_engine = coordinator, new_engine
        self._continue_on_loss = continue_on_loss
        self._homes: dict[RunningSequence, int] = {}
        self._schedulers: dict[int, RankScheduler] = {}
        self._open()

    @property
    def idle(self) -> bool:
        return all(scheduler.engine.idle for scheduler in self._schedulers.values())

    @property
    def kv_tokens(self) -> float:
        """Tokens of keys and values that all ranks have room for."""
        return sum(scheduler.engine.kv_tokens for scheduler in self._schedulers.values())

    def status(self) -> dict[str, Any]:
        """As `Engine.status` of the ranks together, and ``ranks``: how many there are."""
        own = [scheduler.engine.status() for scheduler in self._schedulers.values()]
        prefixes = [status["prefixes"] for status in own]
        whole = None
        if prefixes[0] is not None:
            whole = {name: sum(known[name] for known in prefixes) for name in prefixes[0]}
        return {"prefill": own[0]["prefill"], "prefixes": whole, "ranks": len(own)}

    def occupancy(self) -> dict[str, int]:
        """As `Engine.occupancy`, of all ranks together."""
        own = [scheduler.engine.occupancy() for scheduler in self._schedulers.values()]
        return {name: sum(counts[name] for counts in own) for name in own[0]}

    def submit(self, group: SequenceGroup) -> None:
        """Queue sequences on the rank with the least to do.

        Raises:
            RequestError: no rank can ever run them.
        """
        reason: RequestError | None = None
        for rank in sorted(self._schedulers, key=lambda rank: self._schedulers[rank].cost(group)):
            try:
                self._schedulers[rank].engine.submit(group)
            except RequestError as error:
                reason = reason or error
                continue
            self._homes |= dict.fromkeys(group.sequences, rank)
            return
        assert reason is not None
        raise reason

    def cancel(self, group: SequenceGroup) -> None:
        """Remove sequences between steps, and free their caches."""
        homes = {self._homes.pop(sequence, None) for sequence in group.sequences}
        for rank in homes - {None}:
            assert rank is not None
            scheduler = self._schedulers[rank]
            scheduler.engine.cancel(group)
            scheduler.orders.end(group.sequences)
        if self.idle:
            self._flush()

    def step(self) -> list[Event]:
        """As `Engine.step`, for all ranks.

        Raises:
            RankLostError: a rank is lost, and the profile says to stop then.
        """
        if self._epoch != self._coordinator.epoch:
            return self._begin_again()
        try:
            return self._step()
        except RankLostError:
            if not self._continue_on_loss:
                raise
        self._recover()
        return []

    def _step(self) -> list[Event]:
        plans = {rank: scheduler.schedule() for rank, scheduler in self._schedulers.items()}
        steps = [step for step, _ in plans.values()]
        visits = _visits_of(steps, self._coordinator.worker.visits)
        orders = {rank: order for rank, (_, order) in plans.items()}
        message = {"engine": self._id, "visits": visits}
        waiting = [scheduler.engine.scheduler.waiting for scheduler in self._schedulers.values()]
        replies = self._coordinator.step(message, orders, zip(steps, waiting, strict=True))
        events: list[Event] = []
        for rank, scheduler in self._schedulers.items():
            events += scheduler.process_reply(replies[rank], plans[rank][0])
        for sequence, event in events:
            if is_last(event):
                self._homes.pop(sequence, None)
        if self.idle:
            self._flush()
        return events

    def _open(self) -> None:
        """Begin with no sequences, in the present group."""
        coordinator = self._coordinator
        self._epoch, self._id = coordinator.epoch, coordinator.new_engine()
        self._schedulers = {}
        for rank in coordinator.links.ranks:
            engine = self._new_engine(coordinator.kv_tokens[rank])
            orders = OrderQueue(engine.scheduler.account.pool)
            self._schedulers[rank] = RankScheduler(orders, engine)
        weakref.finalize(self, coordinator.ended_engines.append, self._id).atexit = False

    def _flush(self) -> None:
        """Let ranks free what has ended now, as the next step may be far away."""
        if self._epoch != self._coordinator.epoch:  # a new group holds nothing of this engine
            return
        for rank, scheduler in self._schedulers.items():
            if scheduler.orders.has_orders:
                order = {
                    "engine": self._id,
                    "order": scheduler.orders.order(ScheduledStep([], None)),
                }
                self._coordinator.release(rank, order)

    def _recover(self) -> None:
        """Form a group of the remaining ranks."""
        for rank in reversed(self._coordinator.links.ranks):
            try:
                self._coordinator.regroup()
                return
            except RankLostError:  # another rank is lost, or the watchdog cannot name one
                if rank == 0:
                    raise

    def _begin_again(self) -> list[Event]:
        """Submit again in a new group what has not ended; returns events of groups that no longer
        fit."""
        groups = [
            group for scheduler in self._schedulers.values() for group in scheduler.unfinished()
        ]
        self._homes.clear()
        self._open()
        refused: list[Event] = []
        for group in sorted(groups, key=lambda group: group.queue_key):
            try:
                self.submit(group)
            except RequestError as error:
                refused += [(sequence, error) for sequence in group.sequences]
        return refused


def _visits_of(steps: Sequence[ScheduledStep], visits: Sequence[int]) -> tuple[int, int]:
    """The first visit of a pass that any rank makes in a step, and the one after the last.

    Args:
        visits: see `MoELayers`.
    """
    num_layers = max(visits) + 1
    visited = [range(num_layers) for step in steps if step.decode]
    visited += [step.prefill.layers(num_layers) for step in steps if step.prefill is not None]
    begin = min((layers.start for layers in visited), default=0)
    end = max((layers.stop for layers in visited), default=0)
    # A lane that sleeps before a layer does so at its first visit of that layer or a later one.
    first, last = (
        next((at for at, own in enumerate(visits) if own >= layer), len(visits))
        for layer in (begin, end)
    )
    return first, last
