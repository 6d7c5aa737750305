"""What a rank computes in a step: its own sequences, and experts for everybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experts.dispatch import AllToAllDispatcher, ExchangeError
from experts.placement import Placement, first_placement, slots_for, without_ranks
from experts.placement.placement import Ints
from experts.placement.rebalance import Rebalancer
from moe.engine.borrowing import KVBorrowing
from moe.engine.prefill_batch import (
    PrefillBatch,
    PromptChunk,
    ScheduledStep,
    SequenceGroup,
)
from moe.engine.runner import ModelRunner, Outcome
from moe.network.kv_cache import SequenceCache
from moe.network.moe_layer import MoELayers
from moe.parallel.expected_load import ExpectedLoad
from moe.parallel.group import WatchedExchange
from moe.parallel.transport import Message
from moe.parallel.watchdog import Heartbeat
from moe.sampling.constraint import Structures
from moe.sampling.params import SamplingParams, Structure
from moe.sampling.sampler import Sampler, Token
from moe.sequence import RunningSequence
from moe.settings import ParallelSettings
from moe.text.detokenize import StopStrings
from offload.layer import OffloadedExperts
from offload.offloaded import Offloaded

# ---- A rank's own side of the sequences that it computes: it does what rank 0 orders in each
# step.
#
# See `moe.parallel.orders` for what an order says.


class EngineMirror:
    """The sequences of one engine of rank 0 that are computed here.

    Args:
        runner: computes steps.
        logits_size: V of the logits.
        structures: what texts may have to be like.
        borrowed: gives room that keys and values do not need to experts on disk, if there are any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        logits_size: int,
        structures: Structures,
        borrowed: KVBorrowing | None = None,
    ) -> None:
        self._runner = runner
        self._logits_size = logits_size
        self._structures = structures
        self._borrowing = borrowed
        self._sequences: dict[int, RunningSequence] = {}
        self._numbers: dict[RunningSequence, int] = {}
        self._caches: dict[int, SequenceCache] = {}
        self._groups: dict[int, SequenceGroup] = {}
        self._batch: PrefillBatch | None = None
        self._batch_caches: list[list[int]] = []

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
        self._batch = None
        self._runner.keep_prefill(None)

    def run(self, order: Message, halves: bool) -> Message:
        """Prepare, compute the step, in halves or not, and say what came of it."""
        self._prepare(order)
        if self._borrowing is not None:
            self._borrowing.resize_for(order["used"])
        self._batch = self._ordered_batch(order["prefill"])
        decode = [self._sequences[number] for number, _ in order["decode"]]
        for sequence, (_, cache) in zip(decode, order["decode"], strict=True):
            sequence.cache = self._caches[cache]
        spare = float("inf") if order["spare"] is None else order["spare"]
        outcomes = self._runner.run(ScheduledStep(decode, self._batch, spare, halves))
        self._settle_batch()
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

    def _ordered_batch(self, order: Message | None) -> PrefillBatch | None:
        if order is None:
            return None
        if "chunks" in order:
            self._batch_caches = [chunk["caches"] for chunk in order["chunks"]]
            chunks = [self._chunk(chunk) for chunk in order["chunks"]]
            return PrefillBatch(chunks, tuple(order["pauses"]), order["layer_group"])
        assert self._batch is not None
        self._batch.layer_group = order["layer_group"]
        return self._batch

    def _chunk(self, order: Message) -> PromptChunk:
        first = order["sequences"][0]
        sequences = [self._sequences[number] for number in order["sequences"]]
        group = self._groups.get(first)
        if group is None or group.sequences != sequences or order["start"] == 0:
            scores: list[Token | None] | None = [] if order["scored"] else None
            group = self._groups[first] = SequenceGroup(sequences, prompt_logprobs=scores)
        group.num_read, group.cache = order["start"], self._caches.get(order["caches"][0])
        end = order["start"] + order["size"]
        return PromptChunk(group, group.token_ids[order["start"] : end], order["is_last"])

    def _settle_batch(self) -> None:
        """Note the caches of a batch under the numbers that rank 0 knows them by."""
        if self._batch is None:
            return
        for chunk, numbers in zip(self._batch.chunks, self._batch_caches, strict=True):
            group = chunk.group
            caches = [group.cache]
            if self._batch.is_last_layer_group and chunk.is_last:
                caches = [sequence.cache for sequence in group.sequences]
                self._groups.pop(self._numbers.get(group.sequences[0], -1), None)
                for sequence in group.sequences:
                    sequence.cache = None
            for number, cache in zip(numbers, caches, strict=False):
                if cache is not None and not group.cancelled:
                    self._caches[number] = cache
        if self._batch.is_last_layer_group:
            self._batch = None

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


# ----


