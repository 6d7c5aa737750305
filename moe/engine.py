"""The step loop: sequences join, advance by one token a step, and leave.

A step reads the prompts that were admitted and one token of every running sequence. Prompts and
decoding are separate lanes that meet at the MoE layers, so they share the experts both need.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from moe.kv import Work
from moe.lanes import ExpertsRunner, Lane, run_lanes
from moe.sequence import Delta, RunningSequence
from moe.trunk import Trunk

Group = list[RunningSequence]
"""Sequences that continue one prompt (``n`` samples); the prompt is read once for all of them."""

Outcome = tuple[RunningSequence, Delta | Exception]
"""A sequence and what the step brought it."""


class Engine:
    """Drives sequences through a model.

    Args:
        trunk: the model.
        run_experts: runs one MoE layer for all lanes that wait there.
        max_batch_size: sequences that are in memory at once; others wait in order of arrival.
    """

    def __init__(self, trunk: Trunk, run_experts: ExpertsRunner, max_batch_size: int) -> None:
        self.trunk = trunk
        self.run_experts = run_experts
        self.max_batch_size = max_batch_size
        self._waiting: deque[Group] = deque()
        self._running: list[RunningSequence] = []

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, group: Group) -> None:
        """Queue sequences that share one prompt."""
        self._waiting.append(group)

    def cancel(self, group: Group) -> None:
        """Forget sequences between steps; what they held is freed."""
        if group in self._waiting:
            self._waiting.remove(group)
        self._running = [sequence for sequence in self._running if sequence not in group]
        for sequence in group:
            sequence.cache = None

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Admit waiting sequences and advance everybody by one token.

        Returns:
            One outcome for each sequence that took part. A sequence whose forward pass or sampler
            raised is dropped and its exception is its outcome; the others are not concerned.
        """
        admitted = self._admit()
        decoding = [[sequence] for sequence in self._running]
        prompts = [
            Work(group[0].prompt_token_ids, self.trunk.new_cache(group[0].capacity))
            for group in admitted
        ]
        tokens = [Work(s.token_ids[-1:], s.cache) for s in self._running if s.cache is not None]
        prompt_lanes, token_lanes = self.trunk.lanes(prompts), self.trunk.lanes(tokens)
        run_lanes([*prompt_lanes, *token_lanes], self.run_experts)

        for group, work in zip(admitted, prompts, strict=True):
            for sequence in group:
                sequence.cache = work.cache if sequence is group[0] else work.cache.fork()
        groups = decoding + admitted
        logits = _logits(token_lanes, len(tokens)) + _logits(prompt_lanes, len(prompts))
        outcomes = [
            (sequence, _advance(sequence, rows))
            for group, rows in zip(groups, logits, strict=True)
            for sequence in group
        ]
        self._running = [sequence for sequence, outcome in outcomes if _goes_on(outcome)]
        for sequence, outcome in outcomes:
            if not _goes_on(outcome):
                sequence.cache = None
        return outcomes

    def _admit(self) -> list[Group]:
        """Take groups from the queue while they fit; a group larger than the batch runs alone."""
        admitted: list[Group] = []
        size = len(self._running)
        while self._waiting and (size == 0 or size + len(self._waiting[0]) <= self.max_batch_size):
            admitted.append(self._waiting.popleft())
            size += len(admitted[-1])
        return admitted


def _logits(lanes: list[Lane[list[Tensor]]], num_work: int) -> list[Tensor | Exception]:
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
