"""Elastic drafts: the next tokens by the model itself, with fewer experts and fewer of their bits.

`ElasticDrafts` runs the same weights over the same KV cache: a draft pass appends its rows to those
of the sequence and then resets the length, so verification overwrites every row. `DraftLayers`
replaces `MoELayers` in a draft pass. It reads nothing from disk, evicts nothing and sends nothing
to other ranks, so a draft only costs the bytes of memory that it counts.

On a GPU passes are CUDA graphs with the draft's experts inside.
Legend: T rows, H hidden, E experts, K slots a row; B sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels import Forward, QuantizedExperts
from kernels.reference import AnyExperts
from moe.decode.step import DecodeStep, RecordsExperts
from moe.describe.description import NotDescribed
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.moe_layer import Selector
from moe.network.packed_pass import Work
from moe.sequence import RunningSequence
from moe.speculate.draft import Kept, Mode
from moe.speculate.passes import PassDrafts, PendingDraft
from offload.layer import LayerExperts, OffloadedExperts, held_experts
from routing import Routing
from routing.policies.base import keep
from routing.predict import Forecast
from routing.routing import UNUSED, select_top_k

FIDELITY = 0.8
"""Probability that a row visits an expert that its draft selected. On the shipped model: 0.75 with
a quarter of the experts in memory, 0.86 with a half, 0.98 with all; 0.91 in MoE-SpeQ."""


class ElasticDrafts(PassDrafts):
    """Drafts for several sequences in shared passes of the model itself.

    Args:
        backbone: the model; sequences share its passes, so their KV rows can be discarded.
        layers: its MoE layers in draft passes.
        prefetch_early: called before each further pass of a draft with a forecast of the experts
            that verification will need, so that they are read while the pass runs.
        step: the model's decode step; None: it has none.
    """

    def __init__(
        self,
        backbone: Backbone,
        layers: DraftLayers,
        prefetch_early: Callable[[Forecast], None] = lambda _: None,
        step: DecodeStep | None = None,
    ) -> None:
        assert backbone.packed
        self._recorded = step if isinstance(step, RecordsExperts) else None
        super().__init__(stays=backbone.device.type != "cpu" or self._recorded is not None)
        self.layers = layers
        self._backbone, self._prefetch_early = backbone, prefetch_early

    @property
    def bytes_read(self) -> int:
        return self.layers.bytes_read

    def forecast(self) -> Forecast | None:
        return self.layers.forecast()

    def _begin(
        self, mode: Mode, sequences: Sequence[RunningSequence], depths: Sequence[int]
    ) -> list[PendingDraft]:
        self.layers.begin(mode)
        return [_pending(s, depth) for s, depth in zip(sequences, depths, strict=True)]

    def _run(self, drafts: Sequence[PendingDraft]) -> list[Tensor]:
        work = [draft.work for draft in drafts]
        if work[0].ahead is None:  # else a forecast would wait for the passes so far
            share = (len(self.rows) - 1) / (1 + max(draft.depth for draft in drafts))
            if share and (forecast := self.layers.forecast(share)) is not None:
                self._prefetch_early(forecast)
        self.layers.look(self._backbone.device)
        if self._recorded is not None and self._backbone.decode_forward is not None:
            try:
                made, routings = self._recorded.inside_by(
                    work, self.layers.mode.name, self.layers.reduced
                )
            except NotDescribed:  # no memory for it, most likely; from now on layer by layer
                self._recorded = None
            else:
                self.layers.chose(routings)
                return made
        lanes = self._backbone.lanes(work, "decode")
        run_lanes(lanes, self.layers.run)
        return [rows for lane in lanes for rows in lane.result()]

    def _read(self, numbers: Sequence[Tensor]) -> list[list[tuple[float, float]]]:
        return self.layers.read(numbers)


def _pending(sequence: RunningSequence, depth: int) -> PendingDraft:
    assert sequence.cache is not None
    sequence.cache.mark()
    work = Work(sequence.token_ids[-1:], sequence.cache)
    return PendingDraft(work, sequence.sampler.fork(), depth, sequence.cache.length)


class DraftLayers:
    """Runs MoE layers in one draft mode.

    Args:
        layers: experts of each MoE layer.
        forward: runs a layer's experts.
        selectors: of each layer, selects again among the allowed experts; if None, the weight of
            excluded experts goes to the others of the row.

    Attributes:
        mode: of the draft that was begun last.
        wanted: of each layer, ``(T, K)`` ids that the model's own routing selected in each pass
            since `begin`.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        forward: Forward,
        selectors: Sequence[Selector | None],
    ) -> None:
        self.layers = list(layers)
        self.wanted: list[list[Tensor]] = []
        self._forward, self._selectors = forward, list(selectors)
        self._held = cache(_at_most)
        # On the device, at addresses that stay: recorded passes know them. By bytes of an expert,
        # how many were read; by layer and rule, what it keeps; by layer, the slots of a cache.
        self._distinct: dict[int, Tensor] = {}
        self._kept: dict[tuple[int, str], Kept] = defaultdict(dict)
        self._slots: dict[int, Tensor] = {}
        self._changes: dict[int, int] = {}
        self._bytes: int | None = 0  # that the host knows of; None: ask
        self.begin(Mode("elastic"))

    def begin(self, mode: Mode) -> None:
        """Start a draft, whose passes share what rules keep."""
        self.mode = mode
        self._skipped = {at for rule in mode.rules for at in rule.skips(len(self.layers))}
        for tensor in (each for kept in self._kept.values() for each in kept.values()):
            tensor.zero_()
        self.wanted = [[] for _ in self.layers]

    def look(self, device: torch.device) -> None:
        """Before each pass, take note of which experts are in memory, without waiting for it."""
        for layer, experts in enumerate(self.layers):
            if isinstance(experts, OffloadedExperts):
                experts.cache.poll()
                slots, changes = self._slots_of(layer, device), experts.cache.changes(layer)
                if not slots.is_cpu and self._changes.get(layer) != changes:
                    slots.copy_(experts.cache.slot_ids(layer).pin_memory(), non_blocking=True)
                    self._changes[layer] = changes

    def _slots_of(self, layer: int, device: torch.device) -> Tensor:
        """``(E + 1,)``: see `ExpertCache.slot_ids`; the same tensor each time."""
        if layer not in self._slots:
            experts = self.layers[layer]
            assert isinstance(experts, OffloadedExperts)
            self._slots[layer] = experts.cache.slot_ids(layer).to(device)  # on a CPU it is live
        return self._slots[layer]

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
        """Outputs ``(T_i, H)`` of each call; see `moe.network.lanes.ExpertsRunner`."""
        return [self._run(layer, call.hidden_states, call.routing) for call in calls]

    def forecast(self, share: float = 1.0) -> Forecast | None:
        """The experts that verification will need for the rows since `begin`, according to the
        model's routing in the draft passes; None if all experts are in memory.

        Args:
            share: of a layer's slots that the forecast may fill; the rest is for later rows.
        """
        guesses = {}
        for layer, (experts, passes) in enumerate(zip(self.layers, self.wanted, strict=True)):
            if not isinstance(experts, OffloadedExperts):
                return None
            ids = torch.cat([ids.flatten() for ids in passes]).cpu()
            rows = torch.bincount(ids + 1, minlength=experts.num_experts + 1)[None, 1:]
            slots = experts.cache.slots // len(self.layers)
            chosen = select_top_k(rows, max(1, int(share * slots)))
            visited = torch.zeros(1, experts.num_experts).scatter(1, chosen, 1.0) * rows
            guesses[layer] = (1 - (1 - FIDELITY) ** visited).numpy()
        return Forecast.of_rows(-1, guesses, at_least=FIDELITY / 2)

    def _run(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        self.wanted[layer].append(routing.expert_ids)
        return self.reduced(layer, rows, routing)

    def reduced(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        """``(T, H)``: what the mode leaves of a layer; the same work each time, without waiting for
        the device."""
        if layer in self._skipped:
            return torch.zeros_like(rows)
        experts, mode, unused_T1 = self.layers[layer], self.mode, None
        held, size = self._held(held_experts(experts), mode.bits)
        allowed_E = self._allowed(layer, routing)
        if allowed_E is not None and not _all(_inside(routing, allowed_E)):
            selector, top_k = self._selectors[layer], mode.experts or routing.top_k
            if selector is not None:
                unused_T1 = (routing.expert_ids == UNUSED).all(1, keepdim=True)  # padding
                routing = selector.select(selector.scores(rows), allowed_E, top_k)
        routing = restrict(routing, allowed_E, mode.experts)
        ids = routing.expert_ids
        if unused_T1 is not None:
            ids = ids.masked_fill(unused_T1, UNUSED)
        if isinstance(experts, OffloadedExperts):
            ids = self._slots_of(layer, ids.device)[ids]
        self._count(ids, size, held.num_experts)
        return self._forward(rows, ids, routing.weights, held)

    def chose(self, routings: Sequence[Routing]) -> None:
        """Take the choices of the model's own routers in a recorded pass, of each layer."""
        for passes, routing in zip(self.wanted, routings, strict=True):
            passes.append(routing.expert_ids)
        self._bytes = None

    @property
    def bytes_read(self) -> int:
        """Bytes of experts that all passes so far have read; may wait for the device."""
        if self._bytes is None:
            self._bytes = sum(size * int(count) for size, count in self._distinct.items())
        return self._bytes

    def read(self, numbers: Sequence[Tensor]) -> list[list[tuple[float, float]]]:
        """Read the rows of ``(B, 2)`` float64 numbers back, and with them what the host wants to
        know of the passes since `begin`: it waits for the device once."""
        wanted = [ids for passes in self.wanted for ids in passes]
        parts = [*numbers, *self._distinct.values(), *wanted]
        if not parts:
            return []
        sent = torch.cat([part.flatten().double() for part in parts])
        ends = np.cumsum([part.numel() for part in parts])
        told = iter(np.split(sent.to("cpu").numpy(), ends))
        pairs = [[(row[0], row[1]) for row in next(told).reshape(-1, 2).tolist()] for _ in numbers]
        self._bytes = sum(size * int(next(told)[0]) for size in self._distinct)
        for passes in self.wanted:
            passes[:] = [torch.from_numpy(next(told).astype(np.int64)) for _ in passes]
        return pairs

    def _count(self, ids_TK: Tensor, size: int, num_experts: int) -> None:
        """Count the experts that a pass reads, of so many bytes each, without waiting."""
        visited_E = ids_TK.new_zeros(num_experts + 1)
        if size not in self._distinct:
            self._distinct[size] = ids_TK.new_zeros(())
        self._distinct[size] += visited_E.scatter_(0, ids_TK.flatten() + 1, 1)[1:].sum()
        self._bytes = None

    def _allowed(self, layer: int, routing: Routing) -> Tensor | None:
        """``(E,)`` bool: experts that this mode may use; None for all."""
        experts, here_E = self.layers[layer], None
        if isinstance(experts, OffloadedExperts):
            here_E = self._slots_of(layer, routing.expert_ids.device)[:-1] >= 0
        allowed_E = here_E
        for rule in self.mode.rules:
            kept = self._kept[layer, rule.name]
            own_E = rule.allowed(routing, here_E, experts.num_experts, kept)
            if own_E is not None:
                allowed_E = own_E if allowed_E is None else allowed_E & own_E
        return allowed_E


def restrict(routing: Routing, allowed_E: Tensor | None, top_k: int | None) -> Routing:
    """The routing without experts that are not allowed, and with at most ``top_k`` of a row.

    The remaining experts of a row take over the weight of the others; none may remain.

    Args:
        allowed_E: ``(E,)`` bool; None for all.
        top_k: None for as many as there are.
    """
    if allowed_E is None and top_k is None:
        return routing
    kept_TK = routing.expert_ids != UNUSED
    if allowed_E is not None:
        kept_TK = _inside(routing, allowed_E) & kept_TK
    if top_k is not None and top_k < routing.top_k:
        kept_TK = kept_TK & first(routing.weights.masked_fill(~kept_TK, -1.0), top_k)
    return routing if _all(kept_TK) else keep(routing, kept_TK)


def _all(mask: Tensor) -> bool:
    """Return whether the host knows, without waiting for a device, that a mask is True
    everywhere."""
    return mask.is_cpu and bool(mask.all())


def _inside(routing: Routing, allowed_E: Tensor) -> Tensor:
    """``(T, K)`` bool; unused slots count as inside."""
    return torch.cat([allowed_E, allowed_E.new_ones(1)])[routing.expert_ids]


def first(weights_TK: Tensor, count: int) -> Tensor:
    """``(T, K)`` bool: the ``count`` largest of each row."""
    places = select_top_k(weights_TK, count)
    return torch.zeros_like(weights_TK, dtype=torch.bool).scatter(1, places, True)


def _at_most(held: AnyExperts, bits: int | None) -> tuple[AnyExperts, int]:
    """A layer's experts at a prefix of their bits, and the bytes of one. Callers cache the result:
    kernels keep data by the object's identity."""
    if not isinstance(held, QuantizedExperts):
        return held, held.expert_bytes
    held = held if bits is None else held.at_most(bits)
    return held, held.expert_bytes_of(0)  # slots of the most common size come first
