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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.engine.in_flight import DrawingStep, End, Lost, Outcome, StepInFlight, num_unread
from moe.engine.pinning import PinnedThreads
from moe.engine.prefill_batch import PrefillBatch, PromptChunk, ScheduledStep
from moe.hooks import Hook
from moe.kv.cache import SequenceCache
from moe.network.backbone import SHORT, Backbone
from moe.network.lanes import ExpertsRunner, Lane, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.sampling.batch import joined
from moe.sequence import RunningSequence
from moe.settings.device import to_device
from moe.speculate.draft import PLAIN
from moe.speculate.speculator import Speculator
from offload.errors import OffloadError

RunHalves = Callable[[Sequence[Sequence[Lane]], MoELayers, Mapping[Lane, int] | None], None]
HALVES = Hook[RunHalves]("run_halves")
"""Runs the lanes of a step in two halves, on several ranks, up to where each pauses; see
`moe.network.lanes.run_lanes`."""
MASKS_S = 0.02
"""Seconds that all sequences of a step together wait for what their structures allow."""


class ModelRunner:
    """Computes scheduled steps.

    Args:
        backbone: the model.
        experts: its MoE layers.
        speculator: drafts tokens before a step, which the step then verifies; None for no drafts.
        cpus: where the threads of a step stay, one each; none: where the system puts them.
        run_halves: runs a step on several ranks in two halves; None: it is run as a whole.
    """

    def __init__(
        self,
        backbone: Backbone,
        experts: MoELayers,
        speculator: Speculator | None = None,
        cpus: Sequence[int] = (),
        run_halves: RunHalves | None = None,
    ) -> None:
        self.backbone = backbone
        self.experts = experts
        self._pinned = PinnedThreads(cpus)
        self._run_halves = run_halves
        self._speculator = speculator
        self._prefill_pass: PrefillPass | None = None

    def run(self, step: ScheduledStep) -> list[Outcome]:
        """The next tokens of every sequence that gets some in this step.

        If the forward pass or the sampler of a sequence raises, the exception is the outcome of
        that sequence only.
        """
        return self.launch(step).outcomes()

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> StepInFlight:
        """Begin a step."""
        prefill = self._begin_prefill(step.prefill)
        counts = [num_unread(sequence) for sequence in step.decode]
        decode = [s for s, count in zip(step.decode, counts, strict=True) if count]
        held = [s for s, count in zip(step.decode, counts, strict=True) if not count]
        unread = [count for count in counts if count]
        speculator = self._speculator if max(unread, default=0) == 1 else None
        proposed = None
        if speculator is not None:
            proposed = speculator.propose(decode, step.spare_tokens)
        drafts = proposed or [PLAIN] * len(decode)
        runs_ahead = self._speculator is None and step.prefill is None and self.backbone.runs_ahead
        lent = runs_ahead and self._halves is None and _read_at_once(decode)
        tokens = [
            Work(
                [*self._next(s, count), *draft.tokens],
                s.cache,
                all_logits=bool(draft.tokens),
                lent=lent,
            )
            for s, count, draft in zip(decode, unread, drafts, strict=True)
            if s.cache is not None
        ]
        if wanted := self.experts.context:
            forecast = None if speculator is None else speculator.forecast
            self.experts.begin(_contexts(decode, tokens, wanted), forecast)
        for sequence in decode:
            sequence.sampler.begin_mask()
        logits = self._forward(tokens, prefill)
        last = prefill if prefill is not None and prefill.batch.is_last_layer_group else None
        _limit_waiting([*step.decode, *(last.sequences if last is not None else ())])
        ends = [
            End(sequence, rows, draft if proposed else None, lost)
            for sequence, (rows, lost), draft in zip(decode, logits, drafts, strict=True)
        ]
        ends += [End(sequence, _held(sequence)) for sequence in held]
        if last is not None:
            ends += last.finish(self.experts.run)
            self._prefill_pass = None
        return DrawingStep(ends, speculator, alone=step.prefill is None, runs_ahead=runs_ahead)

    @torch.inference_mode()
    def launch_ahead(
        self, step: ScheduledStep, tokens: Mapping[RunningSequence, Tensor]
    ) -> StepInFlight:
        """Begin a step of sequences whose last tokens only the device knows.

        Args:
            tokens: of a step in flight.
        """
        caches = {s: (s.cache, s.cache.length) for s in step.decode if s.cache is not None}
        lent = self.backbone.runs_ahead and _read_at_once(step.decode)
        work = [Work([0], cache, ahead=tokens[s], lent=lent) for s, (cache, _) in caches.items()]
        logits = self._forward(work, None)
        ends = [End(s, rows, lost=lost) for s, (rows, lost) in zip(caches, logits, strict=True)]
        return DrawingStep(ends, runs_ahead=self.backbone.runs_ahead, behind=caches)

    def _begin_prefill(self, batch: PrefillBatch | None) -> PrefillPass | None:
        """The pass that reads this batch, now or on from its last pause; None without one."""
        self.keep_prefill(batch)
        if batch is not None and self._prefill_pass is None:
            self._prefill_pass = PrefillPass(batch, self.backbone)
        return self._prefill_pass

    def keep_prefill(self, batch: PrefillBatch | None) -> None:
        """Cancel the prefill pass in flight unless it reads this batch."""
        if self._prefill_pass is not None and self._prefill_pass.batch is not batch:
            self._prefill_pass.cancel()
            self._prefill_pass = None

    @property
    def _halves(self) -> RunHalves | None:
        """The way in which a step runs in two halves, while other ranks serve experts."""
        return None if self.experts.dispatcher.local else self._run_halves

    def end(self, sequences: Sequence[RunningSequence]) -> None:
        """These have ended; nothing is kept of them here."""

    def status(self) -> dict[str, Any]:
        """Return counts of what has been computed, beside the routing statistics; for JSON."""
        return {}

    def _forward(
        self, tokens: Sequence[Work], prefill: PrefillPass | None
    ) -> list[tuple[Tensor | Exception, Lost | None]]:
        """Logits of each sequence's tokens, with `End.lost`; the prefill pass runs to its end or
        its next pause."""
        with self._pinned:
            return self._compute(tokens, prefill)

    def _compute(
        self, tokens: Sequence[Work], prefill: PrefillPass | None
    ) -> list[tuple[Tensor | Exception, Lost | None]]:
        run_halves = self._halves
        cut = len(tokens) // 2 if run_halves and prefill is None else len(tokens)
        parts = [tokens[:cut], tokens[cut:]]
        lanes = [self.backbone.lanes(part, "decode") for part in parts]
        pauses = prefill.pauses() if prefill else None
        others = prefill.lanes if prefill else lanes[1]
        if run_halves is not None:
            run_halves((lanes[0], others), self.experts, pauses)
        else:
            run_lanes([*others, *lanes[0]], self.experts.run, pause_at=pauses)
        found = []
        for part, own in zip(parts, lanes, strict=True):
            rows, ran = _results(own, part, self.backbone, self.experts.run)
            found += _lost_later(rows, ran, part)
        return found

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
        self.lanes = backbone.reading(self._work)

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

    def finish(self, run_experts: ExpertsRunner) -> list[End]:
        """The ends of the prompts that have been read whole, and failures."""
        logits, lanes = _results(self.lanes, self._work, self._backbone, run_experts)
        logits = [
            own if isinstance(own, Exception) or (error := lost()) is None else error
            for own, lost in zip(logits, _lost_of(lanes, self._work), strict=True)
        ]
        ends: list[End] = []
        for chunk, work, rows in zip(self.batch.chunks, self._work, logits, strict=True):
            if not chunk.group.cancelled:
                ends += _finish_chunk(chunk, work.cache, rows)
        return ends


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


