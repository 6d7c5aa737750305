"""Which sequences take part in a step: admission, reading of prompts, preemption.

Prompts are read in waves, one at a time. What a wave is depends on the prefill mode:

- ``whole``: as many whole prompts as fit, all layers in one step.
- ``chunked``: a token budget a step, shared with decoding; prompts are cut to fill it
  (Sarathi-Serve: decodes never wait, chunks re-read the experts).
- ``layered``: whole prompts, but one group of layers a step, so each expert is read once a wave
  (arXiv 2510.08055, ``G = ceil(tokens / 512)`` groups); the wave sleeps in its lane in between.
- ``auto``: layered or chunked, whichever is predicted to read fewer experts (`moe.prefill`).

Every running sequence gets a token in every step. Memory is counted in tokens of keys and values:
sequences are admitted while their prompts fit, and when a step does not fit, the youngest gives up
its memory and is read again later: half-read prompts first, then the wave, then running sequences
(known prefixes before all of them).
The oldest running sequence is never preempted, so everybody finishes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from moe.errors import RequestError
from moe.kv import SequenceCache
from moe.prefill import Mode, num_stages
from moe.prefix import PrefixCache
from moe.sequence import RunningSequence
from moe.settings import PrefillSettings


@dataclass(eq=False)
class Group:
    """Sequences that continue one prompt; the prompt is read once for all of them.

    Attributes:
        sequences: ``n`` samples; one, if it was preempted after its first token.
        num_read: tokens of `token_ids` that earlier waves have read.
        cache: state of the prompt while it is being read.
    """

    sequences: list[RunningSequence]
    num_read: int = 0
    cache: SequenceCache | None = None

    @property
    def token_ids(self) -> list[int]:
        """What is to be read before the next token can be sampled."""
        first = self.sequences[0]
        return first.prompt_token_ids + first.token_ids

    @property
    def num_kv(self) -> int:
        """Tokens of memory that the sequences hold once their prompt has been read."""
        return len(self.token_ids) * len(self.sequences)

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it any more."""
        return all(sequence.cancelled for sequence in self.sequences)

    def forget(self) -> None:
        """Give up what has been read."""
        self.num_read, self.cache = 0, None


@dataclass(frozen=True)
class Piece:
    """Tokens of a group's prompt that one wave reads.

    Attributes:
        token_ids: the tokens; they begin at ``group.num_read``.
        is_last: the prompt ends with them, so the next token can be sampled.
    """

    group: Group
    token_ids: list[int]
    is_last: bool


@dataclass(eq=False)
class Wave:
    """Prompts that are read together.

    Attributes:
        pieces: what is read.
        num_stages: steps that the wave takes, one group of layers each.
        stage: the one that runs in this step.
    """

    pieces: list[Piece]
    num_stages: int = 1
    stage: int = 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class Step:
    """Who takes part in a step: running sequences by one token each, and a stage of a wave."""

    decode: list[RunningSequence]
    wave: Wave | None


