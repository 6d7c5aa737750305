"""The step loop of models that write whole blocks (`moe.network.block_diffusion`).

It has the interface of `moe.engine.engine.Engine`. A step is one forward pass of every running
sequence: of its prompt, of a block that has become final, or of the canvas that it refines. The
sequences are lanes that meet at the MoE layers, at whatever step of refinement each is, so an
expert that several need is read once; their canvases share a pass.

A sequence is admitted when memory has room for its prompt and all of its blocks, and keeps that
room until it ends: nothing is preempted.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence
from typing import Any

import torch

from moe.engine.engine import Event, append_tokens, is_last
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from moe.network.block_diffusion import BlockLane, BlockWriter
from moe.network.denoise import Acceptance
from moe.network.moe_layer import MoELayers
from moe.sampling.batch import Token
from moe.sequence import RunningSequence
from moe.settings import Profile


class BlockEngine:
    """Drives sequences through a model that writes blocks.

    Args:
        writer: of the model.
        experts: its MoE layers.
        profile: batch and memory settings, and how canvases are refined.
    """

    def __init__(self, writer: BlockWriter, experts: MoELayers, profile: Profile) -> None:
        self._writer, self._experts, self._settings = writer, experts, profile.engine
        self._acceptance = Acceptance.of(profile.diffusion)
        limit = profile.memory.kv_tokens
        self.kv_tokens = math.inf if limit is None else float(limit)
        self._waiting: list[SequenceGroup] = []
        self._running: dict[RunningSequence, BlockLane] = {}
        self._num_steps = self._num_arrived = 0
        self._passes = {"prefill": 0, "denoise": 0}
        self._num_final = 0

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running)

    def submit(self, group: SequenceGroup) -> None:
        """Queue sequences that share one prompt. Raises `RequestError` if they can never run."""
        needed, count = self._needed(group.sequences), len(group.sequences)
        if needed > self.kv_tokens:
            raise RequestError(
                f"the request needs memory for {needed} tokens, whole blocks of "
                f"{self._writer.canvas_length}, and there is room for {self.kv_tokens:g} "
                "(memory.kv_tokens, memory.kv_gib); shorten it, ask for fewer samples or make room"
            )
        if count > self._settings.max_batch_size:
            raise RequestError(
                f"n is {count} and engine.max_batch_size is {self._settings.max_batch_size}; "
                "ask for fewer samples or raise engine.max_batch_size"
            )
        self._num_arrived += 1
        for sequence in group.sequences:
            step = self._num_steps + sequence.priority * self._settings.priority_steps
            sequence.enqueue(step, self._num_arrived)
        insort(self._waiting, group, key=lambda waiting: waiting.queue_key)

    def cancel(self, group: SequenceGroup) -> None:
        """Remove sequences between steps, and free what they hold."""
        group.cancel()
        self._waiting = [other for other in self._waiting if other is not group]
        for sequence in group.sequences:
            if (lane := self._running.pop(sequence, None)) is not None:
                lane.cancel()

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One pass of every running sequence.

        Returns:
            An event for each token of the blocks that became final, those of a sequence in their
            order. If a pass raises, the exception is the event of that sequence only.
        """
        self._num_steps += 1
        self._admit()
        before = self._count_passes()
        self._writer.step(list(self._running.values()), self._experts.run)
        for phase, count in self._count_passes().items():
            self._passes[phase] += count - before[phase]
        events: list[Event] = []
        for sequence, lane in list(self._running.items()):
            own = append_tokens(sequence, _outcome(lane))
            self._num_final += len(own)
            if own and is_last(own[-1]):
                lane.cancel()
                del self._running[sequence]
            events += [(sequence, event) for event in own]
        return events

    def occupancy(self) -> dict[str, int]:
        """What the engine holds between two steps; all zero when it is idle."""
        return {
            "waiting_prompts": len(self._waiting),
            "prompts_being_read": 0,
            "running_sequences": len(self._running),
            "kv_tokens": self._needed(self._running),
        }

    def status(self) -> dict[str, Any]:
        """Passes so far by phase and final tokens, beside the keys of `Engine.status`; for JSON."""
        blocks = {"passes": dict(self._passes), "final_tokens": self._num_final}
        return {"prefill": None, "prefixes": None, "blocks": blocks}

    def _needed(self, sequences: Sequence[RunningSequence] | dict[RunningSequence, Any]) -> int:
        """Tokens of memory that sequences hold, in whole blocks."""
        size = self._writer.canvas_length
        return sum(
            len(sequence.prompt_token_ids) + math.ceil(sequence.max_new_tokens / size) * size
            for sequence in sequences
        )

    def _admit(self) -> None:
        """Start the sequences at the head of the queue that there is room for."""
        while self._waiting:
            sequences = self._waiting[0].sequences
            count = len(self._running) + len(sequences)
            tokens = self._needed(self._running) + self._needed(sequences)
            if count > self._settings.max_batch_size or tokens > self.kv_tokens:
                return
            del self._waiting[0]
            for sequence in sequences:
                self._running[sequence] = self._lane(sequence)

    def _lane(self, sequence: RunningSequence) -> BlockLane:
        params, index = sequence.sampler.params, sequence.sampler.index
        return self._writer.lane(
            sequence.prompt_token_ids,
            sequence.max_new_tokens,
            lane_seed(params.seed, index),
            temperature=params.temperature,
            acceptance=self._acceptance,
        )

    def _count_passes(self) -> dict[str, int]:
        return {
            phase: sum(lane.passes[phase] for lane in self._running.values())
            for phase in ("prefill", "denoise")
        }


def lane_seed(seed: int | None, index: int) -> int:
    """The seed of a sequence: the request's own for its first sample, one derived from it for
    others; None: a new one."""
    if seed is None:
        return random.getrandbits(63)
    return random.Random(f"{seed}:{index}").getrandbits(63) if index else seed


def _outcome(lane: BlockLane) -> list[Token] | Exception:
    """Tokens that became final, or what ended the lane."""
    try:
        if lane.finished:
            lane.result()
    except Exception as error:
        return error
    return [Token(token_id) for token_id in lane.take_final()]
