"""Prompts that wait, and how they become waves: prompts that are read together.

- ``whole``: whole prompts, all layers in one step.
- ``chunked``: a token budget a step, shared with decoding; prompts are cut to fill it
  (Sarathi-Serve: decodes never wait, chunks re-read the experts).
- ``layered``: whole prompts, but one group of layers a step, so each expert is read once a wave
  (arXiv 2510.08055; `moe.engine.prefill_mode` cuts the groups); the wave sleeps in its lane in
  between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe.engine.prefill_mode import ChoosePauses, PrefillMode
from moe.errors import RankError, RequestError
from moe.network.backbone import Backbone
from moe.network.kv_cache import SequenceCache, Work
from moe.network.lanes import ExpertsRunner, Lane, run_lanes
from moe.sampling.sampler import Token, score
from moe.sequence import RunningSequence
from moe.settings import PrefillSettings
from offload.errors import OffloadError


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that continue one prompt; the prompt is read once for all of them.

    Attributes:
        sequences: ``n`` samples; one, if it was preempted after its first token. What it has
            generated is not read with the prompt, but by later steps, as it was the first time.
        num_read: tokens of `token_ids` that earlier waves have read.
        cache: state of the prompt while it is being read.
        prompt_logprobs: what is known so far of the prompt's tokens; None where nobody asked.
    """

    sequences: list[RunningSequence]
    num_read: int = 0
    cache: SequenceCache | None = None
    prompt_logprobs: list[Token | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """What is to be read as a prompt."""
        return self.sequences[0].prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and those generated already."""
        first = self.sequences[0]
        return len(first.prompt_token_ids) + len(first.token_ids)

    @property
    def num_kv(self) -> int:
        """Tokens of memory that the sequences hold once their prompt has been read."""
        return self.num_tokens * len(self.sequences)

    @property
    def turn(self) -> tuple[int, int]:
        """Its place in the queue, the same for all of its sequences."""
        return self.sequences[0].turn

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it any more."""
        return all(sequence.cancelled for sequence in self.sequences)

    def check_fits(self, kv_tokens: float, max_batch_size: int) -> None:
        """Raises `RequestError` if it could never run, whatever else finishes first."""
        num_samples = len(self.sequences)
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in self.sequences)
        needed = max(longest, self.num_kv + num_samples)
        if needed > kv_tokens:
            raise RequestError(
                f"the request needs memory for {needed} tokens and there is room for {kv_tokens} "
                "(memory.kv_tokens, memory.kv_gib); shorten it, ask for fewer samples or make room"
            )
        if num_samples > max_batch_size:
            raise RequestError(
                f"n is {num_samples} and engine.max_batch_size is {max_batch_size}; "
                "ask for fewer samples or raise engine.max_batch_size"
            )

    def score(self, logits_TV: Tensor) -> None:
        """Take in the logits of the next T tokens of a prompt whose log probabilities are wanted.

        Row i tells of the token after it; the last row of the prompt tells of a new one.
        """
        count = self.sequences[0].sampler.params.prompt_logprobs
        assert self.prompt_logprobs is not None
        assert count is not None
        self.prompt_logprobs = self.prompt_logprobs or [None]
        start = len(self.prompt_logprobs)
        following = self.token_ids[start : start + len(logits_TV)]
        self.prompt_logprobs += score(following, logits_TV[: len(following)], count)

    def forget(self) -> None:
        """Give up what has been read."""
        self.num_read, self.cache = 0, None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a group's prompt that one wave reads.

    Attributes:
        token_ids: the tokens; they begin at ``group.num_read``.
        is_last: the prompt ends with them, so the next token can be sampled.
    """

    group: SequenceGroup
    token_ids: list[int]
    is_last: bool

    @property
    def span(self) -> range:
        """The positions of the tokens."""
        return range(self.group.num_read, self.group.num_read + len(self.token_ids))


@dataclass(eq=False)
class PrefillBatch:
    """Prompts that are read together, in order of their turns.

    Attributes:
        pieces: what is read.
        pauses: MoE layers before whose experts it sleeps until the next step.
        stage: what runs in this step: up to the pause of this index, or to the end.
    """

    pieces: list[PromptChunk]
    pauses: tuple[int, ...] = ()
    stage: int = 0

    @property
    def num_stages(self) -> int:
        """Steps that the wave takes."""
        return len(self.pauses) + 1

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


class PrefillBatchBuilder:
    """A wave in the making.

    Args:
        prefill: how many tokens a wave has.
        mode: how its prompts are read.
        num_decoding: running sequences, which share the budget of ``chunked``.
        can_cut: a prompt may be read in several waves.

    Attributes:
        pieces: what it reads so far.
    """

    def __init__(
        self, prefill: PrefillSettings, mode: PrefillMode, num_decoding: int, *, can_cut: bool
    ) -> None:
        self.pieces: list[PromptChunk] = []
        self._mode = mode
        self._can_cut = can_cut
        self._num_left = prefill.wave_tokens
        if mode == "chunked":
            self._num_left = max(prefill.chunk_tokens - num_decoding, 1)
        # Every token whose log probability is wanted costs a row of logits over the vocabulary.
        self._num_scored_left = prefill.chunk_tokens

    def take(self, group: SequenceGroup) -> bool:
        """Add what fits of a prompt; False: it has to wait for the next wave."""
        scored = group.prompt_logprobs is not None
        limit = min(self._num_left, self._num_scored_left) if scored else self._num_left
        token_ids = group.token_ids[group.num_read :]
        too_long = len(token_ids) > limit
        cut = too_long and self._can_cut and (self._mode != "whole" or scored)
        fills_up = limit > 0 and cut and self._mode == "chunked"
        if too_long and self.pieces and not fills_up:
            return False
        if cut:
            token_ids = token_ids[:limit]
        self.pieces.append(PromptChunk(group, token_ids, is_last=not cut))
        self._num_left -= len(token_ids)
        self._num_scored_left -= len(token_ids) if scored else 0
        return True

    def wave(self, pauses: ChoosePauses) -> PrefillBatch:
        """The finished wave; a layered one takes a step for each group of layers."""
        if self._mode != "layered":
            return PrefillBatch(self.pieces)
        return PrefillBatch(self.pieces, pauses([piece.span for piece in self.pieces]))


@dataclass(frozen=True)
class ScheduledStep:
    """Who takes part in a step: running sequences by one token each, and a stage of a wave.

    Attributes:
        spare_tokens: tokens that keys and values have room for, beyond those.
        halves: on several ranks, compute one half while rows of the other travel
            (`moe.engine.halves`).
    """

    decode: list[RunningSequence]
    wave: PrefillBatch | None
    spare_tokens: float = 0
    halves: bool = False


# ---- Lanes that read a wave of prompts, over one step or several, and what comes of a forward
# pass.

Outcome = tuple[RunningSequence, list[Token] | Exception]
"""A sequence and its next tokens, or why there are none."""


class PrefillPass:
    """A wave in flight; its lanes are asleep between stages.

    Args:
        wave: what is read.
        backbone: reads it.
    """

    def __init__(self, wave: PrefillBatch, backbone: Backbone) -> None:
        self.wave = wave
        self._backbone = backbone
        self._work = [_work(piece, backbone) for piece in wave.pieces]
        self.lanes = backbone.lanes(self._work, "prefill")

    def pauses(self) -> dict[Lane[list[Tensor]], int]:
        """The layer at which the lanes go to sleep in this step; none in the last one."""
        if self.wave.is_last_stage:
            return {}
        return dict.fromkeys(self.lanes, self.wave.pauses[self.wave.stage])

    def cancel(self) -> None:
        """Free what the lanes hold."""
        for lane in self.lanes:
            lane.cancel()

    def finish(self, run_experts: ExpertsRunner) -> list[Outcome]:
        """First tokens of the prompts that have been read to the end, and failures."""
        outcomes: list[Outcome] = []
        logits = results(self.lanes, self._work, self._backbone, run_experts)
        for piece, work, rows in zip(self.wave.pieces, self._work, logits, strict=True):
            if not piece.group.cancelled:
                outcomes += _finish_piece(piece, work.cache, _score(piece.group, rows))
        return outcomes


def _work(piece: PromptChunk, backbone: Backbone) -> Work:
    group = piece.group
    if group.cache is None:
        group.cache = backbone.new_cache(group.sequences[0].capacity)
    return Work(piece.token_ids, group.cache, all_logits=group.prompt_logprobs is not None)


def _score(group: SequenceGroup, rows: Tensor | Exception) -> Tensor | Exception:
    """Keep the log probabilities of the prompt's tokens, where somebody wants them."""
    if group.prompt_logprobs is None or isinstance(rows, Exception):
        return rows
    try:
        group.score(rows)
    except Exception as error:
        return error
    return rows


