"""The step loop: what the scheduler plans, run as lanes.

A step reads a stage of the current wave of prompts and one token of every running sequence. Prompts
and decoding are separate lanes that meet at the MoE layers, so they share the experts both need;
the lanes of a layered wave stay asleep from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.kv import SequenceCache, SequenceKV, Work
from moe.lanes import Lane, run_lanes
from moe.moe_layer import MoELayers
from moe.prefill import Mode, PrefillChoice, choose, measured_frequencies
from moe.prefix import PrefixCache
from moe.scheduler import Group, Scheduler, Wave
from moe.sequence import Delta, RunningSequence
from moe.settings import Profile
from moe.trunk import Trunk

Outcome = tuple[RunningSequence, Delta | Exception]
"""A sequence and what the step brought it."""


@dataclass
class Reading:
    """A wave in flight: its lanes, asleep between stages."""

    wave: Wave
    work: list[Work]
    lanes: list[Lane[list[Tensor]]]


class Engine:
    """Drives sequences through a model.

    Args:
        trunk: the model.
        experts: its MoE layers.
        profile: batch, prefill and memory settings.
    """

    def __init__(self, trunk: Trunk, experts: MoELayers, profile: Profile) -> None:
        self.trunk = trunk
        self.experts = experts
        self.prefill = profile.prefill
        self._prefill_choice: PrefillChoice | None = None
        self.scheduler = Scheduler(
            profile.prefill,
            profile.engine.max_batch_size,
            profile.memory.kv_tokens,
            len(experts.layers),
            can_cut=trunk.packed,
            choose_mode=self._choose_mode if profile.prefill.mode == "auto" else None,
            prefixes=PrefixCache(kept) if (kept := profile.memory.prefix_tokens) else None,
        )
        self._reading: Reading | None = None

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def status(self) -> dict[str, Any]:
        """What ``prefill.mode: auto`` chose last, and what known prefixes saved; for JSON."""
        prefixes, choice = self.scheduler.prefixes, self._prefill_choice
        return {
            "prefill": asdict(choice) if choice is not None else None,
            "prefixes": None
            if prefixes is None
            else {
                "held_tokens": prefixes.num_tokens,
                "asked_tokens": prefixes.asked_tokens,
                "hit_tokens": prefixes.hit_tokens,
            },
        }

    def submit(self, group: Group) -> None:
        """Queue sequences that share one prompt. Raises `RequestError` if they can never run."""
        self.scheduler.submit(group)

    def cancel(self, group: Group) -> None:
        """Forget sequences between steps; what they held is freed."""
        self.scheduler.drop(group)
        for sequence in group.sequences:
            sequence.cache = None

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Advance everybody by one token, and the current wave by one stage.

        Returns:
            One outcome for each sequence that got a token. A sequence whose forward pass or sampler
            raised is dropped and its exception is its outcome; the others are not concerned.
        """
        step = self.scheduler.plan()
        reading = self._read(step.wave)
        tokens = [Work(s.token_ids[-1:], s.cache) for s in step.decode if s.cache is not None]
        token_lanes = self.trunk.lanes(tokens)
        run_lanes(
            [*reading.lanes, *token_lanes] if reading else token_lanes,
            self.experts.run,
            pause_at=self._pauses(reading),
        )
        outcomes = [
            (sequence, _advance(sequence, rows))
            for sequence, rows in zip(step.decode, _logits(token_lanes, len(tokens)), strict=True)
        ]
        if reading is not None and reading.wave.is_last_stage:
            outcomes += self._finish_reading(reading)
            self._reading = None
        gone = {sequence for sequence, outcome in outcomes if not _goes_on(outcome)}
        self._keep_prefixes(outcomes)
        for sequence in gone:
            sequence.cache = None
        self.scheduler.finish(gone)
        return outcomes

    def _keep_prefixes(self, outcomes: list[Outcome]) -> None:
        prefixes = self.scheduler.prefixes
        for sequence, outcome in outcomes:
            if prefixes is None or not isinstance(outcome, Delta) or outcome.finish_reason is None:
                continue
            if isinstance(sequence.cache, SequenceKV):
                token_ids = sequence.prompt_token_ids + sequence.token_ids
                prefixes.add(sequence.salt, token_ids, sequence.cache)

    def _choose_mode(self, num_tokens: int, num_decoding: int) -> Mode:
        frequencies = measured_frequencies(self.experts.statistics)
        choice = choose(self.prefill, frequencies, num_tokens, num_decoding)
        self._prefill_choice = choice
        return choice.mode

    def _read(self, wave: Wave | None) -> Reading | None:
        """The lanes of a wave: made for a new one, those of the last step for one in flight."""
        if self._reading is not None and self._reading.wave is not wave:
            for lane in self._reading.lanes:
                lane.cancel()
            self._reading = None
        if wave is not None and self._reading is None:
            work = [Work(piece.token_ids, self._cache(piece.group)) for piece in wave.pieces]
            self._reading = Reading(wave, work, self.trunk.lanes(work))
        return self._reading

    def _cache(self, group: Group) -> SequenceCache:
        if group.cache is None:
            group.cache = self.trunk.new_cache(group.sequences[0].capacity)
        return group.cache

    def _pauses(self, reading: Reading | None) -> dict[Lane[list[Tensor]], int]:
        """Where the lanes of a wave go to sleep: at the first layer of the next stage."""
        if reading is None or reading.wave.is_last_stage:
            return {}
        stages = np.array_split(range(len(self.experts.layers)), reading.wave.num_stages)
        return dict.fromkeys(reading.lanes, int(stages[reading.wave.stage + 1][0]))

    def _finish_reading(self, reading: Reading) -> list[Outcome]:
        """First tokens of the prompts that have been read to the end."""
        outcomes: list[Outcome] = []
        logits = _logits(reading.lanes, len(reading.work))
        for piece, work, rows in zip(reading.wave.pieces, reading.work, logits, strict=True):
            group = piece.group
            if group.cancelled or not (piece.is_last or isinstance(rows, Exception)):
                continue
            group.cache = None
            for sequence in group.sequences:
                is_first = sequence is group.sequences[0]
                sequence.cache = (
                    work.cache
                    if is_first
                    else work.cache.fork(sequence.capacity, work.cache.length)
                )
            outcomes += [(sequence, _advance(sequence, rows)) for sequence in group.sequences]
        return outcomes


def _logits(lanes: Sequence[Lane[list[Tensor]]], num_work: int) -> list[Tensor | Exception]:
    """``(1, V)`` logits of each piece of work, or the exception that ended its lane."""
    rows: list[Tensor | Exception] = []
    for lane in lanes:
        try:
            rows += lane.result()
        except Exception as error:
            rows += [error] * (num_work // len(lanes))
    return rows


def _advance(sequence: RunningSequence, logits: Tensor | Exception) -> Delta | Exception:
    if isinstance(logits, Exception):
        return logits
    try:
        return sequence.advance(logits[0])
    except Exception as error:
        return error


def _goes_on(outcome: Delta | Exception) -> bool:
    return isinstance(outcome, Delta) and outcome.finish_reason is None
