"""`ModelRunner`: one forward pass of a scheduled step on this rank, and the tokens sampled from it.

A step runs the current layer group of the prefill batch and the last token of every running
sequence. Prompts and decoding are separate lanes that meet at the MoE layers, so they share the
experts that both need. The lanes of a layered batch stay asleep from one step to the next
(`PrefillPass`).

A preempted sequence reads its prompt again as a prompt, and then the tokens it had generated as
decode steps read them, several a step: a prefill pass rounds differently, and other requests must
not change an answer.

While the pass runs, other threads find out what structures let follow. A sequence for which that
takes too long holds its logits and is left out of passes until it is known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from moe.engine.overlap import run_overlapped
from moe.engine.prefill_batch import PrefillBatch, PromptChunk, ScheduledStep
from moe.errors import RankError
from moe.network.backbone import SHORT, Backbone
from moe.network.kv_cache import SequenceCache
from moe.network.lanes import ExpertsRunner, Lane, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.sampling.constraint import MaskLateError
from moe.sampling.sampler import Token, sample_batch
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.speculator import Speculator
from offload.errors import OffloadError

Outcome = tuple[RunningSequence, list[Token] | Exception]
"""A sequence and its next tokens, or the error that ended it."""
MASKS_S = 0.02
"""How long all sequences of a step together wait for what their structures allow."""


class ModelRunner:
    """Computes scheduled steps.

    Args:
        backbone: the model.
        experts: its MoE layers.
        speculator: drafts tokens before a step, which the step then verifies; None for no drafts.
    """

    def __init__(
        self, backbone: Backbone, experts: MoELayers, speculator: Speculator | None = None
    ) -> None:
        self.backbone = backbone
        self.experts = experts
        self._speculator = speculator
        self._prefill_pass: PrefillPass | None = None

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> list[Outcome]:
        """The next tokens of every sequence that gets some in this step.

        If the forward pass or the sampler of a sequence raises, the exception is the outcome of
        that sequence only.
        """
        self.keep_prefill(step.prefill)
        if step.prefill is not None and self._prefill_pass is None:
            self._prefill_pass = PrefillPass(step.prefill, self.backbone)
        prefill = self._prefill_pass
        decode = [sequence for sequence in step.decode if _num_unread(sequence)]
        held = [sequence for sequence in step.decode if not _num_unread(sequence)]
        unread = [_num_unread(sequence) for sequence in decode]
        speculator = self._speculator if max(unread, default=0) == 1 else None
        proposed = None
        if speculator is not None:
            proposed = speculator.propose(decode, step.spare_tokens)
        drafts = proposed or [PLAIN] * len(decode)
        tokens = [
            Work([*self._next(s, count), *draft.tokens], s.cache, all_logits=bool(draft.tokens))
            for s, count, draft in zip(decode, unread, drafts, strict=True)
            if s.cache is not None
        ]
        if wanted := self.experts.context:
            forecast = None if speculator is None else speculator.forecast
            self.experts.begin(_contexts(decode, tokens, wanted), forecast)
        for sequence in decode:
            sequence.sampler.begin_mask()
        logits = self._forward(tokens, prefill, step.overlap)
        last = prefill if prefill is not None and prefill.batch.is_last_layer_group else None
        _limit_waiting([*step.decode, *(last.sequences if last is not None else ())])
        outcomes: list[Outcome]
        if proposed and speculator is not None:
            outcomes = [
                (sequence, _accept(speculator, sequence, draft, rows))
                for sequence, draft, rows in zip(decode, drafts, logits, strict=True)
            ]
        else:
            outcomes = _sample([*zip(decode, logits, strict=True)])
        outcomes += _sample([(sequence, _held(sequence)) for sequence in held])
        if speculator is not None:
            speculator.finish(alone=step.prefill is None)
        if last is not None:
            outcomes += last.finish(self.experts.run)
            self._prefill_pass = None
        return outcomes

    def keep_prefill(self, batch: PrefillBatch | None) -> None:
        """Cancel the prefill pass in flight unless it reads this batch."""
        if self._prefill_pass is not None and self._prefill_pass.batch is not batch:
            self._prefill_pass.cancel()
            self._prefill_pass = None

    def _forward(
        self, tokens: Sequence[Work], prefill: PrefillPass | None, overlap: bool
    ) -> list[Tensor | Exception]:
        """Logits of each sequence's tokens; the prefill pass runs to its end or its next pause."""
        cut = len(tokens) // 2 if overlap and prefill is None else len(tokens)
        parts = [tokens[:cut], tokens[cut:]]
        lanes = [self.backbone.lanes(part, "decode") for part in parts]
        pauses = prefill.pauses() if prefill else None
        others = prefill.lanes if prefill else lanes[1]
        if overlap:
            run_overlapped((lanes[0], others), self.experts, pauses)
        else:
            run_lanes([*others, *lanes[0]], self.experts.run, pause_at=pauses)
        return [
            rows
            for part, own in zip(parts, lanes, strict=True)
            for rows in _results(own, part, self.backbone, self.experts.run)
        ]

    def _next(self, sequence: RunningSequence, unread: int) -> list[int]:
        """The tokens that a sequence reads in this step, without drafted ones."""
        start = len(sequence.token_ids) - unread
        most = SHORT if self.backbone.packed else 1  # transformers' own caches take them one by one
        return sequence.token_ids[start : start + most]


