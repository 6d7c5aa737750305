"""The step loop: the scheduler plans, the runner computes, and sequences take in their tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from moe.calibration.foresight import Expect
from moe.engine.borrowing import KVBorrowing
from moe.engine.prefill_batch import Outcome, PrefillBatch, ScheduledStep, SequenceGroup
from moe.engine.prefill_mode import LayerWork, PrefillPlanner
from moe.engine.prefix_cache import PrefixCache
from moe.engine.runner import ModelRunner
from moe.engine.scheduler import ExpertAwareOrder, Scheduler
from moe.network.backbone import Backbone
from moe.network.kv_cache import SequenceKV
from moe.network.moe_layer import MoELayers
from moe.sampling.sampler import Token
from moe.sequence import Delta, RunningSequence
from moe.settings import Profile
from moe.speculate import Speculator

Event = tuple[RunningSequence, Delta | Exception]
"""A sequence and what a step brought it."""


class StepRunner(Protocol):
    """Computes steps, here or elsewhere; see `ModelRunner`."""

    def run(self, step: ScheduledStep) -> list[Outcome]: ...

    def follow(self, wave: PrefillBatch | None) -> None: ...


class StepLoop(Protocol):
    """What drives sequences through a model; see `Engine`."""

    @property
    def idle(self) -> bool: ...

    @property
    def kv_tokens(self) -> float: ...

    def status(self) -> dict[str, Any]: ...

    def occupancy(self) -> dict[str, int]: ...

    def submit(self, group: SequenceGroup) -> None: ...

    def cancel(self, group: SequenceGroup) -> None: ...

    def step(self) -> list[Event]: ...


class Engine:
    """Drives sequences through a model.

    Args:
        backbone: the model.
        experts: its MoE layers.
        profile: batch, prefill and memory settings.
        borrowed: gives room that keys and values do not need to experts on disk, if there are any.
        expect: what a prompt needs, where requests may be grouped by it.
        speculator: drafts tokens for the model to verify, if anything does.
        runner: computes the steps; None for here.
    """

    def __init__(
        self,
        backbone: Backbone,
        experts: MoELayers,
        profile: Profile,
        borrowed: KVBorrowing | None = None,
        expect: Expect | None = None,
        speculator: Speculator | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        self.runner: StepRunner = runner or ModelRunner(backbone, experts, speculator)
        self._borrowed = borrowed
        drafts = profile.speculation
        self._rows = 1 if drafts.mode == "off" else 1 + drafts.max_depth  # of a sequence in a step
        work = LayerWork.of(backbone.model, experts.layers)
        self.planner = PrefillPlanner(profile.prefill, work, experts.statistics)
        self.scheduler = Scheduler(
            profile.prefill,
            profile.engine,
            profile.memory.kv_tokens,
            self.planner.pauses,
            can_cut=backbone.packed,
            choose_mode=self.planner.choose if profile.prefill.mode == "auto" else None,
            prefixes=PrefixCache(kept) if (kept := profile.memory.prefix_tokens) else None,
            grouping=ExpertAwareOrder(expect, profile.engine.overlap_patience) if expect else None,
        )

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def kv_tokens(self) -> float:
        """Tokens of keys and values that there is room for; infinite where nothing limits them."""
        return self.scheduler.kv_tokens

    def occupancy(self) -> dict[str, int]:
        """Who is in the engine between two steps; all zero when it is idle.

        Known prefixes are nobody's: they give way to requests.
        """
        scheduler = self.scheduler
        known = scheduler.prefixes.num_tokens if scheduler.prefixes else 0
        return {
            "waiting_prompts": len(scheduler.waiting),
            "prompts_being_read": len(scheduler.wave.pieces) if scheduler.wave else 0,
            "running_sequences": len(scheduler.running),
            "kv_tokens": int(scheduler.num_used_tokens()) - known,
        }

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

    def submit(self, group: SequenceGroup) -> None:
        """Queue sequences that share one prompt. Raises `RequestError` if they can never run."""
        self.scheduler.submit(group)

    def cancel(self, group: SequenceGroup) -> None:
        """Forget sequences between steps; what they held is freed."""
        self.scheduler.drop(group)
        group.forget()
        for sequence in group.sequences:
            sequence.cache = None
        self.runner.follow(self.scheduler.wave)

    def step(self) -> list[Event]:
        """Advance everybody by at least one token, and the current wave by one stage.

        Returns:
            An event for each new token, those of a sequence in their order. A sequence whose
            forward pass or sampler raised is dropped and its exception is its event; the others are
            not concerned.
        """
        return self.take_in(self.runner.run(self.plan()))

    def plan(self) -> ScheduledStep:
        """The first half of `step`: who takes part."""
        step = self.scheduler.plan()
        if self._borrowed is not None:
            self._borrowed.follow(self.held_tokens(step))
        return step

    def held_tokens(self, step: ScheduledStep) -> float:
        """Tokens of keys and values while the step runs, drafts and what they bring included."""
        most = self.scheduler.num_used_tokens() + len(step.decode) * self._rows
        return min(most, self.scheduler.kv_tokens)

    def take_in(self, outcomes: Sequence[Outcome]) -> list[Event]:
        """The other half: what became of the plan."""
        events: list[Event] = []
        for sequence, tokens in outcomes:
            events += [(sequence, event) for event in _take(sequence, tokens)]
        gone = {sequence for sequence, event in events if not _continues(event)}
        self._keep_prefixes(gone)
        for sequence in gone:
            sequence.cache = None
        self.scheduler.finish(gone)
        return events

    def _keep_prefixes(self, ended: Collection[RunningSequence]) -> None:
        prefixes = self.scheduler.prefixes
        for sequence in ended:
            finished = sequence.finish_reason is not None
            if prefixes is not None and finished and isinstance(sequence.cache, SequenceKV):
                prefixes.add(sequence.salt, sequence.prompt_token_ids, sequence.cache)


def _take(sequence: RunningSequence, tokens: list[Token] | Exception) -> list[Delta | Exception]:
    """What new tokens add to a sequence, up to its end."""
    if isinstance(tokens, Exception):
        return [tokens]
    added: list[Delta | Exception] = []
    try:
        for token in tokens:
            added.append(sequence.take(token))
            if sequence.finish_reason is not None:
                break
    except Exception as error:
        added.append(error)
    return added


def _continues(event: Delta | Exception) -> bool:
    return isinstance(event, Delta) and event.finish_reason is None