class Scheduler:
    """Plans steps.

    Args:
        prefill: how prompts are read.
        max_batch_size: sequences in memory at once.
        kv_tokens: tokens of keys and values in memory at once; None for no limit.
        num_layers: MoE layers, the most stages a wave can have.
        can_cut: a prompt may be read in several waves.
        choose_mode: the mode of the next wave, from the prompt tokens that wait for it and the
            number of running sequences; None where ``prefill.mode`` is not ``auto``.
        prefixes: prompts that were read before; None to read every prompt from its start.
    """

    def __init__(
        self,
        prefill: PrefillSettings,
        max_batch_size: int,
        kv_tokens: int | None,
        num_layers: int,
        *,
        can_cut: bool = True,
        choose_mode: Callable[[int, int], Mode] | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.prefill = prefill
        self.max_batch_size = max_batch_size
        self.kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self.num_layers = num_layers
        self.can_cut = can_cut
        self._choose_mode = choose_mode
        self.prefixes = prefixes
        self.waiting: deque[Group] = deque()
        self.running: list[RunningSequence] = []
        self.wave: Wave | None = None

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.wave)

    def submit(self, group: Group) -> None:
        """Queue a group.

        Raises:
            RequestError: it could never run, whatever else finishes first.
        """
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in group.sequences)
        needed = max(longest, group.num_kv + len(group.sequences))
        if needed > self.kv_tokens:
            raise RequestError(
                f"the request needs memory for {needed} tokens and memory.kv_tokens is "
                f"{self.kv_tokens}; shorten it, ask for fewer samples or raise memory.kv_tokens"
            )
        if len(group.sequences) > self.max_batch_size:
            raise RequestError(
                f"n is {len(group.sequences)} and engine.max_batch_size is {self.max_batch_size}; "
                "ask for fewer samples or raise engine.max_batch_size"
            )
        self.waiting.append(group)

    def plan(self) -> Step:
        """The next step. `finish` must follow with what became of it."""
        while self.num_used_tokens() + len(self.running) > self.kv_tokens:
            if not self._give_up_youngest():
                break
        if self.wave is not None:
            self.wave.stage += 1
        else:
            self.wave = self._next_wave()
        return Step(list(self.running), self.wave)

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
                    self.waiting.appendleft(piece.group)
            self.wave = None
        self.running = [sequence for sequence in self.running if sequence not in gone]

    def drop(self, group: Group) -> None:
        """Forget a group between steps, wherever it is; a wave that reads it is not disturbed."""
        for sequence in group.sequences:
            sequence.cancelled = True
        self.running = [s for s in self.running if s not in group.sequences]
        self.waiting = deque(
            other for other in self.waiting if other.sequences[0] not in group.sequences
        )

    def num_used_tokens(self) -> float:
        """Tokens of memory held by running sequences, prompts being read and known prefixes."""
        pieces = self.wave.pieces if self.wave is not None else []
        running = sum(len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in self.running)
        half_read = sum(group.num_read for group in self.waiting)
        wave = sum(piece.group.num_kv for piece in pieces)
        return running + half_read + wave + (self.prefixes.num_tokens if self.prefixes else 0)

    def _make_room(self, needed: int) -> bool:
        """Whether ``needed`` more tokens fit, once known prefixes have given way."""
        while self.num_used_tokens() + needed > self.kv_tokens:
            if self.prefixes is None or not self.prefixes.evict():
                return False
        return True

    def _reuse_prefix(self, group: Group) -> None:
        if self.prefixes is None or group.num_read:
            return
        first = group.sequences[0]
        known = self.prefixes.take(first.salt, group.token_ids, first.capacity)
        if known is not None:
            group.cache, group.num_read = known, known.length

    def _give_up_youngest(self) -> bool:
        """Free a known prefix, or else the memory of whoever came last.

        Returns:
            False if only the oldest running sequence is left.
        """
        half_read = next((group for group in self.waiting if group.num_read), None)
        if self.prefixes is not None and self.prefixes.evict():
            pass
        elif half_read is not None:
            half_read.forget()
        elif self.wave is not None:
            for piece in reversed(self.wave.pieces):
                piece.group.forget()
                if not piece.group.cancelled:
                    self.waiting.appendleft(piece.group)
            self.wave = None
        elif len(self.running) > 1:
            youngest = self.running.pop()
            youngest.cache = None
            self.waiting.appendleft(Group([youngest]))
        else:
            return False
        return True

    def _next_wave(self) -> Wave | None:
        """Take prompts from the queue, in order, while memory, batch and token budget allow."""
        if not self.waiting:
            return None
        mode = self._mode()
        budget = self._token_budget(mode)
        pieces: list[Piece] = []
        size = needed = len(self.running)
        while self.waiting and budget > 0:
            group = self.waiting[0]
            size += len(group.sequences)
            needed += len(group.sequences) + group.num_kv
            if size > self.max_batch_size or not self._make_room(needed - group.num_read):
                break
            self._reuse_prefix(group)
            left = group.token_ids[group.num_read :]
            cut = len(left) > budget and self.can_cut and mode != "whole"
            if pieces and len(left) > budget and not (cut and mode == "chunked"):
                break
            take = budget if cut else len(left)
            pieces.append(Piece(group, left[:take], is_last=not cut))
            budget -= take
            self.waiting.popleft()
        if not pieces:
            return None
        tokens = sum(len(piece.token_ids) for piece in pieces)
        stages = num_stages(self.prefill, tokens, self.num_layers) if mode == "layered" else 1
        return Wave(pieces, stages)

    def _mode(self) -> Mode:
        if self._choose_mode is None:
            assert self.prefill.mode != "auto"
            return self.prefill.mode
        waiting = sum(len(group.token_ids) - group.num_read for group in self.waiting)
        return self._choose_mode(min(waiting, self.prefill.wave_tokens), len(self.running))

    def _token_budget(self, mode: Mode) -> int:
        if mode == "chunked":
            return max(self.prefill.chunk_tokens - len(self.running), 1)
        return self.prefill.wave_tokens
