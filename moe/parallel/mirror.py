"""A rank's own side of the sequences that it computes: it does what rank 0 orders in each step.

See `moe.parallel.orders` for what an order says.
"""

from __future__ import annotations

from typing import Any

from moe.engine.borrowing import BorrowedRoom
from moe.engine.reading import Outcome
from moe.engine.runner import Runner
from moe.engine.sequence import RunningSequence
from moe.engine.wave import Group, Piece, Step, Wave
from moe.kv import SequenceCache
from moe.parallel.wire import Message
from moe.sampling.constraint import Structures
from moe.sampling.logprobs import Token
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from moe.sampling.structure import Structure
from moe.text.stop_strings import StopStrings


class Mirror:
    """The sequences of one engine of rank 0 that are computed here.

    Args:
        runner: computes steps.
        logits_size: V of the logits.
        structures: what texts may have to be like.
        borrowed: gives room that keys and values do not need to experts on disk, if there are any.
    """

    def __init__(
        self,
        runner: Runner,
        logits_size: int,
        structures: Structures,
        borrowed: BorrowedRoom | None = None,
    ) -> None:
        self._runner = runner
        self._logits_size = logits_size
        self._structures = structures
        self._borrowed = borrowed
        self._sequences: dict[int, RunningSequence] = {}
        self._numbers: dict[RunningSequence, int] = {}
        self._caches: dict[int, SequenceCache] = {}
        self._groups: dict[int, Group] = {}
        self._wave: Wave | None = None
        self._wave_caches: list[list[int]] = []

    def _prepare(self, order: Message) -> None:
        """What an order wants before its step: new sequences, and caches copied or freed."""
        for fields in order["new"]:
            sequence = self._made(fields)
            self._sequences[fields["id"]] = sequence
            self._numbers[sequence] = fields["id"]
        for what, number, *source in order["caches"]:
            if what == "copy":
                origin, capacity, length = source
                self._caches[number] = self._caches[origin].fork(capacity, length)
            else:
                self._caches.pop(number, None)
        for number in order["ended"]:
            sequence = self._sequences.pop(number)
            sequence.cancelled = True
            del self._numbers[sequence]
            self._groups.pop(number, None)

    def rest(self, order: Message) -> None:
        """Free what an order says where no step follows."""
        self._prepare(order)
        self._wave = None
        self._runner.follow(None)

    def run(self, order: Message, halves: bool) -> Message:
        """Prepare, compute the step, in halves or not, and say what came of it."""
        self._prepare(order)
        if self._borrowed is not None:
            self._borrowed.follow(order["used"])
        self._wave = self._ordered_wave(order["wave"])
        decode = [self._sequences[number] for number, _ in order["decode"]]
        for sequence, (_, cache) in zip(decode, order["decode"], strict=True):
            sequence.cache = self._caches[cache]
        spare = float("inf") if order["spare"] is None else order["spare"]
        outcomes = self._runner.run(Step(decode, self._wave, spare, halves))
        self._settle_wave()
        for sequence in decode:
            sequence.cache = None  # the table holds it, until rank 0 says that it is free
        return {"outcomes": [self._said(outcome) for outcome in outcomes]}

    def _made(self, fields: Message) -> RunningSequence:
        given = fields["params"]
        given["logit_bias"] = {int(number): bias for number, bias in given["logit_bias"].items()}
        if given["structure"] is not None:
            given["structure"] = Structure(**given["structure"])
        params = SamplingParams(**given)
        constraint = self._structures.constraint(params)
        sampler = Sampler(params, fields["prompt"], self._logits_size, fields["index"], constraint)
        sequence = RunningSequence(
            fields["prompt"], sampler, None, StopStrings(()), (), fields["max_new_tokens"]
        )
        sampler.replay(fields["tokens"])
        sequence.token_ids = fields["tokens"]
        return sequence

    def _ordered_wave(self, order: Message | None) -> Wave | None:
        if order is None:
            return None
        if "pieces" in order:
            self._wave_caches = [piece["caches"] for piece in order["pieces"]]
            pieces = [self._piece(piece) for piece in order["pieces"]]
            return Wave(pieces, tuple(order["pauses"]), order["stage"])
        assert self._wave is not None
        self._wave.stage = order["stage"]
        return self._wave

    def _piece(self, order: Message) -> Piece:
        first = order["sequences"][0]
        sequences = [self._sequences[number] for number in order["sequences"]]
        group = self._groups.get(first)
        if group is None or group.sequences != sequences or order["start"] == 0:
            scores: list[Token | None] | None = [] if order["scored"] else None
            group = self._groups[first] = Group(sequences, prompt_logprobs=scores)
        group.num_read, group.cache = order["start"], self._caches.get(order["caches"][0])
        end = order["start"] + order["size"]
        return Piece(group, group.token_ids[order["start"] : end], order["is_last"])

    def _settle_wave(self) -> None:
        """Note the caches of a wave under the numbers that rank 0 knows them by."""
        if self._wave is None:
            return
        for piece, numbers in zip(self._wave.pieces, self._wave_caches, strict=True):
            group = piece.group
            caches = [group.cache]
            if self._wave.is_last_stage and piece.is_last:
                caches = [sequence.cache for sequence in group.sequences]
                self._groups.pop(self._numbers.get(group.sequences[0], -1), None)
                for sequence in group.sequences:
                    sequence.cache = None
            for number, cache in zip(numbers, caches, strict=False):
                if cache is not None and not group.cancelled:
                    self._caches[number] = cache
        if self._wave.is_last_stage:
            self._wave = None

    def _said(self, outcome: Outcome) -> list[Any]:
        sequence, tokens = outcome
        number = self._numbers[sequence]
        if isinstance(tokens, Exception):
            return [number, None, [type(tokens).__name__, str(tokens)], None]
        prompt, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        sequence.token_ids += [token.id for token in tokens]
        known = None if prompt is None else [token and _fields(token) for token in prompt]
        return [number, [_fields(token) for token in tokens], None, known]


def _fields(token: Token) -> list[Any]:
    return [token.id, token.logprob, token.top, token.is_last]