class PrefillPass:
    """A prefill batch in flight; its lanes are asleep between layer groups.

    Args:
        batch: what is read.
        backbone: reads it.
    """

    def __init__(self, batch: PrefillBatch, backbone: Backbone) -> None:
        self.batch = batch
        self._backbone = backbone
        self._work = [_work(chunk, backbone) for chunk in batch.chunks]
        self.lanes = backbone.lanes(self._work, "prefill")

    @property
    def sequences(self) -> list[RunningSequence]:
        """All whose prompts are read."""
        return [s for chunk in self.batch.chunks for s in chunk.group.sequences]

    def pauses(self) -> dict[Lane[list[Tensor]], int]:
        """The layer at which the lanes go to sleep in this step; empty in the last one."""
        if self.batch.is_last_layer_group:
            return {}
        return dict.fromkeys(self.lanes, self.batch.pauses[self.batch.layer_group])

    def cancel(self) -> None:
        """Free what the lanes hold."""
        for lane in self.lanes:
            lane.cancel()

    def finish(self, run_experts: ExpertsRunner) -> list[Outcome]:
        """First tokens of the prompts that have been read to the end, and failures."""
        logits = _results(self.lanes, self._work, self._backbone, run_experts)
        ends: list[tuple[RunningSequence, Tensor | Exception]] = []
        for chunk, work, rows in zip(self.batch.chunks, self._work, logits, strict=True):
            if not chunk.group.cancelled:
                ends += _finish_chunk(chunk, work.cache, rows)
        return _sample(ends)


def _work(chunk: PromptChunk, backbone: Backbone) -> Work:
    group = chunk.group
    cache = group.cache
    if cache is None:
        cache = backbone.new_cache(group.sequences[0].capacity)
        group.begin(cache)
    scored, rows = group.prompt_logprobs is not None, group.rows
    cache.offset = 0 if rows is None else rows.offset
    given = None if rows is None else rows.part(chunk.span.start, chunk.span.stop)
    return Work(chunk.token_ids, cache, scored, chunk.snapshots, given)


def _finish_chunk(
    chunk: PromptChunk, cache: SequenceCache, rows: Tensor | Exception
) -> list[tuple[RunningSequence, Tensor | Exception]]:
    """Score the prompt's tokens if the request wants that; the sequences whose next token follows
    the prompt, with its logits or an error."""
    group = chunk.group
    if group.prompt_logprobs is not None and not isinstance(rows, Exception):
        try:
            group.score(rows)
        except Exception as error:
            rows = error
    if isinstance(rows, Exception):
        group.restart()
        return [(sequence, rows) for sequence in group.sequences]
    if not chunk.is_last:
        return []
    group.finish([cache, *(cache.fork(s.capacity, cache.length) for s in group.sequences[1:])])
    for sequence in group.sequences:
        sequence.keep_prompt_logprobs(group.prompt_logprobs)
    return [(sequence, rows) for sequence in group.sequences]


def _results(
    lanes: Sequence[Lane[list[Tensor]]],
    work: Sequence[Work],
    backbone: Backbone,
    run_experts: ExpertsRunner,
) -> list[Tensor | Exception]:
    """Logits of each item of work, or its error, from lanes that have finished.

    If a pass over several sequences lacked an expert, it is run again with a lane for each, so
    that only the sequences that need the expert fail.
    """
    rows = _lane_logits(lanes)
    if len(lanes) < len(work) and any(isinstance(row, OffloadError) for row in rows):
        lanes = [lane for item in work for lane in backbone.lanes([item], lanes[0].phase)]
        run_lanes(lanes, run_experts)
        rows = _lane_logits(lanes)
    return _without_lost(rows, lanes, work)


