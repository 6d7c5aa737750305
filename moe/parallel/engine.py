"""The step loop over several ranks: one scheduler each, planned and told by rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from moe.engine.engine import Engine, Event, is_last
from moe.engine.prefill_batch import ScheduledStep, SequenceGroup
from moe.errors import RankLostError, RequestError
from moe.parallel.coordinator import Coordinator
from moe.parallel.orders import OrderQueue, RankScheduler, layers_of
from moe.sequence import RunningSequence

NewEngine = Callable[[int], Engine]
"""Makes the scheduler's side of a rank, with room for so many tokens of keys and values."""


class ParallelEngine:
    """Drives sequences through a model on several ranks; used as `Engine` is, on rank 0.

    A sequence stays on the rank that it was given to, which has its keys and values.

    Args:
        leading: the ranks.
        new_engine: see `NewEngine`.
        goes_on: where a rank is lost, the others read its sequences again.
    """

    def __init__(self, leading: Coordinator, new_engine: NewEngine, *, goes_on: bool) -> None:
        self._leading, self._new_engine, self._goes_on = leading, new_engine, goes_on
        self._homes: dict[RunningSequence, int] = {}
        self._parts: dict[int, RankScheduler] = {}
        self._open()

    @property
    def idle(self) -> bool:
        return all(part.engine.idle for part in self._parts.values())

    @property
    def kv_tokens(self) -> float:
        """Tokens of keys and values that all ranks have room for."""
        return sum(part.engine.kv_tokens for part in self._parts.values())

    def status(self) -> dict[str, Any]:
        """As `Engine.status` of the ranks together, and ``ranks``: how many there are."""
        own = [part.engine.status() for part in self._parts.values()]
        prefixes = [status["prefixes"] for status in own]
        whole = None
        if prefixes[0] is not None:
            whole = {name: sum(known[name] for known in prefixes) for name in prefixes[0]}
        return {"prefill": own[0]["prefill"], "prefixes": whole, "ranks": len(own)}

    def occupancy(self) -> dict[str, int]:
        """As `Engine.occupancy`, of all ranks together."""
        own = [part.engine.occupancy() for part in self._parts.values()]
        return {name: sum(counts[name] for counts in own) for name in own[0]}

    def submit(self, group: SequenceGroup) -> None:
        """Queue sequences on the rank with the least to do.

        Raises:
            RequestError: they can never run on any rank.
        """
        reason: RequestError | None = None
        for rank in sorted(self._parts, key=lambda rank: self._parts[rank].cost(group)):
            try:
                self._parts[rank].engine.submit(group)
            except RequestError as error:
                reason = reason or error
                continue
            self._homes |= dict.fromkeys(group.sequences, rank)
            return
        assert reason is not None
        raise reason

    def cancel(self, group: SequenceGroup) -> None:
        """Forget sequences between steps; what they held is freed."""
        homes = {self._homes.pop(sequence, None) for sequence in group.sequences}
        for rank in homes - {None}:
            assert rank is not None
            part = self._parts[rank]
            part.engine.cancel(group)
            part.desk.forget(group.sequences)
        if self.idle:
            self._flush()

    def step(self) -> list[Event]:
        """As `Engine.step`, for all ranks.

        Raises:
            RankLostError: a rank is lost, and the profile says to stop then.
        """
        if self._epoch != self._leading.epoch:
            return self._begin_again()
        try:
            return self._step()
        except RankLostError:
            if not self._goes_on:
                raise
        self._recover()
        return []

    def _step(self) -> list[Event]:
        plans = {rank: part.plan() for rank, part in self._parts.items()}
        steps = [step for step, _ in plans.values()]
        layers = layers_of(steps, self._leading.station.num_layers)
        orders = {rank: order for rank, (_, order) in plans.items()}
        message = {"engine": self._id, "layers": layers}
        waiting = [part.engine.scheduler.waiting for part in self._parts.values()]
        replies = self._leading.step(message, orders, zip(steps, waiting, strict=True))
        events: list[Event] = []
        for rank, part in self._parts.items():
            events += part.take_in(replies[rank], plans[rank][0])
        for sequence, event in events:
            if is_last(event):
                self._homes.pop(sequence, None)
        if self.idle:
            self._flush()
        return events

    def _open(self) -> None:
        """Begin with no sequences."""
        leading = self._leading
        self._epoch, self._id = leading.epoch, leading.new_engine()
        self._parts = {}
        for rank in leading.team.ranks:
            self._parts[rank] = RankScheduler(
                OrderQueue(), self._new_engine(leading.kv_tokens[rank])
            )
        weakref.finalize(self, leading.ended.append, self._id).atexit = False

    def _flush(self) -> None:
        """Let ranks free what nobody needs, as there may be no next step for long."""
        if self._epoch != self._leading.epoch:  # a new group has nothing of ours
            return
        for rank, part in self._parts.items():
            if part.desk.has_orders:
                order = {"engine": self._id, "order": part.desk.order(ScheduledStep([], None))}
                if rank == 0:
                    self._leading.station.prepare(order)
                else:
                    self._leading.tell(rank, {"do": "prepare", **order})

    def _recover(self) -> None:
        """Form a group of the ranks that are left."""
        for rank in reversed(self._leading.team.ranks):
            try:
                self._leading.regroup()
                return
            except RankLostError:  # more are lost, or nobody who can be named
                if rank == 0:
                    raise

    def _begin_again(self) -> list[Event]:
        """In a new group, read everything once more that has not ended; who can no longer run."""
        groups = [group for part in self._parts.values() for group in part.unfinished()]
        self._homes.clear()
        self._open()
        refused: list[Event] = []
        for group in sorted(groups, key=lambda group: group.queue_key):
            try:
                self.submit(group)
            except RequestError as error:
                refused += [(sequence, error) for sequence in group.sequences]
        return refused
