"""Lanes that read a wave of prompts, over one step or several, and what comes of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe.engine.sequence import RunningSequence
from moe.engine.wave import Group, Piece, Wave
from moe.errors import RankError
from moe.kv import SequenceCache, Work
from moe.lanes import Lane, run_lanes
from moe.sampling.logprobs import Token
from moe.trunk import Trunk
from moe.visit import ExpertsRunner
from offload.errors import OffloadError

Outcome = tuple[RunningSequence, list[Token] | Exception]
"""A sequence and its next tokens, or why there are none."""


class Reading:
    """A wave in flight; its lanes are asleep between stages.

    Args:
        wave: what is read.
        trunk: reads it.
    """

    def __init__(self, wave: Wave, trunk: Trunk) -> None:
        self.wave = wave
        self._trunk = trunk
        self._work = [_work(piece, trunk) for piece in wave.pieces]
        self.lanes = trunk.lanes(self._work, "prefill")

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
        logits = results(self.lanes, self._work, self._trunk, run_experts)
        for piece, work, rows in zip(self.wave.pieces, self._work, logits, strict=True):
            if not piece.group.cancelled:
                outcomes += _finish_piece(piece, work.cache, _score(piece.group, rows))
        return outcomes


def _work(piece: Piece, trunk: Trunk) -> Work:
    group = piece.group
    if group.cache is None:
        group.cache = trunk.new_cache(group.sequences[0].capacity)
    return Work(piece.token_ids, group.cache, all_logits=group.prompt_logprobs is not None)


def _score(group: Group, rows: Tensor | Exception) -> Tensor | Exception:
    """Keep the log probabilities of the prompt's tokens, where somebody wants them."""
    if group.prompt_logprobs is None or isinstance(rows, Exception):
        return rows
    try:
        group.score(rows)
    except Exception as error:
        return error
    return rows


def _finish_piece(piece: Piece, cache: SequenceCache, rows: Tensor | Exception) -> list[Outcome]:
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
    trunk: Trunk,
    run_experts: ExpertsRunner,
) -> list[Tensor | Exception]:
    """Logits of each piece of work, or why there are none, of lanes that have finished.

    A pass over several sequences that lacked an expert is read again, a lane for each of them, so
    that only those fail that need it.
    """
    rows = _lane_logits(lanes, len(work))
    if len(lanes) < len(work) and any(isinstance(row, OffloadError) for row in rows):
        lanes = [lane for item in work for lane in trunk.lanes([item], lanes[0].phase)]
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
    """Logits of each piece of work as `Trunk.lanes` gives them, or what ended its lane."""
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