def _finish_chunk(chunk: PromptChunk, cache: SequenceCache, rows: Tensor | Exception) -> list[End]:
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
        return [End(sequence, rows) for sequence in group.sequences]
    if not chunk.is_last:
        return []
    group.finish([cache, *(cache.fork(s.capacity, cache.length) for s in group.sequences[1:])])
    for sequence in group.sequences:
        sequence.keep_prompt_logprobs(group.prompt_logprobs)
    return [End(sequence, rows) for sequence in group.sequences]


def _results(
    lanes: Sequence[Lane[list[Tensor]]],
    work: Sequence[Work],
    backbone: Backbone,
    run_experts: ExpertsRunner,
) -> tuple[list[Tensor | Exception], Sequence[Lane[list[Tensor]]]]:
    """Logits of each item of work, or its error, from lanes that have finished; and the lanes.

    If a pass over several sequences lacked an expert, it is run again with a lane for each, so
    that only the sequences that need the expert fail.
    """
    rows = _lane_logits(lanes)
    if len(lanes) < len(work) and any(isinstance(row, OffloadError) for row in rows):
        lanes = [lane for item in work for lane in backbone.lanes([item], lanes[0].phase)]
        run_lanes(lanes, run_experts)
        rows = _lane_logits(lanes)
    return rows, lanes


