"""Sequences that another rank computes: the coordinator's handles, the worker's copy, the orders.

The coordinator (rank 0) has the whole of every sequence: prompt, tokens, text, queue key. The rank
that computes it has a copy (`EngineMirror`): prompt and tokens, sampler, keys and values. For each
rank the coordinator has a `RankScheduler`: an `Engine` that only plans, and an `OrderQueue` that
writes its steps as orders and turns replies into outcomes. A `RemoteCache` stands for keys and
values on the rank.

An order is JSON: ``new`` sequences, ``caches`` to copy or to free, ``ended`` sequences,
sequences to ``decode``, and the ``prefill`` batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from moe.engine.borrowing import KVBorrowing
from moe.engine.engine import Engine, Event, is_last
from moe.engine.in_flight import Outcome, StepInFlight
from moe.engine.prefill_batch import (
    PrefillBatch,
    PromptChunk,
    ScheduledStep,
    SequenceGroup,
)
from moe.engine.runner import ModelRunner
from moe.errors import RankError, StructureError
from moe.kv.cache import SequenceCache
from moe.kv.layout import States
from moe.kv.ledger import BlockLedger
from moe.kv.tables import TableCache
from moe.parallel.transport import Message
from moe.sampling.batch import Token
from moe.sampling.constraint import Structures
from moe.sampling.params import SamplingParams, Structure, ThinkingBudget
from moe.sampling.sampler import Sampler
from moe.sequence import RunningSequence
from moe.text.detokenize import StopStrings
from offload.errors import OffloadError

_MOST_EXPECTED = 1024
"""Most new tokens that a request counts for: a large limit says little about the real length."""


class RemoteRunner:
    """The runner of an engine that only plans: another rank computes its steps."""

    def launch(self, step: ScheduledStep) -> StepInFlight:
        raise AssertionError("this engine plans only")

    def launch_ahead(
        self, step: ScheduledStep, tokens: Mapping[RunningSequence, Tensor]
    ) -> StepInFlight:
        raise AssertionError("this engine plans only")

    def keep_prefill(self, batch: PrefillBatch | None) -> None:
        """Nothing to cancel here: the next order says what is read."""

    def end(self, sequences: Sequence[RunningSequence]) -> None:
        """The next order says so."""

    def status(self) -> dict[str, Any]:
        return {}


@dataclass
class RankScheduler:
    """The coordinator's scheduler of one rank.

    Args:
        orders: writes orders, and reads replies.
        engine: plans; its runner is `RemoteRunner`.
    """

    orders: OrderQueue
    engine: Engine

    def schedule(self) -> tuple[ScheduledStep, Message]:
        """The rank's next step, and the order for it."""
        step = self.engine.schedule()
        used = self.engine.scheduler.num_used_tokens() + len(step.decode)
        return step, self.orders.order(step) | {"used": used}

    def process_reply(self, reply: Message, step: ScheduledStep) -> list[Event]:
        """As `Engine.process_outputs`, with the rank's reply."""
        events = self.engine.process_outputs(self.orders.outcomes(reply, step))
        self.orders.end([sequence for sequence, event in events if is_last(event)])
        return events

    def cost(self, group: SequenceGroup) -> float:
        """Tokens to be read and generated here with this group, less those in the prefix cache."""
        scheduler = self.engine.scheduler
        groups = [*self._groups(), group]
        unread = sum(other.num_tokens - other.num_read for other in groups)
        sequences = [*scheduler.running, *(s for other in groups for s in other.sequences)]
        new = sum(min(s.max_new_tokens - len(s.token_ids), _MOST_EXPECTED) for s in sequences)
        cached = 0
        if scheduler.prefixes is not None:
            cached = scheduler.prefixes.num_cached(group.sequences[0].salt, group.token_ids)
        return unread + new - cached

    def unfinished(self) -> list[SequenceGroup]:
        """All groups that have not ended, reset to be read again from their start."""
        groups = [*self._groups(), *(SequenceGroup([s]) for s in self.engine.scheduler.running)]
        for group in groups:
            group.release()
        return [group for group in groups if not group.cancelled]

    def _groups(self) -> list[SequenceGroup]:
        """Prompts that wait or are being read."""
        scheduler = self.engine.scheduler
        chunks = scheduler.prefilling.chunks if scheduler.prefilling is not None else []
        return [*scheduler.waiting, *(chunk.group for chunk in chunks)]


