"""The step loop: what the scheduler plans, run as lanes.

A step reads a stage of the current wave of prompts and one token of every running sequence. Prompts
and decoding are separate lanes that meet at the MoE layers, so they share the experts both need;
the lanes of a layered wave stay asleep from one step to the next.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from moe.company import Company, Expect
from moe.kv import SequenceKV, Work
from moe.lanes import run_lanes
from moe.moe_layer import MoELayers
from moe.prefill import PrefillPlanner
from moe.prefix import PrefixCache
from moe.reading import Outcome, Reading, advance, results
from moe.scheduler import Scheduler
from moe.sequence import Delta
from moe.settings import Profile
from moe.sharing import SharedMemory
from moe.stages import LayerWork
from moe.trunk import Trunk
from moe.wave import Group, Wave


class Engine:
    """Drives sequences through a model.

    Args:
        trunk: the model.
        experts: its MoE layers.
        profile: batch, prefill and memory settings.
        shared: gives room that keys and values do not need to experts on disk, if there are any.
        expect: what a prompt needs, where requests may be grouped by it.
    """

    def __init__(
        self,
        trunk: Trunk,
        experts: MoELayers,
        profile: Profile,
        shared: SharedMemory | None = None,
        expect: Expect | None = None,
    ) -> None:
        self.trunk = trunk
        self.experts = experts
        self._shared = shared
        work = LayerWork.of(trunk.model, experts.layers)
        self.planner = PrefillPlanner(profile.prefill, work, experts.statistics)
        self.scheduler = Scheduler(
            profile.prefill,
            profile.engine,
            profile.memory.kv_tokens,
            self.planner.pauses,
            can_cut=trunk.packed,
            choose_mode=self.planner.choose if profile.prefill.mode == "auto" else None,
            prefixes=PrefixCache(kept) if (kept := profile.memory.prefix_tokens) else None,
            company=Company(expect, profile.engine.overlap_patience) if expect else None,
        )
        self._reading: Reading | None = None

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def status(self) -> dict[str, Any]:
        """What ``prefill.mode: auto`` chose last, and what known prefixes saved; for JSON.

        Numbers only, so it may be called from any thread. Of the prefixes, ``held_tokens`` goes up
        and down and the others only up.
        """
        prefixes, choice = self.scheduler.prefixes, self.planner.last_choice
        return {
            "prefill": asdict(choice) if choice is not None else None,
            "prefixes": None
            if prefixes is None
            else {
                "held_tokens": prefixes.num_tokens,
                "asked_tokens": prefixes.asked_tokens,
                "hit_tokens": prefixes.hit_tokens,
                "evictions": prefixes.evictions,
            },
        }

    def submit(self, group: Group) -> None:
        """Queue sequences that share one prompt. Raises `RequestError` if they can never run."""
        self.scheduler.submit(group)

    def cancel(self, group: Group) -> None:
        """Forget sequences between steps; what they held is freed."""
        self.scheduler.drop(group)
        group.forget()
        for sequence in group.sequences:
            sequence.cache = None
        self._follow(self.scheduler.wave)

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Advance everybody by one token, and the current wave by one stage.

        Returns:
            One outcome for each sequence that got a token. A sequence whose forward pass or sampler
            raised is dropped and its exception is its outcome; the others are not concerned.
        """
        step = self.scheduler.plan()
        if self._shared is not None:
            self._shared.follow(self.scheduler.num_used_tokens() + len(step.decode))
        self._follow(step.wave)
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
            (sequence, advance(sequence, rows))
            for sequence, rows in zip(step.decode, logits, strict=True)
        ]
        if reading is not None and reading.wave.is_last_stage:
            outcomes += reading.finish(self.experts.run)
            self._reading = None
        gone = {sequence for sequence, outcome in outcomes if not _goes_on(outcome)}
        self._keep_prefixes(outcomes)
        for sequence in gone:
            sequence.cache = None
        self.scheduler.finish(gone)
        return outcomes

    def _follow(self, wave: Wave | None) -> None:
        """Stop reading what the scheduler has given up."""
        if self._reading is not None and self._reading.wave is not wave:
            self._reading.cancel()
            self._reading = None

    def _keep_prefixes(self, outcomes: list[Outcome]) -> None:
        prefixes = self.scheduler.prefixes
        for sequence, outcome in outcomes:
            if prefixes is None or not isinstance(outcome, Delta) or outcome.finish_reason is None:
                continue
            if isinstance(sequence.cache, SequenceKV):
                token_ids = sequence.prompt_token_ids + sequence.token_ids
                prefixes.add(sequence.salt, token_ids, sequence.cache)


def _goes_on(outcome: Delta | Exception) -> bool:
    return isinstance(outcome, Delta) and outcome.finish_reason is None