def _without_lost(
    rows: list[Tensor | Exception], lanes: Sequence[Lane[list[Tensor]]], work: Sequence[Work]
) -> list[Tensor | Exception]:
    """The same, with an error for work that lacked an expert of another rank (`Lane.lost`)."""
    first = 0
    for lane in lanes:
        start, own = 0, range(first, first + lane.pieces)
        first = own.stop
        lost = lane.lost()
        for index in own if lost else ():
            end = start + len(work[index].token_ids)
            reasons = [lost[row] for row in sorted(lost) if start <= row < end]
            if reasons and not isinstance(rows[index], Exception):
                kind = OffloadError if reasons[0].unreadable else RankError
                rows[index] = kind(reasons[0].reason)
            start = end
    return rows


def _lane_logits(lanes: Sequence[Lane[list[Tensor]]]) -> list[Tensor | Exception]:
    """Logits of each item of work as `Backbone.lanes` gives them, or what ended its lane."""
    rows: list[Tensor | Exception] = []
    for lane in lanes:
        try:
            rows += lane.result()
        except Exception as error:
            rows += [error] * lane.pieces
    return rows


def _limit_waiting(sequences: Sequence[RunningSequence]) -> None:
    until = time.monotonic() + MASKS_S
    for sequence in sequences:
        sequence.sampler.wait_until(until)


def _sample(results: Sequence[tuple[RunningSequence, Tensor | Exception]]) -> list[Outcome]:
    """The token after the last row of each sequence's ``(T, V)`` logits, all drawn together.

    None yet if the sequence has unread tokens, or if it comes to hold its logits, or goes on
    holding them, because its structure's mask is late.
    """
    outcomes: dict[RunningSequence, list[Token] | Exception] = {}
    drawn: list[tuple[RunningSequence, Tensor]] = []
    for sequence, rows in results:
        outcomes[sequence] = rows if isinstance(rows, Exception) else []
        # A preempted sequence has its next tokens already.
        if not isinstance(rows, Exception) and _num_unread(sequence) <= 0:
            drawn.append((sequence, rows[-1]))
    samplers, logits = [each.sampler for each, _ in drawn], [logits_V for _, logits_V in drawn]
    tokens: Sequence[Token | Exception]
    try:
        tokens = sample_batch(samplers, logits)
    except Exception as error:  # memory of the device, for one
        tokens = [error] * len(drawn)
    for (sequence, logits_V), token in zip(drawn, tokens, strict=True):
        if isinstance(token, Token):
            sequence.hold(None)
            outcomes[sequence] = [token]
        elif isinstance(token, MaskLateError):
            if sequence.held_logits_V is None:
                sequence.hold(logits_V)
        else:
            outcomes[sequence] = token
    return [*outcomes.items()]


def _held(sequence: RunningSequence) -> Tensor:
    assert sequence.held_logits_V is not None
    return sequence.held_logits_V[None]


def _accept(
    verifying: Speculator, sequence: RunningSequence, draft: Draft, rows: Tensor | Exception
) -> list[Token] | Exception:
    """The next tokens; the cache is cut back to the tokens that were accepted."""
    if isinstance(rows, Exception):
        return rows
    if _num_unread(sequence) > 0:
        return []
    assert sequence.cache is not None
    try:
        tokens = verifying.accept(sequence, draft, rows)
    except MaskLateError:
        sequence.hold(rows[0])
        tokens = []
    except Exception as error:
        return error
    sequence.cache.cut(sequence.cache.length - len(rows) + max(len(tokens), 1))
    return tokens


def _num_unread(sequence: RunningSequence) -> int:
    """Tokens of a sequence that its cache lacks: the last; more if it was preempted."""
    assert sequence.cache is not None
    known = len(sequence.prompt_token_ids) + len(sequence.token_ids)
    return known - sequence.cache.length


def _contexts(
    sequences: Sequence[RunningSequence], work: Sequence[Work], count: int
) -> list[list[int]]:
    """The last ``count`` tokens up to each one that is read, drafted ones included."""
    contexts = []
    for sequence, item in zip(sequences, work, strict=True):
        unread = _num_unread(sequence)
        before = sequence.last_tokens(count - 1 + unread)[:-unread]
        tokens = [*before, *item.token_ids]
        ends = range(len(before) + 1, len(tokens) + 1)
        contexts += [tokens[max(0, end - count) : end] for end in ends]
    return contexts