class RemoteCache(TableCache):
    """Handle on keys and values of another rank; when it is garbage, the rank frees them.

    It lists blocks without rows where the rank's sequence lists blocks with rows, by the same code.
    So memory that sequences share there counts once here, and what is given up there is free here.
    """

    def __init__(self, orders: OrderQueue, capacity: int) -> None:
        super().__init__(capacity, orders.pool)
        self.id = orders.new_id()
        self._orders = orders
        weakref.finalize(self, orders.caches.append, ["free", self.id]).atexit = False

    @property
    def state_tokens(self) -> int:
        """Tokens of memory of a recurrent state, as the rank says."""
        return self._orders.state_tokens

    @property
    def fork_tokens(self) -> int:
        return super().fork_tokens if self._orders.shares else 0

    def advance(
        self, states: Mapping[int, States], tokens: int, snapshots: Sequence[int] = ()
    ) -> None:
        if tokens:  # as the rank, when it wrote them
            self.reserve(min(self.length + tokens, self.capacity))
        super().advance(states, tokens, snapshots)

    def share_with(self, copy: RemoteCache, length: int) -> None:
        """The rank has made ``copy`` a fork of this sequence's first ``length`` tokens."""
        if self._orders.shares:
            self.share_blocks(copy, length)
        copy.length = length
        self.copy_states(copy)

    def fork(self, capacity: int, length: int) -> RemoteCache:
        assert length == self.longest_fork(length)
        copy = RemoteCache(self._orders, capacity)
        self.share_with(copy, length)
        self._orders.caches.append(["copy", copy.id, self.id, capacity, length])
        return copy


class OrderQueue:
    """Writes orders for one rank, and reads its replies.

    Args:
        pool: of blocks as the rank has them; None: it keeps rows in buffers, which forks copy.

    Attributes:
        caches: copies and frees of keys and values, to be done before the next step.
        state_tokens: of the rank's sequences, see `KVCache`; 0 without recurrent layers.
        shares: sequences of the rank share blocks.
        pool: counts the blocks of the rank's sequences.
    """

    def __init__(self, pool: BlockLedger | None = None) -> None:
        self.shares = pool is not None
        self.pool = BlockLedger() if pool is None else pool.counting()
        self.state_tokens = 0
        self.caches: deque[list[Any]] = deque()  # handles may become garbage in any thread
        self._numbers = itertools.count()
        self._ids: dict[RunningSequence, int] = {}
        self._known: dict[int, RunningSequence] = {}
        self._ended: list[int] = []
        self._batch: PrefillBatch | None = None
        self._branches: dict[SequenceGroup, list[RemoteCache]] = {}

    def new_id(self) -> int:
        return next(self._numbers)

    @property
    def has_orders(self) -> bool:
        """Return whether the rank has something to free."""
        return bool(self.caches or self._ended)

    def end(self, sequences: Sequence[RunningSequence]) -> None:
        """Let the rank forget sequences that have ended or were cancelled."""
        for sequence in sequences:
            number = self._ids.pop(sequence, None)
            if number is not None:
                del self._known[number]
                self._ended.append(number)

    def order(self, step: ScheduledStep) -> Message:
        """The rank's part of a step."""
        chunks = step.prefill.chunks if step.prefill is not None else []
        sequences = [*step.decode, *(s for chunk in chunks for s in chunk.group.sequences)]
        message: Message = {"new": [self._introduce(s) for s in sequences if s not in self._ids]}
        message["decode"] = [[self._ids[s], _remote(s.cache).id] for s in step.decode]
        message["spare"] = step.spare_tokens if step.spare_tokens != float("inf") else None
        message["prefill"] = None if step.prefill is None else self._batch_order(step.prefill)
        message["caches"] = [self.caches.popleft() for _ in range(len(self.caches))]
        message["ended"], self._ended = self._ended, []
        return message

    def outcomes(self, reply: Message, step: ScheduledStep) -> list[Outcome]:
        """The rank's reply, for `Engine.process_outputs`."""
        outcomes: list[Outcome] = []
        self.state_tokens = reply["state_tokens"]
        for number, tokens, error, prompt in reply["outcomes"]:
            sequence = self._known.get(number)
            if sequence is None:
                continue
            if prompt is not None:
                sequence.keep_prompt_logprobs([token and _token(token) for token in prompt])
            outcomes.append((sequence, _error(*error) if error else list(map(_token, tokens))))
        self._settle_batch(step.prefill, {s for s, got in outcomes if isinstance(got, Exception)})
        for sequence, length in zip(step.decode, reply["lengths"], strict=True):
            if (cache := sequence.cache) is not None:
                new = max(0, length - cache.length)
                cache.kv.advance({new: {}} if self.state_tokens else {}, new)
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
        self._branches = {}
        chunks = [self._chunk_order(chunk) for chunk in batch.chunks]
        return {"layer_group": batch.layer_group, "pauses": batch.pauses, "chunks": chunks}

    def _chunk_order(self, chunk: PromptChunk) -> Message:
        group = chunk.group
        if group.cache is None:
            group.begin(RemoteCache(self, group.sequences[0].capacity))
        branches = [RemoteCache(self, s.capacity) for s in group.sequences[1:] if chunk.is_last]
        self._branches[group] = branches
        return {
            "sequences": [self._ids[sequence] for sequence in group.sequences],
            "caches": [_remote(group.cache).id, *(cache.id for cache in branches)],
            "start": group.num_read,
            "size": len(chunk.token_ids),
            "is_last": chunk.is_last,
            "scored": group.prompt_logprobs is not None,
            "snapshots": list(group.snapshots),
            "keeps_all": group.keeps_all,
        }

    def _settle_batch(self, batch: PrefillBatch | None, failed: set[RunningSequence]) -> None:
        """Give the caches of prompts that have been read to their sequences."""
        if batch is None or not batch.is_last_layer_group:
            return
        for chunk in batch.chunks:
            group = chunk.group
            if chunk.group.cancelled:
                continue
            if group.sequences[0] in failed:
                group.restart()
                continue
            cache = _remote(group.cache)
            ends, size = chunk.snapshots, len(chunk.token_ids)
            states: dict[int, States] = {at: {} for at in (*ends, size)}
            cache.advance(states if self.state_tokens else {}, size, ends)
            if chunk.is_last:
                for branch in self._branches[group]:
                    cache.share_with(branch, cache.length)
                group.finish([cache, *self._branches[group]])
        self._batch, self._branches = None, {}