class RankWorker:
    """The computing side of a rank.

    Args:
        experts: MoE layers of the model.
        new_mirror: makes the sequences' side, one for each engine of rank 0.
        settings: of the profile.
        pulse: of this process.
        offloaded: experts that are read when they are needed; None where all are in memory.

    Attributes:
        placements: of each MoE layer, in the present group.
        dispatcher: the way to experts of other ranks; None for a rank that is alone.
    """

    def __init__(
        self,
        experts: MoELayers,
        new_mirror: Callable[[], EngineMirror],
        settings: ParallelSettings,
        pulse: Heartbeat,
        offloaded: Offloaded | None = None,
    ) -> None:
        self._experts, self._new_mirror = experts, new_mirror
        self._offloaded = offloaded
        self._settings, self._pulse = settings, pulse
        self._mirrors: dict[int, EngineMirror] = {}
        self._exchange: WatchedExchange | None = None
        self.placements: list[Placement] = []
        self.dispatcher: AllToAllDispatcher | None = None

    @property
    def num_layers(self) -> int:
        return len(self._experts.layers)

    def placed(self, before: Sequence[int], now: Sequence[int]) -> list[Placement]:
        """Placements for these ranks.

        Args:
            before: of the present group; none where there is none yet.
            now: of the next one, all of them among those before.
        """
        layers, settings, ranks = self._experts.layers, self._settings, len(now)
        kind, copies = settings.placement, settings.replicas
        if not before:
            return [first_placement(kind, layer.num_experts, ranks, copies) for layer in layers]
        lost = {before.index(rank) for rank in before if rank not in now}
        return [
            without_ranks(old, lost, slots_for(old.num_experts, ranks, copies))
            for old in self.placements
        ]

    def join(self, exchange: WatchedExchange | None, placements: Sequence[Placement]) -> None:
        """Take part in a new group, with no sequences; without an exchange, alone."""
        self._mirrors.clear()
        self._leave()
        self.placements, self._exchange = list(placements), exchange
        if exchange is not None:
            self._hold(exchange.rank, dict(enumerate(placements)))
            self.dispatcher = AllToAllDispatcher(
                exchange,
                placements,
                combine=self._settings.combine,
                payload=self._settings.payload,
                buffer_rows=self._settings.buffer_rows,
            )

    def step(self, message: Message) -> Message:
        """Compute this rank's part of a step. Raises `ExchangeError` if a rank is lost in it."""
        self._pulse.now("computing")
        for engine in message["ended_engines"]:
            self._mirrors.pop(engine, None)
        if message["reset"] and self.dispatcher is not None:
            self.dispatcher.statistics.reset()
        mirror = self._mirror(message)
        if message["moves"] is not None:
            self._place(message["moves"])
        local = self._experts.dispatcher
        if self.dispatcher is not None:
            self._experts.dispatcher = self.dispatcher
        try:
            with self._experts.lockstep(range(*message["layers"])):
                reply = mirror.run(message["order"], message["halves"])
        except ExchangeError:
            self._leave()
            raise
        finally:
            self._experts.dispatcher = local
            self._pulse.now("idle")
        if self.dispatcher is not None:
            reply["traffic"] = self.dispatcher.statistics.as_dict()
        return reply

    def rebalancer(self, arrivals: ExpectedLoad | None) -> Rebalancer:
        """What changes the placements of this group where that pays."""
        offloaded, seconds_LE = self._offloaded, []
        for index, layer in enumerate(self._experts.layers):
            read = offloaded.read_seconds(index) if offloaded else np.zeros(layer.num_experts)
            seconds_LE.append(np.asarray(read))
        return Rebalancer(
            self.placements,
            seconds_LE=seconds_LE,
            missing=offloaded.miss_ratio if offloaded else None,
            horizon_s=self._settings.rebalance_horizon_s,
            token_loads=None if arrivals is None else arrivals.of_layer,
        )

    def take_loads(self) -> Ints | None:
        """``(L, E)`` tokens of each expert of each layer on all ranks in the last step; None for a
        rank that is alone."""
        return None if self.dispatcher is None else self.dispatcher.statistics.take_loads()

    def prepare(self, message: Message) -> None:
        """Free what an engine has given up, without a step."""
        self._mirror(message).rest(message["order"])

    def _leave(self) -> None:
        """Let nobody wait for this rank any more."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self.dispatcher = None

    def _hold(self, rank: int, placements: Mapping[int, Placement]) -> None:
        """Read this rank's share of the experts of some layers, as far as there is room. To the
        cache, what it does not know is worth less than what others serve now: that has to go."""
        for index, placement in placements.items():
            layer = self._experts.layers[index]
            if isinstance(layer, OffloadedExperts):
                mine_E = placement.copies_ER[:, rank] > 0
                layer.cache.drop((index, int(expert)) for expert in np.flatnonzero(~mine_E))
                layer.cache.warm((index, int(expert)) for expert in np.flatnonzero(mine_E))

    def _mirror(self, message: Message) -> EngineMirror:
        engine = message["engine"]
        if engine not in self._mirrors:
            self._mirrors[engine] = self._new_mirror()
        return self._mirrors[engine]

    def _place(self, moves: Message) -> None:
        assert self.dispatcher is not None
        assert self._exchange is not None
        changed = {
            int(layer): replace(self.placements[int(layer)], experts_P=tuple(experts_P))
            for layer, experts_P in moves["placements"].items()
        }
        self.dispatcher.apply_placements(moves["epoch"], changed)
        self.placements = self.dispatcher.placements
        self._hold(self._exchange.rank, changed)