def _lost_of(lanes: Sequence[Lane[list[Tensor]]], work: Sequence[Work]) -> list[Lost]:
    """Return, for each item of work, what says whether it lacked an expert of another rank."""
    items = iter(work)
    return [lost for lane in lanes for lost in _lost_in(lane, islice(items, lane.pieces))]


def _lost_in(lane: Lane[list[Tensor]], work: Iterable[Work]) -> Iterator[Lost]:
    start = 0
    for item in work:
        end = start + len(item.token_ids)
        yield partial(lane.lost_error, range(start, end))
        start = end


def _lost_later(
    rows: Sequence[Tensor | Exception], lanes: Sequence[Lane[list[Tensor]]], work: Sequence[Work]
) -> list[tuple[Tensor | Exception, Lost | None]]:
    """Logits, NaN where an expert of another rank was missing and only the device knows; and what
    says why."""
    found, first = list[tuple[Tensor | Exception, Lost | None]](), 0
    for lane in lanes:
        own = slice(first, first + lane.pieces)
        first = own.stop
        logits = [row for row in rows[own] if isinstance(row, Tensor)]
        whole = len(logits) == lane.pieces
        if whole and (lost_T := lane.lost_there()) is not None:
            sizes = [len(item.token_ids) for item in work[own]]
            found += zip(_voided(logits, sizes, lost_T), _lost_in(lane, work[own]), strict=True)
            continue
        if not logits or not lane.lost():
            found += [(row, None) for row in rows[own]]
            continue
        for row, why in zip(rows[own], _lost_in(lane, work[own]), strict=True):
            error = None if isinstance(row, Exception) else why()
            found.append((row if error is None else error, None))
    return found


def _voided(logits: Sequence[Tensor], sizes: Sequence[int], lost_T: Tensor) -> list[Tensor]:
    """The logits of items of work, all NaN where one of an item's so many tokens is lost."""
    items, rows, device = len(sizes), [len(own) for own in logits], lost_T.device
    if len(lost_T) > items:
        owner_T = to_device(np.repeat(np.arange(items), sizes), device)
        lost_T = lost_T.new_zeros(items, dtype=torch.int32).index_add_(0, owner_T, lost_T.int()) > 0
    if sum(rows) > items:
        lost_T = lost_T[to_device(np.repeat(np.arange(items), rows), device)]
    return list(joined(logits).masked_fill_(lost_T[:, None], torch.nan).split(rows))


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


def _read_at_once(sequences: Sequence[RunningSequence]) -> bool:
    """Return whether one pass gives the logits of all, and drawing the next tokens reads them once,
    while it begins. Others may be looked at again, behind the next step, and are kept where masks
    are late."""
    return all(
        s.sampler.is_argmax and s.cache is not None and s.cache.offset == 0 for s in sequences
    )


def _held(sequence: RunningSequence) -> Tensor:
    assert sequence.held_logits_V is not None
    return sequence.held_logits_V[None]


def _contexts(
    sequences: Sequence[RunningSequence], work: Sequence[Work], count: int
) -> list[list[int]]:
    """The last ``count`` tokens up to each one that is read, drafted ones included."""
    contexts = []
    for sequence, item in zip(sequences, work, strict=True):
        unread = num_unread(sequence)
        before = sequence.last_tokens(count - 1 + unread)[:-unread]
        tokens = [*before, *item.token_ids]
        ends = range(len(before) + 1, len(tokens) + 1)
        contexts += [tokens[max(0, end - count) : end] for end in ends]
    return contexts
