"""What rank 0 tells a rank to do in a step, and what it makes of the reply.

Rank 0 has the whole of every sequence: prompt, tokens, text, its turn. The rank that computes it
has a mirror (`moe.parallel.mirror`): prompt and tokens, sampler, keys and values. Here are handles
on those, so that the scheduler plans for other ranks as it does for its own.

An order is JSON: ``new`` sequences, ``caches`` to copy or to free, ``ended`` sequences, who
decodes, and the wave that is read.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moe.engine.reading import Outcome
from moe.engine.sequence import RunningSequence
from moe.engine.wave import Group, Piece, Step, Wave
from moe.errors import RankError, StructureError
from moe.kv import SequenceKV
from moe.parallel.wire import Message
from moe.sampling.logprobs import Token
from offload.errors import OffloadError


class RemoteCache(SequenceKV):
    """Keys and values that another rank holds; freed there when this handle is garbage."""

    def __init__(self, desk: Desk, capacity: int, length: int = 0) -> None:
        super().__init__(capacity)
        self.length = length
        self.id = desk.new_id()
        self._desk = desk
        weakref.finalize(self, desk.caches.append, ["free", self.id]).atexit = False

    def fork(self, capacity: int, length: int) -> RemoteCache:
        copy = RemoteCache(self._desk, capacity, length)
        self._desk.caches.append(["copy", copy.id, self.id, capacity, length])
        return copy


class Desk:
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
        self._wave: Wave | None = None
        self._made: dict[Group, list[RemoteCache]] = {}

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

    def order(self, step: Step) -> Message:
        """The rank's part of a step."""
        pieces = step.wave.pieces if step.wave is not None else []
        takes_part = [*step.decode, *(s for piece in pieces for s in piece.group.sequences)]
        message: Message = {"new": [self._introduce(s) for s in takes_part if s not in self._ids]}
        message["decode"] = [[self._ids[s], _cache_id(s.cache)] for s in step.decode]
        message["spare"] = step.spare_tokens if step.spare_tokens != float("inf") else None
        message["wave"] = None if step.wave is None else self._wave_order(step.wave)
        message["caches"] = [self.caches.popleft() for _ in range(len(self.caches))]
        message["ended"], self._ended = self._ended, []
        return message

    def outcomes(self, reply: Message, step: Step) -> list[Outcome]:
        """What the rank's reply says, for `Engine.take_in`."""
        outcomes: list[Outcome] = []
        for number, tokens, error, prompt in reply["outcomes"]:
            sequence = self._known.get(number)
            if sequence is None:
                continue
            if prompt is not None:
                sequence.prompt_logprobs = [token and _token(token) for token in prompt]
            outcomes.append((sequence, _error(*error) if error else list(map(_token, tokens))))
        self._settle_wave(step.wave, {s for s, got in outcomes if isinstance(got, Exception)})
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

    def _wave_order(self, wave: Wave) -> Message:
        if wave is self._wave:
            return {"stage": wave.stage}
        self._wave = wave
        self._made = {}
        pieces = [self._piece_order(piece) for piece in wave.pieces]
        return {"stage": wave.stage, "pauses": wave.pauses, "pieces": pieces}

    def _piece_order(self, piece: Piece) -> Message:
        group = piece.group
        if group.cache is None:
            group.cache = RemoteCache(self, group.sequences[0].capacity)
        made = [RemoteCache(self, s.capacity) for s in group.sequences[1:] if piece.is_last]
        self._made[group] = made
        return {
            "sequences": [self._ids[sequence] for sequence in group.sequences],
            "caches": [_cache_id(group.cache), *(cache.id for cache in made)],
            "start": group.num_read,
            "size": len(piece.token_ids),
            "is_last": piece.is_last,
            "scored": group.prompt_logprobs is not None,
        }

    def _settle_wave(self, wave: Wave | None, failed: set[RunningSequence]) -> None:
        """Hand the state of prompts that have been read to their sequences."""
        if wave is None or not wave.is_last_stage:
            return
        for piece in wave.pieces:
            group = piece.group
            if piece.group.cancelled:
                continue
            if group.sequences[0] in failed:
                group.cache = None
            elif piece.is_last:
                caches, group.cache = [group.cache, *self._made[group]], None
                for sequence, cache in zip(group.sequences, caches, strict=True):
                    sequence.cache = cache
        self._wave, self._made = None, {}


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
