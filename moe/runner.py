"""One step of one rank: lanes of the sequences whose keys and values are here, and their tokens.

A step reads a stage of the current wave of prompts and the last token of every running sequence.
Prompts and decoding are separate lanes that meet at the MoE layers, so they share the experts both
need; the lanes of a layered wave stay asleep from one step to the next.
"""

from __future__ import annotations

import torch

from moe.kv import Work
from moe.lanes import run_lanes
from moe.moe_layer import MoELayers
from moe.reading import Outcome, Reading, results, sample
from moe.trunk import Trunk
from moe.wave import Step, Wave


class Runner:
    """Computes what a scheduler has planned.

    Args:
        trunk: the model.
        experts: its MoE layers.
    """

    def __init__(self, trunk: Trunk, experts: MoELayers) -> None:
        self.trunk = trunk
        self.experts = experts
        self._reading: Reading | None = None

    @torch.inference_mode()
    def run(self, step: Step) -> list[Outcome]:
        """The next tokens of everybody who gets some in this step.

        Where the forward pass or the sampler of a sequence raises, that is its outcome; the others
        are not concerned.
        """
        self.follow(step.wave)
        if step.wave is not None and self._reading is None:
            self._reading = Reading(step.wave, self.trunk)
        reading = self._reading
        tokens = [Work(s.token_ids[-1:], s.cache) for s in step.decode if s.cache is not None]
        if wanted := self.experts.context:
            self.experts.begin([sequence.last_tokens(wanted) for sequence in step.decode])
        lanes = self.trunk.lanes(tokens, "decode")
        run_lanes(
            [*reading.lanes, *lanes] if reading else lanes,
            self.experts.run,
            pause_at=reading.pauses() if reading else None,
        )
        logits = results(lanes, tokens, self.trunk, self.experts.run)
        outcomes: list[Outcome] = [
            (sequence, sample(sequence, rows))
            for sequence, rows in zip(step.decode, logits, strict=True)
        ]
        if reading is not None and reading.wave.is_last_stage:
            outcomes += reading.finish(self.experts.run)
            self._reading = None
        return outcomes

    def follow(self, wave: Wave | None) -> None:
        """Stop reading what the scheduler has given up for this wave."""
        if self._reading is not None and self._reading.wave is not wave:
            self._reading.cancel()
            self._reading = None
