"""What rank 0 tells a rank to do in a step, and what it makes of the reply.

Rank 0 has the whole of every sequence: prompt, tokens, text, its turn. The rank that computes it
has a mirror (`moe.parallel.rank_worker`): prompt and tokens, sampler, keys and values. Here are
handles on those, so that the scheduler plans for other ranks as it does for its own.

An order is JSON: ``new`` sequences, ``caches`` to copy or to free, ``ended`` sequences, who
decodes, and the batch that is read.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe.engine.engine import Engine, Event, is_last
from moe.engine.prefill_batch import (
    PrefillBatch,
    PromptChunk,
    ScheduledStep,
    SequenceGroup,
)
from moe.engine.runner import Outcome
from moe.errors import RankError, StructureError
from moe.network.kv_cache import KVCache
from moe.parallel.transport import Message
from moe.sampling.sampler import Token
from moe.sequence import RunningSequence
from offload.errors import OffloadError


class RemoteCache(KVCache):
    """Keys and values that another rank holds; freed there when this handle is garbage."""

    def __init__(self, desk: OrderQueue, capacity: int, length: int = 0) -> None:
        super().__init__(capacity)
        self.length = length
        self.id = desk.new_id()
        self._desk = desk
        weakref.finalize(self, desk.caches.append, ["free", self.id]).atexit = False

    def fork(self, capacity: int, length: int) -> RemoteCache:
        copy = RemoteCache(self._desk, capacity, length)
        self._desk.caches.append(["copy", copy.id, self.id, capacity, length])
        return copy


class OrderQueue:
    """Orders for one rank, and its replies.

    Attributes:
        caches: what is to be done with keys and values before the next step.
    """

    def __init__(self) -> None:
        self.caches: deque[list[Any]] = deque()  # handles may become garbage in any thread
        self._numbers = itertools.count()
        self._ids: dict[RunningSequence, int] = {}
        self._known: dict[int, RunningSequence] = {}
        self._ended: list[int] = []
        self._batch: PrefillBatch | None = None
        self._made: dict[SequenceGroup, list[RemoteCache]] = {}

    def new_id(self) -> int:
        return next(self._numbers)

    @property
    def has_orders(self) -> bool:
        """Something is to be freed there, step or no step."""
        return bool(self.caches or self._ended)

    def forget(self, sequences: Sequence[RunningSequence]) -> None:
        """They have ended, or nobody waits for them any more."""
        for sequence in sequences:
            number = self._ids.pop(sequence, None)
            if number is not None:
                del self._known[number]
                self._ended.append(number)

    def order(self, step: ScheduledStep) -> Message:
        """The rank's part of a step."""
        chunks = step.prefill.chunks if step.prefill is not None else []
        takes_part = [*step.decode, *(s for chunk in chunks for s in chunk.group.sequences)]
        message: Message = {"new": [self._introduce(s) for s in takes_part if s not in self._ids]}
        message["decode"] = [[self._ids[s], _cache_id(s.cache)] for s in step.decode]
        message["spare"] = step.spare_tokens if step.spare_tokens != float("inf") else None
        message["prefill"] = None if step.prefill is None else self._batch_order(step.prefill)
        message["caches"] = [self.caches.popleft() for _ in range(len(self.caches))]
        message["ended"], self._ended = self._ended, []
        return message

    def outcomes(self, reply: Message, step: ScheduledStep) -> list[Outcome]:
        """What the rank's reply says, for `Engine.take_in`."""
        outcomes: list[Outcome] = []
        for number, tokens, error, prompt in reply["outcomes"]:
            sequence = self._known.get(number)
            if sequence is None:
                continue
            if prompt is not None:
                sequence.prompt_logprobs = [token and _token(token) for token in prompt]
            outcomes.append((sequence, _error(*error) if error else list(map(_token, tokens))))
        self._settle_batch(step.prefill, {s for s, got in outcomes if isinstance(got, Exception)})
        for sequence, tokens in outcomes:
            if sequence.cache is not None and not isinstance(tokens, Exception):
                read = len(sequence.prompt_token_ids) + len(sequence.token_ids)
                sequence.cache.length = read + len(tokens) - 1
        return outcomes

    def _introduce(self, sequence: RunningSequence) -> Message:
        number = self._ids[sequence] = self.new_id()
        self._known[number] = sequence
        sampler = sequence.sampler
        return {
            "id": number,
            "prompt": sequence.prompt_token_ids,
            "tokens": list(sequence.token_ids),
            "max_new_tokens": sequence.max_new_tokens,
            "params": asdict(sampler.params),
            "index": sampler.index,
        }

    def _batch_order(self, batch: PrefillBatch) -> Message:
        if batch is self._batch:
            return {"layer_group": batch.layer_group}
        self._batch = batch
        self._made = {}
        chunks = [self._chunk_order(chunk) for chunk in batch.chunks]
        return {"layer_group": batch.layer_group, "pauses": batch.pauses, "chunks": chunks}

    def _chunk_order(self, chunk: PromptChunk) -> Message:
        group = chunk.group
        if group.cache is None:
            group.cache = RemoteCache(self, group.sequences[0].capacity)
        made = [RemoteCache(self, s.capacity) for s in group.sequences[1:] if chunk.is_last]
        self._made[group] = made
        return {
            "sequences": [self._ids[sequence] for sequence in group.sequences],
            "caches": [_cache_id(group.cache), *(cache.id for cache in made)],
            "start": group.num_read,
            "size": len(chunk.token_ids),
            "is_last": chunk.is_last,
            "scored": group.prompt_logprobs is not None,
        }

    def _settle_batch(self, batch: PrefillBatch | None, failed: set[RunningSequence]) -> None:
        """Hand the state of prompts that have been read to their sequences."""
        if batch is None or not batch.is_last_layer_group:
            return
        for chunk in batch.chunks:
            group = chunk.group
            if chunk.group.cancelled:
                continue
            if group.sequences[0] in failed:
                group.cache = None
            elif chunk.is_last:
                caches, group.cache = [group.cache, *self._made[group]], None
                for sequence, cache in zip(group.sequences, caches, strict=True):
                    sequence.cache = cache
        self._batch, self._made = None, {}


