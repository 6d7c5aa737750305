"""One step of one rank: lanes of the sequences whose keys and values are here, and their tokens.

A step reads a stage of the current wave of prompts and the last token of every running sequence.
Prompts and decoding are separate lanes that meet at the MoE layers, so they share the experts both
need; the lanes of a layered wave stay asleep from one step to the next.

A sequence that was preempted reads its prompt again as a prompt, and then what it had generated as
steps read it, several tokens a step: a prompt's pass would come to other last bits, and what others
ask for must not show in an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.engine.halves import run_overlapped
from moe.engine.prefill_batch import (
    Outcome,
    PrefillBatch,
    PrefillPass,
    ScheduledStep,
    results,
    sample,
)
from moe.network.backbone import SHORT, Backbone
from moe.network.kv_cache import Work
from moe.network.lanes import run_lanes
from moe.network.moe_layer import MoELayers
from moe.sampling.sampler import Token
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.speculator import Speculator


class ModelRunner:
    """Computes what a scheduler has planned.

    Args:
        backbone: the model.
        experts: its MoE layers.
        speculator: drafts tokens before a step, which the step then verifies; None for no drafts.
    """

    def __init__(
        self, backbone: Backbone, experts: MoELayers, speculator: Speculator | None = None
    ) -> None:
        self.backbone = backbone
        self.experts = experts
        self._speculator = speculator
        self._reading: PrefillPass | None = None

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> list[Outcome]:
        """The next tokens of everybody who gets some in this step.

        Where the forward pass or the sampler of a sequence raises, that is its outcome; the others
        are not concerned.
        """
        self.follow(step.wave)
        if step.wave is not None and self._reading is None:
            self._reading = PrefillPass(step.wave, self.backbone)
        reading = self._reading
        unread = [_num_unread(sequence) for sequence in step.decode]
        speculator = self._speculator if max(unread, default=0) == 1 else None
        proposed = None
        if speculator is not None:
            proposed = speculator.propose(step.decode, step.spare_tokens)
        drafts = proposed or [PLAIN] * len(step.decode)
        tokens = [
            Work([*self._next(s, count), *draft.tokens], s.cache, all_logits=bool(draft.tokens))
            for s, count, draft in zip(step.decode, unread, drafts, strict=True)
            if s.cache is not None
        ]
        if wanted := self.experts.context:
            told = None if speculator is None else speculator.forecast
            self.experts.begin(_contexts(step.decode, tokens, wanted), told)
        logits = self._read(tokens, reading, step.halves)
        outcomes: list[Outcome] = [
            (sequence, _accept(speculator if proposed else None, sequence, draft, rows))
            for sequence, draft, rows in zip(step.decode, drafts, logits, strict=True)
        ]
        if speculator is not None:
            speculator.finish(alone=step.wave is None)
        if reading is not None and reading.wave.is_last_stage:
            outcomes += reading.finish(self.experts.run)
            self._reading = None
        return outcomes

    def _read(
        self, tokens: Sequence[Work], reading: PrefillPass | None, halves: bool
    ) -> list[Tensor | Exception]:
        """Logits of each sequence's tokens; what else is read goes on to its end or its pause."""
        cut = len(tokens) // 2 if halves and reading is None else len(tokens)
        parts = [tokens[:cut], tokens[cut:]]
        lanes = [self.backbone.lanes(part, "decode") for part in parts]
        pauses = reading.pauses() if reading else None
        others = reading.lanes if reading else lanes[1]
        if halves:
            run_overlapped((lanes[0], others), self.experts, pauses)
        else:
            run_lanes([*others, *lanes[0]], self.experts.run, pause_at=pauses)
        return [
            rows
            for part, own in zip(parts, lanes, strict=True)
            for rows in results(own, part, self.backbone, self.experts.run)
        ]

    def _next(self, sequence: RunningSequence, unread: int) -> list[int]:
        """The tokens that a sequence reads in this step, drafted ones aside."""
        start = len(sequence.token_ids) - unread
        most = SHORT if self.backbone.packed else 1  # a state of its own wants them one by one
        return sequence.token_ids[start : start + most]

    def follow(self, wave: PrefillBatch | None) -> None:
        """Stop reading what the scheduler has given up for this wave."""
        if self._reading is not None and self._reading.wave is not wave:
            self._reading.cancel()
            self._reading = None


def _accept(
    verifying: Speculator | None, sequence: RunningSequence, draft: Draft, rows: Tensor | Exception
) -> list[Token] | Exception:
    """The tokens that follow; the sequence's state holds what they follow and no more."""
    if not isinstance(rows, Exception) and _num_unread(sequence) > 0:
        return []
    if verifying is None or isinstance(rows, Exception):
        return sample(sequence, rows)
    assert sequence.cache is not None
    try:
        tokens = verifying.accept(sequence, draft, rows)
    except Exception as error:
        return error
    sequence.cache.length -= len(rows) - len(tokens)
    return tokens


def _num_unread(sequence: RunningSequence) -> int:
    """Tokens of a sequence that its state does not hold: the last, more where it was preempted."""
    assert sequence.cache is not None
    known = len(sequence.prompt_token_ids) + len(sequence.token_ids)
    return known - sequence.cache.length


def _contexts(
    sequences: Sequence[RunningSequence], work: Sequence[Work], count: int
) -> list[list[int]]:
    """The last tokens up to each one that is read, drafted ones included."""
    contexts = []
    for sequence, item in zip(sequences, work, strict=True):
        unread = _num_unread(sequence)
        before = sequence.last_tokens(count - 1 + unread)[:-unread]
        tokens = [*before, *item.token_ids]
        ends = range(len(before) + 1, len(tokens) + 1)
        contexts += [tokens[max(0, end - count) : end] for end in ends]
    return contexts