def _remote(cache: object) -> RemoteCache:
    assert isinstance(cache, RemoteCache), cache
    return cache


def _error(name: str, text: str) -> Exception:
    if name == OffloadError.__name__:  # the server answers it differently from other faults
        return OffloadError(text)
    if name == StructureError.__name__:
        return StructureError(text)
    return RankError(text if name == RankError.__name__ else f"{name}: {text}")


def _token(fields: list[Any]) -> Token:
    number, logprob, top, is_last = fields
    likely = None if top is None else tuple((i, p) for i, p in top)
    return Token(number, logprob, likely, is_last)


class EngineMirror:
    """The worker's copy of the sequences that one engine of rank 0 gave to this rank.

    Args:
        runner: computes steps.
        logits_size: V of the logits.
        structures: compiles the constraints that requests ask for.
        borrowing: lends unused memory of keys and values to experts on disk, if there are any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        logits_size: int,
        structures: Structures,
        borrowing: KVBorrowing | None = None,
    ) -> None:
        self._runner = runner
        self._logits_size = logits_size
        self._structures = structures
        self._borrowing = borrowing
        self._sequences: dict[int, RunningSequence] = {}
        self._numbers: dict[RunningSequence, int] = {}
        self._caches: dict[int, SequenceCache] = {}
        self._groups: dict[int, SequenceGroup] = {}
        self._batch: PrefillBatch | None = None
        self._batch_caches: list[list[int]] = []
        self._state_tokens = 0

    def release(self, order: Message) -> None:
        """Apply an order that no step follows."""
        self._apply(order)
        self._batch = None
        self._runner.keep_prefill(None)

    def run(self, order: Message) -> Message:
        """Apply an order and compute its step; the reply."""
        self._apply(order)
        if self._borrowing is not None:
            self._borrowing.resize_for(order["used"])
        self._batch = self._ordered_batch(order["prefill"])
        decode = [self._sequences[number] for number, _ in order["decode"]]
        for sequence, (_, cache) in zip(decode, order["decode"], strict=True):
            sequence.attach(self._caches[cache])
        spare = float("inf") if order["spare"] is None else order["spare"]
        outcomes = self._runner.run(ScheduledStep(decode, self._batch, spare))
        self._settle_batch()
        lengths = [self._caches[cache].length for _, cache in order["decode"]]
        for sequence in decode:
            sequence.release()  # `_caches` holds the state until rank 0 frees it
        return {
            "outcomes": [self._reply(outcome) for outcome in outcomes],
            "lengths": lengths,
            "state_tokens": self._state_tokens,
        }

    def _apply(self, order: Message) -> None:
        """Add new sequences, copy and free caches, remove ended sequences."""
        for fields in order["new"]:
            sequence = self._new_sequence(fields)
            self._sequences[fields["id"]] = sequence
            self._numbers[sequence] = fields["id"]
        for what, number, *source in order["caches"]:
            if what == "copy":
                origin, capacity, length = source
                self._caches[number] = self._caches[origin].fork(capacity, length)
            else:
                self._caches.pop(number, None)
        for number in order["ended"]:
            sequence = self._sequences.pop(number)
            sequence.cancel()
            self._runner.end([sequence])
            del self._numbers[sequence]
            self._groups.pop(number, None)

    def _new_sequence(self, fields: Message) -> RunningSequence:
        given = fields["params"]
        given["logit_bias"] = {int(number): bias for number, bias in given["logit_bias"].items()}
        if given["structure"] is not None:
            given["structure"] = Structure(**given["structure"])
        if given["thinking"] is not None:
            given["thinking"] = ThinkingBudget(**given["thinking"])
        params = SamplingParams(**given)
        constraint, lengths = self._structures.constraint(params), self._structures.lengths(params)
        about = (self._logits_size, fields["index"], constraint, lengths)
        sampler = Sampler(params, fields["prompt"], *about)
        sampler.replay(fields["tokens"])
        return RunningSequence(
            fields["prompt"],
            sampler,
            None,
            StopStrings(()),
            (),
            fields["max_new_tokens"],
            token_ids=fields["tokens"],
        )

    def _ordered_batch(self, order: Message | None) -> PrefillBatch | None:
        if order is None:
            return None
        if "chunks" in order:
            self._batch_caches = [chunk["caches"] for chunk in order["chunks"]]
            chunks = [self._chunk(chunk) for chunk in order["chunks"]]
            return PrefillBatch(chunks, tuple(order["pauses"]), order["layer_group"])
        assert self._batch is not None
        self._batch.layer_group = order["layer_group"]
        return self._batch

    def _chunk(self, order: Message) -> PromptChunk:
        first = order["sequences"][0]
        sequences = [self._sequences[number] for number in order["sequences"]]
        known, start = self._groups.get(first), order["start"]
        scores: list[Token | None] | None = [] if order["scored"] else None
        if start > 0 and known is not None and known.sequences == sequences:
            scores = known.prompt_logprobs
        cache = self._caches.get(order["caches"][0])
        group = SequenceGroup(sequences, start, cache, order["snapshots"], scores)
        group.keeps_all = order["keeps_all"]
        if cache is not None:
            cache.keep_all(group.keeps_all)
        self._groups[first] = group
        token_ids = group.token_ids[start : start + order["size"]]
        return PromptChunk(group, token_ids, order["is_last"])

    def _settle_batch(self) -> None:
        """Store the caches of a batch under the numbers that rank 0 gave them."""
        if self._batch is None:
            return
        for chunk, numbers in zip(self._batch.chunks, self._batch_caches, strict=True):
            group = chunk.group
            caches = [group.cache]
            if self._batch.is_last_layer_group and chunk.is_last:
                caches = [sequence.cache for sequence in group.sequences]
                self._groups.pop(self._numbers.get(group.sequences[0], -1), None)
                for sequence in group.sequences:
                    sequence.release()
            for number, cache in zip(numbers, caches, strict=False):
                if cache is not None and not group.cancelled:
                    self._caches[number] = cache
                if cache is not None and cache.recurrent:
                    self._state_tokens = cache.state_tokens
        if self._batch.is_last_layer_group:
            self._batch = None

    def _reply(self, outcome: Outcome) -> list[Any]:
        sequence, tokens = outcome
        number = self._numbers[sequence]
        if isinstance(tokens, Exception):
            return [number, None, [type(tokens).__name__, str(tokens)], None]
        prompt = sequence.take_prompt_logprobs()
        sequence.token_ids += [token.id for token in tokens]
        known = None if prompt is None else [token and _token_fields(token) for token in prompt]
        return [number, [_token_fields(token) for token in tokens], None, known]


def _token_fields(token: Token) -> list[Any]:
    return [token.id, token.logprob, token.top, token.is_last]