def _finish_piece(
    piece: PromptChunk, cache: SequenceCache, rows: Tensor | Exception
) -> list[Outcome]:
    group = piece.group
    if isinstance(rows, Exception):
        group.cache = None
        return [(sequence, rows) for sequence in group.sequences]
    if not piece.is_last:
        return []
    group.cache = None
    for sequence in group.sequences:
        is_first = sequence is group.sequences[0]
        sequence.cache = cache if is_first else cache.fork(sequence.capacity, cache.length)
        sequence.prompt_logprobs = group.prompt_logprobs
    # Who was preempted has been given what comes next.
    return [
        (sequence, [] if sequence.token_ids else sample(sequence, rows))
        for sequence in group.sequences
    ]


def results(
    lanes: Sequence[Lane[list[Tensor]]],
    work: Sequence[Work],
    backbone: Backbone,
    run_experts: ExpertsRunner,
) -> list[Tensor | Exception]:
    """Logits of each piece of work, or why there are none, of lanes that have finished.

    A pass over several sequences that lacked an expert is read again, a lane for each of them, so
    that only those fail that need it.
    """
    rows = _lane_logits(lanes, len(work))
    if len(lanes) < len(work) and any(isinstance(row, OffloadError) for row in rows):
        lanes = [lane for item in work for lane in backbone.lanes([item], lanes[0].phase)]
        run_lanes(lanes, run_experts)
        rows = _lane_logits(lanes, len(work))
    return _without_lost(rows, lanes, work)


