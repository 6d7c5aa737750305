"""The step loop: the scheduler plans a step, the runner computes it, sequences take their tokens.

    engine.submit(group)
    while not engine.idle:
        for sequence, event in engine.step():
            ...  # a Delta, or the exception that ended the sequence

A request's way: `submit` queues its group in `Scheduler.waiting`; `schedule` puts it into a prefill
batch, and when its prompt has been read into `Scheduler.running`; `ModelRunner.launch` computes the
step; `process_outputs` appends the new tokens and drops the sequences that ended. While sequences
do nothing but decode on a device, the next step is launched before the tokens of a step are read
(`moe.engine.in_flight`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from moe.engine.borrowing import KVBorrowing
from moe.engine.in_flight import Outcome, StepInFlight
from moe.engine.kv_account import KVAccount
from moe.engine.pinning import pinned_cpus
from moe.engine.prefill_batch import PrefillBatch, ScheduledStep, SequenceGroup
from moe.engine.prefill_mode import LayerWork, PrefillPlanner
from moe.engine.request_order import MakeOrder
from moe.engine.runner import ModelRunner
from moe.engine.scheduler import Scheduler
from moe.kv.prefix_cache import PrefixCache
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.sampling.batch import Token
from moe.sequence import Delta, RunningSequence
from moe.settings import Profile
from moe.speculate import Speculator

Event = tuple[RunningSequence, Delta | Exception]
"""A sequence and what a step added to it."""


class StepRunner(Protocol):
    """Computes steps, here or on another rank; see `ModelRunner`."""

    def launch(self, step: ScheduledStep) -> StepInFlight: ...

    def launch_ahead(
        self, step: ScheduledStep, tokens: Mapping[RunningSequence, Tensor]
    ) -> StepInFlight: ...

    def keep_prefill(self, batch: PrefillBatch | None) -> None: ...

    def end(self, sequences: Sequence[RunningSequence]) -> None: ...

    def status(self) -> dict[str, Any]: ...


class StepLoop(Protocol):
    """Drives sequences through a model; see `Engine`."""

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
        backbone: the model without its experts.
        experts: its MoE layers.
        profile: batch, prefill and memory settings.
        borrowing: lends unused memory of keys and values to experts on disk, if there are any.
        make_order: makes the order of waiting requests; None: they go by their queue keys.
        speculator: drafts tokens for the model to verify; None for no drafts.
        runner: computes the steps; None: on this rank.
        prefixes: keeps prompts for others that begin alike; None: each is read from its start.
    """

    def __init__(
        self,
        backbone: Backbone,
        experts: MoELayers,
        profile: Profile,
        borrowing: KVBorrowing | None = None,
        make_order: MakeOrder | None = None,
        speculator: Speculator | None = None,
        runner: StepRunner | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.runner: StepRunner = runner or ModelRunner(
            backbone, experts, speculator, pinned_cpus(profile, backbone.device)[0]
        )
        self._borrowing = borrowing
        self._ahead: StepInFlight | None = None  # launched, and not read
        drafts = profile.speculation
        self._rows = 1 if drafts.mode == "off" else 1 + drafts.max_depth  # of a sequence in a step
        work = partial(LayerWork.of, backbone.model, experts.layers)
        self.planner = PrefillPlanner(profile.prefill, work, experts.statistics)
        self._reuse_answers = profile.memory.reuse_answers
        self.scheduler = Scheduler(
            profile.prefill,
            profile.engine,
            profile.memory.kv_tokens,
            self.planner.pauses,
            can_cut=backbone.can_cut,
            choose_mode=self.planner.choose if profile.prefill.mode == "auto" else None,
            prefixes=prefixes,
            order=make_order() if make_order else None,
            account=KVAccount(
                profile.prefill.longest_part if backbone.can_cut else None,
                backbone.pool,
            ),
        )

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def kv_tokens(self) -> float:
        """Tokens of keys and values that memory has room for; infinite without a limit."""
        return self.scheduler.kv_tokens

    def submit(self, group: SequenceGroup) -> None:
        """Queue sequences that share one prompt. Raises `RequestError` if they can never run."""
        self.scheduler.submit(group)

    def cancel(self, group: SequenceGroup) -> None:
        """Remove sequences between steps, and free their caches."""
        self.scheduler.cancel(group)
        self._drop_ahead(group.sequences)
        group.release()
        self.runner.keep_prefill(self.scheduler.prefilling)
        self.runner.end(group.sequences)

    def step(self) -> list[Event]:
        """Advance every running sequence by at least one token, the prefill by one layer group.

        Returns:
            An event for each new token, those of a sequence in their order. If the forward pass or
            the sampler of a sequence raises, the exception is its event and only that sequence is
            dropped.
        """
        now = self._ahead or self.runner.launch(self.schedule())
        self._ahead = None
        if tokens := now.tokens:
            following = self.scheduler.schedule_ahead(tokens)
            if following is not None:
                self._ahead = self.runner.launch_ahead(following, tokens)
        return self.process_outputs(now.outcomes())

    def _drop_ahead(self, sequences: Collection[RunningSequence]) -> None:
        """Take back what has been launched for these."""
        if self._ahead is not None:
            self._ahead.drop(sequences)
            if self._ahead.is_empty:
                self._ahead = None

    def schedule(self) -> ScheduledStep:
        """The first half of `step`: who takes part."""
        step = self.scheduler.schedule()
        if self._borrowing is not None:
            self._borrowing.resize_for(self.held_tokens(step))
        return step

    def process_outputs(self, outcomes: Sequence[Outcome]) -> list[Event]:
        """The last part of `step`: append tokens, keep prefixes, free ended caches."""
        events: list[Event] = []
        self._keep_prompts()
        for sequence, tokens in outcomes:
            events += [(sequence, event) for event in append_tokens(sequence, tokens)]
        ended = {sequence for sequence, event in events if is_last(event)}
        if self._ahead is not None:
            self._drop_ahead([s for s, _ in outcomes if s in ended or s.sampler.redrawn])
        prefixes = self.scheduler.prefixes
        for sequence in ended:
            cache, finished = sequence.cache, sequence.finish_reason is not None
            known = None if prefixes is None or not finished else sequence.prompt_keys
            if prefixes and known is not None and cache is not None and cache.reusable:
                if self._reuse_answers:
                    known = [*known, *sequence.token_ids][: cache.length]
                prefixes.add(sequence.salt, known, cache.kv)
            sequence.release()
        self.runner.end([*ended])
        self.scheduler.update(ended)
        # Only now do prompts that were just read count once, however many share their blocks.
        while prefixes and self.scheduler.num_used_tokens() > self.kv_tokens and prefixes.evict():
            pass
        return events

    def _keep_prompts(self) -> None:
        """Put prompts into the prefix cache that this step has read to their end: of each what it
        can share without a copy, or all of it if a waiting request goes on from there."""
        prefixes, batch = self.scheduler.prefixes, self.scheduler.prefilling
        if prefixes is None or batch is None or not batch.is_last_layer_group:
            return
        for chunk in batch.chunks:
            first = chunk.group.sequences[0]
            if not chunk.is_last or first.cache is None or not first.cache.reusable:
                continue
            cache = first.cache.kv
            known, block = first.prompt_keys, cache.fork_tokens
            if known is None:
                continue
            if not self.scheduler.is_awaited(chunk.group):
                known = known[: len(known) // block * block if block else 0]
            prefixes.add(first.salt, known, cache)

    def held_tokens(self, step: ScheduledStep) -> float:
        """Tokens of keys and values while the step runs, including drafts and prompts."""
        most = self.scheduler.num_used_tokens() + len(step.decode) * self._rows
        return min(most, self.scheduler.kv_tokens)

    def occupancy(self) -> dict[str, int]:
        """Return what the engine holds between two steps; all zero when it is idle.

        Tokens in the prefix cache do not count: they give way to requests.
        """
        scheduler = self.scheduler
        prefix_tokens = scheduler.prefixes.num_tokens if scheduler.prefixes else 0
        reading = scheduler.prefilling
        return {
            "waiting_prompts": len(scheduler.waiting),
            "waiting_tokens": sum(len(g.token_ids) - g.num_read for g in scheduler.waiting),
            "prompts_being_read": len(reading.chunks) if reading else 0,
            "running_sequences": len(scheduler.running),
            "kv_tokens": int(scheduler.num_used_tokens()) - prefix_tokens,
        }

    def status(self) -> dict[str, Any]:
        """The last choice of ``prefill.mode: auto``, and prefix cache counters; for JSON.

        Numbers only, so any thread may call it. ``held_tokens`` goes up and down, the other
        counters only up.
        """
        prefixes, choice = self.scheduler.prefixes, self.planner.last_choice
        return self.runner.status() | {
            "prefill": asdict(choice) if choice is not None else None,
            "prefixes": None
            if prefixes is None
            else {
                "held_tokens": prefixes.num_tokens,
                "asked_tokens": prefixes.asked_tokens,
                "hit_tokens": prefixes.hit_tokens,
                "evictions": prefixes.evictions,
            }
            | (
                {}
                if prefixes.store is None
                else {
                    "saved_blocks": prefixes.store.saved_blocks,
                    "restored_tokens": prefixes.restored_tokens,
                    "dropped_files": prefixes.store.dropped_files,
                }
            ),
        }


def is_last(event: Delta | Exception) -> bool:
    """Return whether a sequence ends with this event."""
    return isinstance(event, Exception) or event.finish_reason is not None


def append_tokens(
    sequence: RunningSequence, tokens: list[Token] | Exception
) -> list[Delta | Exception]:
    """Append new tokens to a sequence, up to its end."""
    if isinstance(tokens, Exception):
        return [tokens]
    added: list[Delta | Exception] = []
    try:
        for token in tokens:
            added.append(sequence.append_token(token))
            if sequence.finish_reason is not None:
                break
    except Exception as error:
        added.append(error)
    return added
