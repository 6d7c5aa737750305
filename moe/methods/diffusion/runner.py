"""`BlockRunner`: scheduled steps of models that write whole blocks (`moe.network.block_diffusion`).

A step is one forward pass of every running sequence: over a block that has become final, or over
the canvas that it refines. Prompts are read beside them as those of other models are
(`moe.engine.runner.PrefillPass`): whole, in chunks or in groups of layers, behind a known
beginning. All meet at the MoE layers, at whatever step of refinement each is, so an expert that
several need is read once; canvases share a pass.

A sequence has a lane, in which the model's own generation code sleeps with its canvas. A preempted
sequence loses its keys and values and keeps its lane: its prompt and then its final blocks are read
again, in the parts in which they were, and the canvas goes on from where it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from moe.engine.in_flight import Finished, Outcome
from moe.engine.prefill_batch import ScheduledStep
from moe.engine.runner import ModelRunner
from moe.network.backbone import Backbone
from moe.network.block_diffusion import BlockWriter
from moe.network.block_lane import BlockLane
from moe.network.denoise import Acceptance
from moe.network.moe_layer import MoELayers
from moe.sampling.batch import Token
from moe.sequence import RunningSequence
from moe.settings import DiffusionSettings


class BlockRunner(ModelRunner):
    """Computes scheduled steps of a model that writes blocks.

    Args:
        backbone: the model; its prompts are read by the writer.
        experts: its MoE layers.
        writer: of the model.
        settings: how canvases are refined.
    """

    def __init__(
        self,
        backbone: Backbone,
        experts: MoELayers,
        writer: BlockWriter,
        settings: DiffusionSettings,
    ) -> None:
        super().__init__(backbone, experts)
        self._writer, self._acceptance = writer, Acceptance.of(settings)
        self._lanes: dict[RunningSequence, BlockLane] = {}
        self._again: dict[RunningSequence, int] = {}
        self._passes = {"prefill": 0, "denoise": 0}
        self._num_final = 0

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> Finished:
        """The blocks that became final in this step.

        If a pass of a sequence raises, the exception is the outcome of that sequence only.
        """
        prefill = self._begin_prefill(step.prefill)
        lanes = {sequence: self._lane(sequence) for sequence in step.decode}
        before = {lane: dict(lane.passes) for lane in lanes.values()}
        self._writer.step(
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
        """Passes so far by phase, and final tokens."""
        return {"blocks": {"passes": dict(self._passes), "final_tokens": self._num_final}}

    def _lane(self, sequence: RunningSequence) -> BlockLane:
        """The sequence's lane, with its keys and values."""
        if sequence not in self._lanes:
            params, index = sequence.sampler.params, sequence.sampler.index
            assert params.seed is not None, "requests have one by now"
            # Another rank wrote the first tokens, and is lost: they are written again.
            self._again[sequence] = len(sequence.token_ids)
            self._lanes[sequence] = self._writer.lane(
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

    def _outcome(self, sequence: RunningSequence, lane: BlockLane) -> list[Token] | Exception:
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
