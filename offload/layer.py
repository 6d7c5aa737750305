"""One MoE layer whose experts are in a cache, and run where they are.

Legend as in kernels/reference.py; a slot is an expert to the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels import ExpertWeights, Forward, experts_forward
from kernels.cpu import choose_kernel
from kernels.cpu.experts import LayerCall
from kernels.cpu.streaming import LayerBuffers, NativeReads, ReadJob
from kernels.reference import AnyExperts, sum_dtype
from offload.cache import ExpertCache
from offload.cpu_experts import LateExperts
from offload.errors import OffloadError
from offload.held import Held
from offload.host_tier import HostSource
from offload.prefetch import Prefetcher
from offload.readers.native import INTERRUPT_POLL_S, NativeTransfer
from routing import Routing
from routing.routing import UNUSED

# ---- Whole layers ahead: who asks for nearly all experts of a layer will ask for those of the
# next.
#
# A prompt does. While the next layer's attention is computed nothing is asked for, and the disk
# would rest; so the first of its experts are read by then, into slots that are worth less.

NEARLY_ALL = 0.9
"""Share of a layer's experts that a call asks for."""
SLOTS_SHARE = 8
"""One of so many slots may be filled ahead."""


def read_ahead(cache: ExpertCache, layer: int, asked: int) -> None:
    """Begin to read what the next layer lacks, where this one's call wanted nearly everything.

    Args:
        layer: whose call is over.
        asked: how many of its experts the call wanted.
    """
    experts, following = cache.sizes.experts, layer + 1
    if following == len(experts) or asked < NEARLY_ALL * experts[layer]:
        return
    most = max(1, cache.slots // SLOTS_SHARE)
    for expert in cache.absent(following, range(experts[following]))[:most]:
        if not cache.prefetch(following, expert, value=asked / experts[layer]):
            return


# ---- Light experts: those whose part in a result is so small that a prefix of their bits may do.


def light_experts(ids_TK: Tensor, weights_TK: Tensor, share: float) -> list[int]:
    """Experts that are light to every token that asks for them, ascending.

    A token's heaviest experts that have ``share`` of its router weight together are heavy, and
    those behind them light: the rule of HOBBIT (arXiv 2411.01433). Of equal weights the one in the
    earlier slot counts as heavier.

    Args:
        ids_TK: on the CPU.
        share: in [0, 1]; at 0 all are light, at 1 none but those without weight.
    """
    ids = ids_TK.numpy()
    weights = np.where(ids == UNUSED, 0.0, np.abs(weights_TK.double().cpu().numpy()))
    order = np.argsort(-weights, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    weights = np.take_along_axis(weights, order, axis=1)
    before = np.cumsum(weights, axis=1) - weights
    heavy = before < share * weights.sum(axis=1, keepdims=True)
    light: list[int] = np.setdiff1d(ids[~heavy], np.append(ids[heavy], UNUSED)).tolist()
    return light


# ---- A call's experts run as they come, in one compiled call: what `Held.waves` are for, where
# nobody has to act between them.


def run_arriving(held: Held, how: LayerCall, slots: AnyExperts, rows: LayerBuffers) -> bool:
    """Fill the rows' ``out`` with the bits of `experts_forward` on all of the call's experts;
    False where they can not be run so, and nothing has been done.

    Args:
        how: what runs ``slots``, on rows like these.

    Raises:
        OffloadError: an expert cannot be read.
    """
    native, coming = choose_kernel()[0], held.coming()
    if native is None or coming is None:
        return False
    told: list[tuple[int, int, ReadJob | None]] = []
    reads: NativeReads | None = None
    for expert, slot, transfer in coming:
        if transfer is None:
            told.append((expert, slot, None))
        elif isinstance(transfer, NativeTransfer):
            told.append((expert, slot, transfer.record))
            reads = transfer.reads
        else:
            return False
    call = native.arriving(how, slots, rows, told, reads, INTERRUPT_POLL_S)
    while (late := call.run()) is not None:
        held.arrive(late)
    held.arrived(call.waited)
    return True


# ----


class OffloadedExperts:
    """The experts of a layer, of which some are in memory at a time.

    Args:
        layer: index of the MoE layer in the cache.
        num_experts: E of the layer.
        cache: who is in which slot.
        slots: the slots, as the experts of one layer with this layer's activation.
        copies: what fills the slots of a GPU; None on a CPU.
        late: what computes some of those that a GPU lacks, where a profile lets it.

    Attributes:
        whole_share: see `offload.layer`; None where prefixes are not served.
        ahead: whether the next layer is read ahead, see `offload.layer`.
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        cache: ExpertCache,
        slots: AnyExperts,
        copies: HostSource | None = None,
        late: LateExperts | None = None,
    ) -> None:
        self.layer, self.num_experts = layer, num_experts
        self.cache, self.slots = cache, slots
        own, biases = cache.bytes_of(layer), (slots.gate_up_bias_EG, slots.down_bias_EH)
        self.expert_bytes = sum(own) // num_experts + sum(
            bias[0].nbytes for bias in biases if bias is not None
        )
        self._copies, self.late = copies, late
        self.whole_share: float | None = None
        self.ahead = False
        self._how: LayerCall | None = None

    @property
    def plain(self) -> bool:
        """Whether kernels run its slots as they are, with nobody else in between."""
        return self._copies is None and self.late is None and self.whole_share is None

    @property
    def hidden_size(self) -> int:
        return self.slots.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.slots.intermediate_size

    def forward(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        forward: Forward,
        prefetcher: Prefetcher | None = None,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As `kernels.experts_forward`, whose bits it gives: experts come in ascending waves, and
        each wave adds to the sum that the ones before have left; late experts come last.

        Args:
            expert_ids_TK: each row ascending.
            forward: what runs experts.
            prefetcher: hears what this call needs, and looks ahead while it is read.

        Raises:
            OffloadError: an expert cannot be read; the cache goes on.
        """
        copies = self._copies
        ids_TK = expert_ids_TK if copies is None else expert_ids_TK.cpu()
        wanted = sorted(set(chain.from_iterable(ids_TK.tolist())) - {UNUSED})
        total_TH = add_to_TH
        if copies is not None:  # the compute stream is here: it has waited for what it had to
            for layer, seconds in copies.take_delays():
                self.cache.statistics.layers[layer].stall_seconds += seconds
        asked, late = wanted, None
        if self.late is not None:
            late = self.late.part(self.cache, wanted, hidden_TH, ids_TK, weights_TK)
        if late is not None:
            wanted, ids_TK = late.others, late.others_TK
        elsewhere = () if late is None else late.experts
        with self._held(asked, wanted, elsewhere, self._light(ids_TK, weights_TK)) as held:
            if copies is not None:
                copies.launch()
            if prefetcher is not None:
                routing = Routing(expert_ids_TK, weights_TK)
                prefetcher.visit(self.layer, asked, hidden_TH, routing)
            how = self._compiled(hidden_TH) if forward is experts_forward else None
            if how is not None and add_to_TH is None:
                out_TH = torch.empty_like(hidden_TH)
                rows = LayerBuffers.of(hidden_TH, ids_TK, weights_TK, out_TH)
                if run_arriving(held, how, self.slots, rows):
                    return out_TH
            for wave in held.waves:
                slot_ids_TK = wave.slot_ids.take(ids_TK)
                if copies is not None:
                    slot_ids_TK = copies.streams.bring(slot_ids_TK)
                if len(wave.experts) == len(wanted) and add_to_TH is None and late is None:
                    return forward(hidden_TH, slot_ids_TK, weights_TK, self.slots)
                if total_TH is None:
                    total_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=sum_dtype(self.slots))
                forward(hidden_TH, slot_ids_TK, weights_TK, self.slots, total_TH)
        assert total_TH is not None
        if late is not None:
            total_TH += late.compute().to(total_TH.device)
        return total_TH.to(hidden_TH.dtype) if add_to_TH is None else add_to_TH

    def run(
        self,
        wanted: Sequence[int],
        how: LayerCall,
        rows: LayerBuffers,
        hidden_TH: Tensor,
        routing: Routing,
    ) -> Tensor | None:
        """As `forward`, for a compiled step, and where the slots are `plain`.

        Args:
            wanted: the experts of the routing, ascending and distinct.
            how: what runs the slots.
            rows: of the same tensors.

        Returns:
            None: ``rows.out_TH`` has been filled.
        """
        with self.cache.acquire(self.layer, wanted) as held:
            if run_arriving(held, how, self.slots, rows):
                return None
            total_TH = torch.zeros_like(hidden_TH)
            for wave in held.waves:
                ids_TK = wave.slot_ids.take(routing.expert_ids)
                experts_forward(hidden_TH, ids_TK, routing.weights, self.slots, total_TH)
            return total_TH

    def _light(self, ids_TK: Tensor, weights_TK: Tensor) -> Sequence[int]:
        """Experts of which a prefix may do."""
        if self.whole_share is None:
            return ()
        return light_experts(ids_TK, weights_TK, self.whole_share)

    @contextmanager
    def _held(
        self,
        asked: Sequence[int],
        wanted: Sequence[int],
        elsewhere: Sequence[int],
        light: Sequence[int],
    ) -> Iterator[Held]:
        with self.cache.acquire(self.layer, wanted, elsewhere, light) as held:
            yield held
        if self.ahead and self.whole_share is None:  # it would bring whole ones
            read_ahead(self.cache, self.layer, len(asked))

    def _compiled(self, hidden_TH: Tensor) -> LayerCall | None:
        """What runs rows like these without Python, where nobody else is in between."""
        if not self.plain or hidden_TH.dtype != torch.float32 or torch.is_grad_enabled():
            return None
        if self._how is None and (native := choose_kernel()[0]) is not None:
            self._how = native.layer_call(hidden_TH, self.slots)
        return self._how

    def unreadable(self, experts: Sequence[int]) -> dict[int, OffloadError]:
        """Those that cannot be had, and why; the others are tried for too."""
        lost = {}
        for expert in experts:
            try:
                with self.cache.acquire(self.layer, [expert]) as held:
                    for _ in held.waves:
                        pass
            except OffloadError as error:
                lost[expert] = error
        return lost


LayerExperts = AnyExperts | OffloadedExperts
"""Experts of one MoE layer, in memory or not."""


def held_experts(layer: LayerExperts) -> AnyExperts:
    """What kernels see of a layer."""
    return layer.slots if isinstance(layer, OffloadedExperts) else layer


def one_expert_bytes(slots: AnyExperts) -> int:
    """Bytes of one expert, or of one of those that there are most of."""
    return slots.expert_bytes if isinstance(slots, ExpertWeights) else slots.expert_bytes_of(0)
