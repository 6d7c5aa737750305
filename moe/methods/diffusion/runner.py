"""`CanvasRunner`: computes scheduled steps of a model that writes canvases.

A step is one forward pass of every running sequence: over a canvas that has become final, or over
the canvas that it refines. Prompts are read beside them as those of other models are
(`moe.engine.runner.PrefillPass`): whole, in chunks or in groups of layers, after a known beginning.
All meet at the MoE layers, at whatever step of refinement each is, so an expert that several need
is read once; canvases share a pass.

A sequence has a lane, in which the model's own generation code sleeps with its canvas. A preempted
sequence loses its keys and values and keeps its lane: its prompt and then its final canvases are
read again, in the parts in which they were, and the canvas goes on from where it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from moe.engine.in_flight import Finished, Outcome
from moe.engine.prefill_batch import ScheduledStep
from moe.engine.runner import ModelRunner
from moe.methods.diffusion.denoise import Acceptance
from moe.methods.diffusion.driver import CanvasDriver
from moe.methods.diffusion.lane import CanvasLane
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.sampling.batch import Token
from moe.sequence import RunningSequence


class CanvasRunner(ModelRunner):
    """Computes scheduled steps.

    Args:
        backbone: the model; the driver reads its prompts.
        experts: its MoE layers.
        driver: of the model.
        acceptance: how canvases are refined.
    """

    def __init__(
        self,
        backbone: Backbone,
        experts: MoELayers,
        driver: CanvasDriver,
        acceptance: Acceptance,
    ) -> None:
        super().__init__(backbone, experts)
        self._driver, self._acceptance = driver, acceptance
        self._lanes: dict[RunningSequence, CanvasLane] = {}
        self._again: dict[RunningSequence, int] = {}
        self._passes = {"prefill": 0, "decode": 0}
        self._num_final = 0

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> Finished:
        """Compute a step; its outcomes are the canvases that became final in it.

        If a pass of a sequence raises, the exception is the outcome of that sequence only.
        """
        prefill = self._begin_prefill(step.prefill)
        lanes = {sequence: self._lane(sequence) for sequence in step.decode}
        before = {lane: dict(lane.passes) for lane in lanes.values()}
        self._driver.step(
            [*lanes.values()],
            self.experts.run,
            () if prefill is None else prefill.lanes,
            None if prefill is None else prefill.pauses(),
        )
        outcomes: list[Outcome] = []
        for sequence, lane in lanes.items():
            lane.cache.rows = None  # they are the sequence's, and may be taken from it
            for phase, count in lane.passes.items():
                self._passes[phase] += count - before[lane][phase]
            outcomes.append((sequence, self._outcome(sequence, lane)))
        if prefill is not None and prefill.batch.is_last_layer_group:
            self._passes["prefill"] += len(prefill.lanes)
            for end in prefill.finish(self.experts.run):
                failed = isinstance(end.rows, Exception)
                outcomes.append((end.sequence, end.rows if failed else []))  # type: ignore[arg-type]
            self._prefill_pass = None
        return Finished(outcomes)

    def end(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            self._again.pop(sequence, None)
            if (lane := self._lanes.pop(sequence, None)) is not None:
                lane.cancel()

    def status(self) -> dict[str, Any]:
        """Passes so far by phase, and final tokens; for JSON."""
        return {"canvases": {"passes": dict(self._passes), "final_tokens": self._num_final}}

    def _lane(self, sequence: RunningSequence) -> CanvasLane:
        """The sequence's lane, with its keys and values."""
        if sequence not in self._lanes:
            params, index = sequence.sampler.params, sequence.sampler.index
            assert params.seed is not None, "requests have one by now"
            # Another rank wrote the first tokens, and is lost: they are written again.
            self._again[sequence] = len(sequence.token_ids)
            self._lanes[sequence] = self._driver.lane(
                sequence.prompt_token_ids,
                sequence.max_new_tokens,
                lane_seed(params.seed, index),
                temperature=params.temperature,
                acceptance=self._acceptance,
                scored=params.logprobs,
            )
        lane = self._lanes[sequence]
        assert sequence.cache is not None
        lane.cache.rows = sequence.cache.kv
        return lane

    def _outcome(self, sequence: RunningSequence, lane: CanvasLane) -> list[Token] | Exception:
        """Tokens that became final, or what ended the lane."""
        try:
            if lane.ended:
                lane.result()
        except Exception as error:
            return error
        tokens = lane.take_final()
        known = min(self._again[sequence], len(tokens))
        self._again[sequence] -= known
        self._num_final += len(tokens) - known
        return tokens[known:]


def lane_seed(seed: int, index: int) -> int:
    """The seed of a sequence: the request's own for its first sample, one derived from it for
    others."""
    return random.Random(f"{seed}:{index}").getrandbits(63) if index else seed