def _cache_id(cache: object) -> int:
    assert isinstance(cache, RemoteCache), cache
    return cache.id


def _error(name: str, text: str) -> Exception:
    if name == OffloadError.__name__:  # the server tells it from faults of our own
        return OffloadError(text)
    if name == StructureError.__name__:  # nor is this one
        return StructureError(text)
    return RankError(text if name == RankError.__name__ else f"{name}: {text}")


def _token(fields: list[Any]) -> Token:
    number, logprob, top, is_last = fields
    likely = None if top is None else tuple((i, p) for i, p in top)
    return Token(number, logprob, likely, is_last)


# ---- One rank as rank 0 plans it: its scheduler, and the orders that come of it.

_FORESEEN = 1024
"""Most new tokens that a request counts for: a limit of a whole context says nothing of its length.
"""


class RemoteRunner:
    """Stands where an engine has its runner, for sequences that other ranks compute."""

    def run(self, step: ScheduledStep) -> list[Outcome]:
        raise AssertionError("this engine plans only")

    def keep_prefill(self, batch: PrefillBatch | None) -> None:
        """The next order says what is read."""


@dataclass
class RankScheduler:
    """A rank's sequences.

    Args:
        desk: writes orders, and reads replies.
        engine: plans; its runner is `RemoteRunner`.
    """

    desk: OrderQueue
    engine: Engine

    def plan(self) -> tuple[ScheduledStep, Message]:
        """The rank's next step, and how it is told."""
        step = self.engine.schedule()
        used = self.engine.scheduler.num_used_tokens() + len(step.decode)
        return step, self.desk.order(step) | {"used": used}

    def take_in(self, reply: Message, step: ScheduledStep) -> list[Event]:
        """What became of the step."""
        events = self.engine.process_outputs(self.desk.outcomes(reply, step))
        self.desk.forget([sequence for sequence, event in events if is_last(event)])
        return events

    def cost(self, group: SequenceGroup) -> float:
        """Tokens to be read and made here with this group, but for those that are known."""
        scheduler = self.engine.scheduler
        groups = [*self._groups(), group]
        unread = sum(other.num_tokens - other.num_read for other in groups)
        sequences = [*scheduler.running, *(s for other in groups for s in other.sequences)]
        unsaid = sum(min(s.max_new_tokens - len(s.token_ids), _FORESEEN) for s in sequences)
        known = 0
        if scheduler.prefixes is not None:
            known = scheduler.prefixes.num_cached(group.sequences[0].salt, group.token_ids)
        return unread + unsaid - known

    def unfinished(self) -> list[SequenceGroup]:
        """Everything that has not ended, as if nothing of it had been read."""
        groups = [*self._groups(), *(SequenceGroup([s]) for s in self.engine.scheduler.running)]
        for group in groups:
            group.restart()
            for sequence in group.sequences:
                sequence.cache = None
        return [group for group in groups if not group.cancelled]

    def _groups(self) -> list[SequenceGroup]:
        """Prompts that wait or are being read."""
        scheduler = self.engine.scheduler
        chunks = scheduler.prefilling.chunks if scheduler.prefilling is not None else []
        return [*scheduler.waiting, *(chunk.group for chunk in chunks)]


def layers_of(steps: Iterable[ScheduledStep], num_layers: int) -> tuple[int, int]:
    """First MoE layer that anybody visits in a step, and the one after the last."""
    spans = []
    for step in steps:
        if step.decode:
            return 0, num_layers
        if (batch := step.prefill) is not None:
            ends = (*batch.pauses, num_layers)
            spans.append(
                (
                    batch.pauses[batch.layer_group - 1] if batch.layer_group else 0,
                    ends[batch.layer_group],
                )
            )
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else (0, 0)