def _without_lost(
    rows: list[Tensor | Exception], lanes: Sequence[Lane[list[Tensor]]], work: Sequence[Work]
) -> list[Tensor | Exception]:
    """The same, with an error for work that an expert was missing for (`Visit.lost`)."""
    share = len(work) // len(lanes) if lanes else 0
    for at, lane in enumerate(lanes):
        start = 0
        for index in range(at * share, (at + 1) * share) if lane.lost else ():
            end = start + len(work[index].token_ids)
            reasons = [lane.lost[row] for row in sorted(lane.lost) if start <= row < end]
            if reasons and not isinstance(rows[index], Exception):
                kind = OffloadError if reasons[0].unreadable else RankError
                rows[index] = kind(reasons[0].reason)
            start = end
    return rows


def _lane_logits(lanes: Sequence[Lane[list[Tensor]]], num_work: int) -> list[Tensor | Exception]:
    """Logits of each piece of work as `Backbone.lanes` gives them, or what ended its lane."""
    rows: list[Tensor | Exception] = []
    for lane in lanes:
        try:
            rows += lane.result()
        except Exception as error:
            rows += [error] * (num_work // len(lanes))
    return rows


def sample(sequence: RunningSequence, rows: Tensor | Exception) -> list[Token] | Exception:
    """The token after the last row of ``(T, V)`` logits."""
    if isinstance(rows, Exception):
        return rows
    try:
        return [sequence.sample(rows[-1])]
    except Exception as error:
        return error
