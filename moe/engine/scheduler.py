"""Which sequences take part in a step: admission, priority, preemption.

Every request has a *queue key*: the step of its arrival, plus `engine.priority_steps` for each
level of priority; sooner keys go first. So priority q overtakes priority p only if it arrives
within ``(p - q) * priority_steps`` steps after it, and no request starves. Every running sequence
gets a token in every step. If a step does not fit into memory, the scheduler frees prefix cache
entries first, then half-read prompts, then preempts the sequence with the last key; all but cache
entries are read again later.

A prompt whose beginning is being read from disk waits, and others overtake it.

`KVAccount` counts the memory of sequences, in tokens. A prompt of which most is being read by a
batch already waits for that batch, and then goes on from the prefix cache: requests that arrive
together with a common prompt read it once, if the prefix cache has room for that prompt.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Container, Sequence
from operator import attrgetter

from moe.engine.kv_account import KVAccount
from moe.engine.prefill_batch import (
    PrefillBatch,
    PrefillBatchBuilder,
    ScheduledStep,
    SequenceGroup,
)
from moe.engine.prefill_mode import ChoosePauses, PrefillMode
from moe.engine.request_order import RequestOrder
from moe.kv.prefix_cache import PrefixCache
from moe.sequence import RunningSequence
from moe.settings import EngineSettings, PrefillSettings

_queue_key = attrgetter("queue_key")
_WAIT_S = 0.02


class Scheduler:
    """Plans steps.

    Args:
        prefill: how prompts are read.
        engine: how many sequences run at once, and what priority is worth.
        kv_tokens: tokens of keys and values in memory at once; None for no limit.
        pauses: where a layered batch sleeps.
        can_cut: a prompt may be read in several batches.
        choose_mode: the mode of the next batch, from the prompt tokens that wait for it and the
            number of running sequences; None unless ``prefill.mode`` is ``auto``.
        prefixes: prompts that were read before; None to read every prompt from its start.
        order: reorders the queue; None to keep its order.
        account: counts the memory of sequences; None: each token of each counts.

    Attributes:
        waiting: groups whose prompt is not being read, in queue order.
        running: sequences that decode, in queue order.
        prefilling: the batch of prompts that is being read.
        account: as given.
    """

    def __init__(
        self,
        prefill: PrefillSettings,
        engine: EngineSettings,
        kv_tokens: int | None,
        pauses: ChoosePauses,
        *,
        can_cut: bool = True,
        choose_mode: Callable[[int, int], PrefillMode] | None = None,
        prefixes: PrefixCache | None = None,
        order: RequestOrder | None = None,
        account: KVAccount | None = None,
    ) -> None:
        self.prefill = prefill
        self.engine = engine
        self.kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._pauses = pauses
        self.can_cut = can_cut
        self._choose_mode = choose_mode
        self.prefixes = prefixes
        self._order = order
        self.account = account or KVAccount()
        self.waiting: list[SequenceGroup] = []
        self.running: list[RunningSequence] = []
        self.prefilling: PrefillBatch | None = None
        self._num_steps = 0
        self._num_arrived = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.prefilling)

    def submit(self, group: SequenceGroup) -> None:
        """Queue a group. Raises `RequestError` if it could never run."""
        group.keeps_all = self.account.keeps_all(group, self.prefixes, self.kv_tokens)
        room = self.kv_tokens - (self.account.unit - 1) * (len(group.sequences) - 1)
        group.check_fits(self.account.most(group), room, self.engine.max_batch_size)
        self._num_arrived += 1
        for sequence in group.sequences:
            step = self._num_steps + sequence.priority * self.engine.priority_steps
            sequence.enqueue(step, self._num_arrived)
        insort(self.waiting, group, key=_queue_key)

    def schedule(self) -> ScheduledStep:
        """The next step. `update` must follow with what became of it."""
        self._num_steps += 1
        while (used := self.num_used_tokens()) + len(self.running) > self.kv_tokens:
            if not self._preempt():
                break
        if self.prefilling is not None:
            self.prefilling.layer_group += 1
        elif self.waiting:
            self.prefilling = self._next_batch()
            if self.prefilling is None and not self.running and self._has_read():
                self.prefilling = self._next_batch()
            used = self.num_used_tokens()
        spare = self.kv_tokens - used - len(self.running)
        if spare < (self.account.unit - 1) * len(self.running):  # drafts may need a block of each
            spare = 0
        return ScheduledStep(list(self.running), self.prefilling, max(0, spare))

    def schedule_ahead(self, known: Container[RunningSequence]) -> ScheduledStep | None:
        """The step behind one that is in flight, without sequences that are known to end with that;
        None if it would do more than decode, or read what is not known. `update` comes between.

        Args:
            known: sequences of which the device has the next token.
        """
        if self.prefilling is not None or (self.waiting and not self._admits_none()):
            return None
        decode = [sequence for sequence in self.running if not sequence.ends_next]
        if not decode or not all(sequence in known for sequence in decode):
            return None
        grown = sum(self.account.growth(sequence, 2) for sequence in self.running)
        if self.num_used_tokens() + grown > self.kv_tokens:
            return None
        self._num_steps += 1
        return ScheduledStep(decode, None)

    def _admits_none(self) -> bool:
        """Return whether no prompt can join the running sequences before one of these ends."""
        first = self.waiting[0]
        if self.prefixes is not None and not first.looked_up and first.prompt_logprobs is None:
            return False
        if len(self.running) >= self.engine.max_batch_size:
            return True
        if self._order is not None:
            return False
        size = self._num_sequences([first])
        if size > self.engine.max_batch_size:
            return True
        return not self._can_free(size + self.account.to_come(first), self.waiting[1:])

    def update(self, ended: Collection[RunningSequence]) -> None:
        """After a step: remove the sequences that ended in it.

        Sequences whose prompt has been read to its end start running.
        """
        if (batch := self.prefilling) is not None and batch.is_last_layer_group:
            for chunk in batch.chunks:
                chunk.group.advance(len(chunk.token_ids))
                if chunk.group.cancelled:
                    continue
                if chunk.is_last:
                    self.running += chunk.group.sequences
                elif chunk.group.sequences[0] not in ended:
                    insort(self.waiting, chunk.group, key=_queue_key)
            self.running.sort(key=_queue_key)
            self.prefilling = None
        self.running = [sequence for sequence in self.running if sequence not in ended]

    def cancel(self, group: SequenceGroup) -> None:
        """Remove a group between steps; a batch ends once all of its groups are cancelled."""
        group.cancel()
        self.running = [s for s in self.running if s not in group.sequences]
        self.waiting = [g for g in self.waiting if g.sequences[0] not in group.sequences]
        batch = self.prefilling
        if batch is not None and all(chunk.group.cancelled for chunk in batch.chunks):
            self.prefilling = None

    def num_used_tokens(self) -> float:
        """Tokens of memory held by running sequences, prompts being read and cached prefixes."""
        account, batch = self.account, self.prefilling
        running = sum(map(account.running, self.running))
        half_read = sum(map(account.half_read, self.waiting))
        being_read = [chunk.group for chunk in batch.chunks] if batch is not None else []
        prefill = sum(account.to_come(group) + group.num_held for group in being_read)
        return running + half_read + prefill + (self.prefixes.num_tokens if self.prefixes else 0)

    def is_awaited(self, group: SequenceGroup) -> bool:
        """Return whether a waiting prompt begins with most of this one."""
        return any(other.is_expected_from(group) for other in self.waiting)

    def _next_batch(self) -> PrefillBatch | None:
        """Take prompts from the queue, in order, while memory, batch and token budget allow."""
        if self._order is None:
            return self._build_batch()
        room = self.engine.max_batch_size - len(self.running)
        self.waiting = self._order.arrange(self.waiting, self.running, room)
        batch = self._build_batch()
        taken = [chunk.group for chunk in batch.chunks] if batch is not None else []
        self._order.count_overtaken(taken, self.waiting)
        self.waiting.sort(key=_queue_key)
        return batch

    def _build_batch(self) -> PrefillBatch | None:
        if not self.waiting:
            return None
        builder: PrefillBatchBuilder | None = None
        taken: list[SequenceGroup] = []
        for count, group in enumerate(self.waiting, 1):
            if self.prefixes is not None and self._must_wait(group, self.prefixes, taken):
                continue
            if not self._fits([*taken, group], self.waiting[count:]):
                break
            if builder is None:
                builder = PrefillBatchBuilder(
                    self.prefill, self._mode(), len(self.running), can_cut=self.can_cut
                )
            if not builder.add(group):
                break
            taken.append(group)
            for sequence in group.sequences:
                sequence.leave_queue()
        self.waiting = [group for group in self.waiting if group not in taken]
        return None if builder is None else builder.build(self._pauses)

    def _must_wait(
        self, group: SequenceGroup, prefixes: PrefixCache, taken: Sequence[SequenceGroup]
    ) -> bool:
        """Return whether most of a prompt is being read from disk, or will be by these groups'
        batch and then be in the prefix cache."""
        asks = not group.num_read and group.prompt_logprobs is None
        if group.counted and self._num_sequences([*taken, group]) > self.engine.max_batch_size:
            asks = False  # it has asked, and asks again when there is a place for it
        if asks and not group.look_up(prefixes):
            return True
        expected = filter(group.is_expected_from, taken)
        return any(self.account.will_be_kept(other, prefixes) for other in expected)

    def _has_read(self) -> bool:
        """Wait a moment for prefixes that are being read from disk; returns whether one came."""
        return self.prefixes is not None and self.prefixes.wait_for_read(_WAIT_S)

    def _mode(self) -> PrefillMode:
        if self._choose_mode is None:
            assert self.prefill.mode != "auto"
            return self.prefill.mode
        waiting = sum(len(group.token_ids) - group.num_read for group in self.waiting)
        return self._choose_mode(min(waiting, self.prefill.most_tokens), len(self.running))

    def _fits(self, groups: Sequence[SequenceGroup], others: Sequence[SequenceGroup]) -> bool:
        """Return whether groups of the queue can run beside the running sequences.

        Frees cached prefixes, and half-read prompts among ``others``, to make room.
        """
        size = self._num_sequences(groups)
        if size > self.engine.max_batch_size:
            return False
        needed = size + sum(map(self.account.to_come, groups))
        if self.running and not self._can_free(needed, others):
            return False
        while self.num_used_tokens() + needed > self.kv_tokens:
            if not self._free_read(others):
                # Alone it fits (`submit`), whatever the ends of its blocks take.
                return not self.running and len(groups) == 1
        return True

    def _num_sequences(self, groups: Sequence[SequenceGroup]) -> int:
        """Sequences that run when the prompts of these groups have been read."""
        return len(self.running) + sum(len(group.sequences) for group in groups)

    def _can_free(self, needed: float, others: Sequence[SequenceGroup]) -> bool:
        """Return whether `_free_read` can make room for so many tokens: what it frees in vain is
        read again."""
        missing = self.num_used_tokens() + needed - self.kv_tokens
        missing -= sum(group.num_read for group in others)
        if missing <= 0 or self.prefixes is None:
            return missing <= 0
        return missing <= self.prefixes.num_tokens and missing <= self.prefixes.evictable_tokens

    def _free_read(self, groups: Sequence[SequenceGroup]) -> bool:
        """Free a cached prefix, or else the last half-read prompt of ``groups``."""
        if self.prefixes is not None and self.prefixes.evict():
            return True
        half_read = next((group for group in reversed(groups) if group.num_read), None)
        if half_read is not None:
            half_read.restart()
        return half_read is not None

    def _preempt(self) -> bool:
        """Free memory, from the end of the queue; False if only its first is left."""
        if self._free_read(self.waiting):
            return True
        batch, last = self.prefilling, self.running[-1] if self.running else None
        if batch is not None and (last is None or batch.chunks[0].group.queue_key > last.queue_key):
            for chunk in batch.chunks:
                chunk.group.restart()
                if not chunk.group.cancelled:
                    insort(self.waiting, chunk.group, key=_queue_key)
            self.prefilling = None
        elif last is not None and (batch is not None or len(self.running) > 1):
            self.running.pop()
            last.release()
            again = SequenceGroup([last])
            again.keeps_all = self.account.keeps_all(again, self.prefixes, self.kv_tokens)
            insort(self.waiting, again, key=_queue_key)
        else:
            return False
        return True
