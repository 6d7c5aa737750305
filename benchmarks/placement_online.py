"""Placements that change as they do while serving: by `Rebalancer`, which hears one step after the
other, and by what a token table says of the rest of the prompt that is read.

Experts are taken to be in every rank's memory, so that moves cost nothing, and an answer to be
there before the next step; one layer is asked about at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.texts import calibration_text
from experts.placement import Placement, first_placement, repack
from experts.placement.background import RepackJob
from experts.placement.packing import Repacked
from experts.placement.rebalance import Rebalancer
from moe import MoE, SamplingParams
from moe.commands.calibrate.calibrate import text_windows
from moe.commands.calibrate.record import record_trace
from moe.engine.prefill_batch import PrefillBatch, PromptChunk, ScheduledStep
from moe.parallel.expected_load import ExpectedLoad
from routing.predict.token_table import TokenTable, fit_token_table

TABLE_TOKENS, PROMPT = 60_000, 1024
STEP_S = 0.1
"""Seconds of a step: decides nothing, as moves cost nothing."""


class AtOnce:
    """A `Repacker` that has its answer when it is next asked."""

    busy = False

    def submit(self, job: RepackJob) -> None:
        self.busy, self._found = True, repack(job.costs_SE, job.current, job.price_E)

    def result(self) -> Repacked | None:
        found = self._found if self.busy else None
        self.busy = False
        return found

    def close(self) -> None:
        pass


def token_table(model: MoE, tokens: int = TABLE_TOKENS) -> TokenTable:
    """As `moe calibrate` makes it, from other texts than those that are held out."""
    read = text_windows(model, calibration_text(6 * tokens), tokens)
    trace = record_trace(model.backbone, model.experts, read)
    vocabulary = model.backbone.model.get_input_embeddings().num_embeddings
    return fit_token_table(trace.contexts(2), trace.expert_ids, trace.num_experts, vocabulary)


class Reader:
    """Prompts that rank 0 plans to be read in steps, neighbours together; the next ones wait."""

    def __init__(self, model: MoE, table: TokenTable, token_ids: Sequence[int], step: int) -> None:
        self.arrivals = ExpectedLoad(table, len(model.experts.layers))
        length, params = step * max(PROMPT // step, 1), SamplingParams(max_new_tokens=1)
        starts = range(0, len(token_ids), length)
        self._groups = [model.request(list(token_ids[at : at + length]), params) for at in starts]
        self._step = step

    def begin(self) -> None:
        """The next step."""
        first, *waiting = self._groups
        start, ids = first.num_read, first.token_ids
        piece = PromptChunk(first, ids[start : start + self._step], start + self._step >= len(ids))
        self.arrivals.see([(ScheduledStep([], PrefillBatch([piece])), waiting)])

    def end(self) -> None:
        first = self._groups[0]
        first.num_read += self._step
        if first.num_read >= first.num_tokens:
            self._groups.pop(0)


def online(
    trace: NDArray[np.int64], ranks: int, replicas: float, reader: Reader | None
) -> tuple[list[list[Placement]], float]:
    """Placements of each layer in each step of a trace, and experts moved a layer and step."""
    layers, _, experts = trace.shape
    current = [first_placement("packed", experts, ranks, replicas)] * layers
    token_loads = None if reader is None else reader.arrivals.of_layer
    found: list[list[Placement]] = []
    moved = 0
    rebalancer = Rebalancer(
        current,
        seconds_LE=[np.zeros(experts)] * layers,
        horizon_s=1.0,
        token_loads=token_loads,
        repacker=AtOnce(),
        clock=lambda: len(found) * STEP_S,
    )
    for tokens_LE in trace.swapaxes(0, 1):
        if reader is not None:
            reader.begin()
        moves = rebalancer.poll()
        for layer, new in (moves.placements if moves else {}).items():
            moved += int(((new.copies_ER > 0) & (current[layer].copies_ER == 0)).sum())
            current = [*current[:layer], new, *current[layer + 1 :]]
        found.append(current)
        rebalancer.observe(tokens_LE, STEP_S)
        if reader is not None:
            reader.end()
    return [list(own) for own in zip(*found, strict=True)], moved / trace[:, :, 0].size
