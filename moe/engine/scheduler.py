"""Which sequences take part in a step: admission, priority, preemption.

Everybody has a *turn*: the step of arrival, and `engine.priority_steps` more for each level of
priority. Sooner turns are read first, so a request of priority p is overtaken by one of priority q
only if that comes within ``p - q`` times as many steps after it, and nobody starves. Every running
sequence gets a token in every step. When a step does not fit into memory, known prefixes are freed
first, then half-read prompts, then who has the last turn; all but prefixes are read again later.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from weakref import WeakKeyDictionary

import numpy as np

from moe.calibration.foresight import Expect
from moe.engine.prefill_batch import PrefillBatch, PrefillBatchBuilder, ScheduledStep, SequenceGroup
from moe.engine.prefill_mode import ChoosePauses, PrefillMode
from moe.engine.prefix_cache import PrefixCache
from moe.sequence import RunningSequence
from moe.settings import EngineSettings, PrefillSettings
from routing.predict.forecast import Floats

# ---- Which of the waiting sequences to run together: those whose experts are the same.
#
# A step reads each expert once, whoever needs it, so sequences that need the same ones cost less
# together (ExpertFlow's token scheduling; Read-ME's expert-aware batching). Everybody who has
# waited long enough goes first, in order, so nobody starves. Legend: S waiting sequences, U units
# (experts of all layers).


def choose_batch(
    needs: Floats, room: int, waited: Sequence[int], patience: int, running: Floats | None = None
) -> list[int]:
    """Sequences to take now, in the order in which they were chosen.

    Who has been passed over ``patience`` times comes first, in the order of the queue, so nobody is
    passed over more often; then, one by one, who adds the fewest expected units to those there are
    already. With nothing to go by that is the first in the queue.

    Args:
        needs: ``(S, U)`` probability that a sequence needs a unit, in order of the queue.
        room: how many may be taken.
        waited: of each sequence, how many times others from behind it were taken before it.
        patience: most times that may happen.
        running: ``(U,)`` probability that a unit is needed anyway, by sequences that run already.
    """
    count = min(room, len(needs))
    if count == 0:
        return []
    chosen = [index for index in range(len(needs)) if waited[index] >= patience][:count]
    if not chosen and running is None:
        chosen = [0]
    absent = np.ones(needs.shape[1], np.float32) if running is None else 1 - running
    for index in chosen:
        absent = absent * (1 - needs[index])
    left = [index for index in range(len(needs)) if index not in chosen]
    while len(chosen) < count:
        added = needs[left] @ absent
        best = left.pop(int(np.argmin(added)))  # the first of equals: they stay in order
        chosen.append(best)
        absent = absent * (1 - needs[best])
    return chosen


def expected_units(needs: Floats) -> float:
    """Distinct units that sequences ``(S, U)`` are expected to need in one step."""
    return float((1 - np.prod(1 - needs, 0)).sum())


# ---- Grouping: waiting requests that are expected to need the experts of those that run go
# first.
#
# A step reads each expert once, whoever needs it. What a request will need is guessed from its
# prompt by the token table of `moe calibrate`. The order of the queue is changed only where that
# is expected to save experts, and nobody is overtaken more often than patience allows.

_LEAST_SAVING = 0.02


class ExpertAwareOrder:
    """Orders a queue.

    Args:
        expect: what a prompt needs.
        patience: how often others from behind may overtake a request.
    """

    def __init__(self, expect: Expect, patience: int) -> None:
        self._expect, self._patience = expect, patience
        self._needs: WeakKeyDictionary[RunningSequence, Floats] = WeakKeyDictionary()
        self._overtaken: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()

    def arrange(
        self, waiting: Sequence[SequenceGroup], running: Sequence[RunningSequence], room: int
    ) -> list[SequenceGroup]:
        """The queue, in the order in which a wave should take from it.

        Prompts that were read in part stay in front: what has been read takes memory.
        """
        begun = [group for group in waiting if group.num_read]
        fresh = [group for group in waiting if not group.num_read]
        room -= len(begun)
        if not 0 < room < len(fresh):
            return list(waiting)
        needs = np.stack([self._need(group.sequences[0]) for group in fresh])
        there = np.zeros((1, needs.shape[1]), np.float32)
        if running:
            there = np.stack([self._need(sequence) for sequence in running])
        needed = 1 - np.prod(1 - there, 0) if running else None
        overtaken = [self._overtaken.get(group.sequences[0], 0) for group in fresh]
        chosen = choose_batch(needs, room, overtaken, self._patience, needed)
        usual, other = (
            expected_units(np.concatenate([there, needs[rows]])) for rows in (range(room), chosen)
        )
        if other > (1 - _LEAST_SAVING) * usual:
            return list(waiting)
        left = [index for index in range(len(fresh)) if index not in chosen]
        return [*begun, *(fresh[index] for index in (*chosen, *left))]

    def taken(self, taken: Sequence[SequenceGroup], left: Sequence[SequenceGroup]) -> None:
        """A wave took some groups; those with a sooner turn have been overtaken."""
        last = max((group.turn for group in taken), default=None)
        for group in left:
            if last is not None and group.turn < last:
                first = group.sequences[0]
                self._overtaken[first] = self._overtaken.get(first, 0) + 1

    def _need(self, sequence: RunningSequence) -> Floats:
        found = self._needs.get(sequence)
        if found is None:
            found = self._needs[sequence] = self._expect(sequence.prompt_token_ids)
        return found


# ----

_turn = attrgetter("turn")


class Scheduler:
    """Plans steps.

    Args:
        prefill: how prompts are read.
        engine: how many sequences run at once, and what priority is worth.
        kv_tokens: tokens of keys and values in memory at once; None for no limit.
        pauses: where a layered wave sleeps.
        can_cut: a prompt may be read in several waves.
        choose_mode: the mode of the next wave, from the prompt tokens that wait for it and the
            number of running sequences; None where ``prefill.mode`` is not ``auto``.
        prefixes: prompts that were read before; None to read every prompt from its start.
        grouping: puts requests first that need the experts of others; None to keep their turns.

    Attributes:
        waiting, running: in order of their turns.
        wave: what is being read.
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
        grouping: ExpertAwareOrder | None = None,
    ) -> None:
        self.prefill = prefill
        self.engine = engine
        self.kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._pauses = pauses
        self.can_cut = can_cut
        self._choose_mode = choose_mode
        self.prefixes = prefixes
        self._grouping = grouping
        self.waiting: list[SequenceGroup] = []
        self.running: list[RunningSequence] = []
        self.wave: PrefillBatch | None = None
        self._num_steps = 0
        self._num_arrived = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.wave)

    def submit(self, group: SequenceGroup) -> None:
        """Queue a group. Raises `RequestError` if it could never run."""
        group.check_fits(self.kv_tokens, self.engine.max_batch_size)
        self._num_arrived += 1
        for sequence in group.sequences:
            step = self._num_steps + sequence.priority * self.engine.priority_steps
            sequence.turn = (step, self._num_arrived)
        insort(self.waiting, group, key=_turn)

    def plan(self) -> ScheduledStep:
        """The next step. `finish` must follow with what became of it."""
        self._num_steps += 1
        while self.num_used_tokens() + len(self.running) > self.kv_tokens:
            if not self._give_up_last():
                break
        if self.wave is not None:
            self.wave.stage += 1
        else:
            self.wave = self._next_wave()
        spare = self.kv_tokens - self.num_used_tokens() - len(self.running)
        return ScheduledStep(list(self.running), self.wave, max(0, spare))

    def finish(self, gone: Collection[RunningSequence]) -> None:
        """Take in that a step was run, and which sequences ended in it.

        A wave that has read its prompts to the end adds its sequences to the running ones.
        """
        if self.wave is not None and self.wave.is_last_stage:
            for piece in self.wave.pieces:
                piece.group.num_read += len(piece.token_ids)
                if piece.group.cancelled:
                    continue
                if piece.is_last:
                    self.running += piece.group.sequences
                elif piece.group.sequences[0] not in gone:
                    insort(self.waiting, piece.group, key=_turn)
            self.running.sort(key=_turn)
            self.wave = None
        self.running = [sequence for sequence in self.running if sequence not in gone]

    def drop(self, group: SequenceGroup) -> None:
        """Forget a group between steps, wherever it is; a wave ends if nobody else is in it."""
        for sequence in group.sequences:
            sequence.cancelled = True
        self.running = [s for s in self.running if s not in group.sequences]
        self.waiting = [g for g in self.waiting if g.sequences[0] not in group.sequences]
        if self.wave is not None and all(piece.group.cancelled for piece in self.wave.pieces):
            self.wave = None

    def num_used_tokens(self) -> float:
        """Tokens of memory held by running sequences, prompts being read and known prefixes."""
        pieces = self.wave.pieces if self.wave is not None else []
        running = sum(len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in self.running)
        half_read = sum(group.num_read for group in self.waiting)
        wave = sum(piece.group.num_kv for piece in pieces)
        return running + half_read + wave + (self.prefixes.num_tokens if self.prefixes else 0)

    def _fits(self, count: int) -> bool:
        """Whether the first ``count`` groups of the queue can run beside those that do.

        Known prefixes give way to them, and so do half-read prompts behind them.
        """
        groups, others = self.waiting[:count], self.waiting[count:]
        size = len(self.running) + sum(len(group.sequences) for group in groups)
        if size > self.engine.max_batch_size:
            return False
        needed = size + sum(group.num_kv - group.num_read for group in groups)
        while self.num_used_tokens() + needed > self.kv_tokens:
            if not self._give_up_read(others):
                return False
        return True

    def _give_up_read(self, groups: Sequence[SequenceGroup]) -> bool:
        """Free a known prefix, or else the last prompt of ``groups`` that was read in part."""
        if self.prefixes is not None and self.prefixes.evict():
            return True
        half_read = next((group for group in reversed(groups) if group.num_read), None)
        if half_read is not None:
            half_read.forget()
        return half_read is not None

    def _give_up_last(self) -> bool:
        """Free memory; False if only the first in turn is left."""
        if self._give_up_read(self.waiting):
            return True
        wave, last = self.wave, self.running[-1] if self.running else None
        if wave is not None and (last is None or wave.pieces[0].group.turn > last.turn):
            for piece in wave.pieces:
                piece.group.forget()
                if not piece.group.cancelled:
                    insort(self.waiting, piece.group, key=_turn)
            self.wave = None
        elif last is not None and (wave is not None or len(self.running) > 1):
            self.running.pop()
            last.cache = None
            insort(self.waiting, SequenceGroup([last]), key=_turn)
        else:
            return False
        return True

    def _next_wave(self) -> PrefillBatch | None:
        """Take prompts from the queue, in order, while memory, batch and token budget allow."""
        if self._grouping is not None:
            room = self.engine.max_batch_size - len(self.running)
            self.waiting = self._grouping.arrange(self.waiting, self.running, room)
        wave = self._draft_wave()
        if self._grouping is not None:
            taken = [piece.group for piece in wave.pieces] if wave is not None else []
            self._grouping.taken(taken, self.waiting)
            self.waiting.sort(key=_turn)
        return wave

    def _draft_wave(self) -> PrefillBatch | None:
        if not self.waiting or not self._fits(1):
            return None
        draft = PrefillBatchBuilder(
            self.prefill, self._mode(), len(self.running), can_cut=self.can_cut
        )
        for count, group in enumerate(self.waiting, 1):
            if not self._fits(count):
                break
            self._reuse_prefix(group)
            if not draft.take(group):
                break
        del self.waiting[: len(draft.pieces)]
        return draft.wave(self._pauses)

    def _reuse_prefix(self, group: SequenceGroup) -> None:
        if self.prefixes is None or group.num_read or group.prompt_logprobs is not None:
            return
        first = group.sequences[0]
        known = self.prefixes.take(first.salt, group.token_ids, first.capacity)
        if known is not None:
            group.cache, group.num_read = known, known.length
            if not first.token_ids:  # else it was preempted, and knows its own
                for sequence in group.sequences:
                    sequence.num_known = known.length

    def _mode(self) -> PrefillMode:
        if self._choose_mode is None:
            assert self.prefill.mode != "auto"
            return self.prefill.mode
        waiting = sum(len(group.token_ids) - group.num_read for group in self.waiting)
        return self._choose_mode(min(waiting, self.prefill.wave_tokens), len(self.running))
