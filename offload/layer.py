"""`OffloadedExperts`: one MoE layer whose experts are in a cache, and the ways to run a call of it.

A layer call asks the cache for the experts of its routing (`ExpertCache.acquire`), which begins to
read the missing ones (`SlotManager.fetch` in offload/slot_manager.py). Then they run in one of
four ways. All give the bits of one kernel call on the layer's experts, except the last one:

===============  ====================================  =============================================
way              computed by                           when
===============  ====================================  =============================================
no call          the compiled step (moe/decode)        a decode step with experts inside finds every
                                                       expert of the layer in its slot
as they arrive   `run_arriving`: one compiled call,    float32 rows on a CPU, compiled kernels, each
                 which waits for the reads in C++      expert has a slot, the native reader reads
                                                       the missing ones, and none may be a prefix
in rounds        one kernel call for each of           anything else: a GPU, a Python kernel, other
                 `PinnedExperts.rounds`, in ascending  readers, more experts than slots, prefixes
                 order
shared with      rounds on the GPU for some experts,   a GPU, ``offload.late: host`` (or
the CPU          `CpuShare.compute` for the others     ``host_int8``), missing experts that the
                                                       CPU computes sooner than they are copied
===============  ====================================  =============================================

`OffloadedExperts.forward` gives some experts to the CPU, or none; `OffloadedExperts._run` chooses
between the middle two. Where a GPU holds all experts that a layer may be asked for, `SlotsOnGpu`
looks their slots up there, and the host never waits for the router's choice. Legend as in
kernels/reference.py; to a kernel, a slot is an expert.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kernels import Forward, experts_forward
from kernels.cpu import choose_kernel
from kernels.cpu.experts import LayerCall
from kernels.cpu.streaming import LayerBuffers, NativeReads, ReadJob
from kernels.reference import AnyExperts, sum_dtype
from offload.cache import ExpertCache
from offload.cpu_experts import CpuExperts
from offload.errors import OffloadError
from offload.host_tier import HostSource
from offload.pins import PinnedExperts
from offload.prefetch import Prefetcher
from offload.readers.native import INTERRUPT_POLL_S, NativeTransfer
from offload.streams import Later, Streams
from routing import Routing
from routing.routing import UNUSED

NEARLY_ALL = 0.9
"""Share of its experts that a layer call wants if the next layer is to be read ahead."""
COPIED_WITH_IDS = 256 << 10
"""Bytes of a call's rows that are copied to the CPU together with the ids: a trip costs as much."""
SLOTS_SHARE = 8
"""One of this many slots may be filled ahead."""


class MissingExperts(Protocol):
    """A missing-expert policy: which experts a call may have with the first of their bits.

    Attributes:
        bits: of such an expert that are read.
    """

    @property
    def bits(self) -> int: ...

    def light(self, ids_TK: Tensor, weights_TK: Tensor) -> Sequence[int]:
        """The experts, ascending; ``ids_TK`` is on the CPU."""


class OffloadedExperts:
    """The experts of a layer, of which some are in memory at a time.

    Args:
        layer: index of the MoE layer in the cache.
        num_experts: E of the layer.
        cache: which expert is in which slot.
        slots: the slots, as the experts of one layer with this layer's activation.
        copies: fills the slots of a GPU; None on a CPU.
        cpu: computes some experts that a GPU lacks, if the profile allows it.
        reads_ahead: call `read_ahead` after each call.
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        cache: ExpertCache,
        slots: AnyExperts,
        copies: HostSource | None = None,
        cpu: CpuExperts | None = None,
        *,
        reads_ahead: bool = False,
    ) -> None:
        self.layer, self.num_experts = layer, num_experts
        self.cache, self.slots, self.cpu = cache, slots, cpu
        own, biases = cache.bytes_of(layer), (slots.gate_up_bias_EG, slots.down_bias_EH)
        self.expert_bytes = sum(own) // num_experts + sum(
            bias[0].nbytes for bias in biases if bias is not None
        )
        self._copies, self._reads_ahead = copies, reads_ahead
        self._on_gpu = None if copies is None else SlotsOnGpu(layer, cache, copies.streams)
        self._missing: MissingExperts | None = None
        self._layer_call: LayerCall | None = None

    def serve_prefixes(self, missing: MissingExperts) -> None:
        """Let the cache hold the experts that this policy names by a prefix of their bits."""
        self._missing = missing

    def serve_only(self, experts: Sequence[int] | None) -> None:
        """Promise that later calls ask for these experts only; None: for any."""
        if self._on_gpu is not None:
            self._on_gpu.serve_only(experts)

    @property
    def only_kernels(self) -> bool:
        """Return whether compiled code can run the slots: without copies, prefixes or a share of
        the CPU there is nothing for Python to do."""
        return self._copies is None and self.cpu is None and self._missing is None

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
        """As `kernels.experts_forward`, with the same bits unless the CPU takes a share.

        Args:
            expert_ids_TK: each row ascending.
            forward: runs experts.
            prefetcher: is told what this call needs, and looks ahead while that is read.

        Raises:
            OffloadError: an expert cannot be read; the cache goes on.
        """
        slots_TK = self._slots_on_gpu(expert_ids_TK, prefetcher)
        if slots_TK is not None:
            return forward(hidden_TH, slots_TK, weights_TK, self.slots, add_to_TH)
        # 1. Which experts does the call need, and which of them does the CPU compute?
        ids_TK, copies, share = expert_ids_TK, self._copies, None
        near: Sequence[Tensor] = ()
        if copies is not None:
            # Waits for the GPU, so stalls until here can be counted.
            ids_TK, *near = copies.streams.read([ids_TK, *self._for_cpu(weights_TK, hidden_TH)])
            copies.count_stalls(self.cache.statistics)
        wanted = asked = sorted(set(chain.from_iterable(ids_TK.tolist())) - {UNUSED})
        on_cpu: Sequence[int] = ()
        total_TH = add_to_TH
        if self.cpu is not None:
            weights, hidden = near or (weights_TK, hidden_TH)
            share = self.cpu.share(self.cache, asked, hidden, ids_TK, weights)
        with share or nullcontext():
            if share is not None:
                wanted, on_cpu, ids_TK = share.others, share.experts, share.others_TK
                if total_TH is None:
                    total_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=sum_dtype(self.slots))
            prefixes: Sequence[int] = ()
            if self._missing is not None:
                prefixes = self._missing.light(ids_TK, weights_TK)
            # 2. Pin them, begin to read those that are missing, and run each when it is there.
            with self.cache.acquire(self.layer, wanted, on_cpu, prefixes) as pinned:
                if copies is not None:
                    copies.launch()
                if prefetcher is not None:
                    routing = Routing(expert_ids_TK, weights_TK)
                    prefetcher.visit(self.layer, asked, hidden_TH, routing)
                compiled = forward is experts_forward and add_to_TH is None
                call = self._compiled(hidden_TH) if compiled else None
                out_TH = self._run(pinned, hidden_TH, ids_TK, weights_TK, forward, total_TH, call)
            assert out_TH is not None
            # 3. Read on for the next layer; then add what the CPU computes meanwhile.
            if self._reads_ahead and self._missing is None:  # it would bring whole ones
                read_ahead(self.cache, self.layer, len(asked))
            if share is not None:
                assert copies is not None
                out_TH += copies.streams.to_gpu(share.compute())
        return out_TH.to(hidden_TH.dtype) if add_to_TH is None else add_to_TH

    def _slots_on_gpu(self, ids_TK: Tensor, prefetcher: Prefetcher | None) -> Tensor | None:
        """The slots of a call whose experts are all on the GPU, found there; None: look at its ids,
        as an expert may be missing, or a prefetcher wants to see them."""
        looks_on = prefetcher is not None and prefetcher.awake
        if self._on_gpu is None or self._missing is not None or looks_on:
            return None
        slots_TK = self._on_gpu.look_up(ids_TK)
        if slots_TK is not None and self._reads_ahead and ids_TK.numel() > self.num_experts:
            read_ahead(self.cache, self.layer, self.num_experts)  # the call is a prompt's
        return slots_TK

    def _for_cpu(self, weights_TK: Tensor, hidden_TH: Tensor) -> Sequence[Tensor]:
        """Return the inputs of the CPU's share of a call, if they are small; a prompt's rows are
        copied only where there is a share."""
        small = self.cpu is not None and hidden_TH.nbytes <= COPIED_WITH_IDS
        return (weights_TK, hidden_TH) if small else ()

    def run_stopped(
        self,
        wanted: Sequence[int],
        call: LayerCall,
        rows: LayerBuffers,
        hidden_TH: Tensor,
        routing: Routing,
    ) -> Tensor | None:
        """As `forward`, for a compiled step that lacks an expert here; `only_kernels` is true.

        Args:
            wanted: the experts of the routing, ascending and distinct.
            call: how compiled code runs the slots.
            rows: addresses of the same tensors.

        Returns:
            None: ``rows.out_TH`` has been filled.
        """
        ids_TK, weights_TK = routing.expert_ids, routing.weights
        with self.cache.acquire(self.layer, wanted) as pinned:
            return self._run(
                pinned, hidden_TH, ids_TK, weights_TK, experts_forward, None, call, rows
            )

    def _run(
        self,
        pinned: PinnedExperts,
        hidden_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        forward: Forward,
        total_TH: Tensor | None,
        call: LayerCall | None,
        rows: LayerBuffers | None = None,
    ) -> Tensor | None:
        """Run the pinned experts as they arrive, or else in rounds.

        Args:
            total_TH: to add to; None: the result may have any dtype.
            call: how compiled code runs the slots; None: it cannot run these rows.
            rows: addresses of the arguments, and of where the result goes.

        Returns:
            None: the result is where ``rows`` says.
        """
        if call is not None:
            out_TH = None
            if rows is None:
                out_TH = torch.empty_like(hidden_TH)
                rows = LayerBuffers.of(hidden_TH, ids_TK, weights_TK, out_TH)
            if run_arriving(pinned, call, self.slots, rows):
                return out_TH
        for ready in pinned.rounds:
            slot_ids_TK = ready.slot_ids.take(ids_TK)
            if self._copies is not None:
                slot_ids_TK = self._copies.streams.to_gpu(slot_ids_TK)
            if total_TH is None:
                if len(ready.experts) == len(pinned):
                    return forward(hidden_TH, slot_ids_TK, weights_TK, self.slots)
                total_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=sum_dtype(self.slots))
            forward(hidden_TH, slot_ids_TK, weights_TK, self.slots, total_TH)
        return total_TH

    def _compiled(self, hidden_TH: Tensor) -> LayerCall | None:
        """Return the call by which compiled code runs rows like these; None if it cannot."""
        if not self.only_kernels or hidden_TH.dtype != torch.float32 or torch.is_grad_enabled():
            return None
        if self._layer_call is None and (native := choose_kernel()[0]) is not None:
            self._layer_call = native.layer_call(hidden_TH, self.slots)
        return self._layer_call

    def unreadable(self, experts: Sequence[int]) -> dict[int, OffloadError]:
        """Return the experts that cannot be read, and why."""
        lost = {}
        for expert in experts:
            try:
                with self.cache.acquire(self.layer, [expert]) as pinned:
                    list(pinned.rounds)
            except OffloadError as error:
                lost[expert] = error
        return lost


class SlotsOnGpu:
    """The slots of one layer as a table on a GPU, while it holds all experts it is asked for.

    What calls ask for is copied to main memory behind them, and counted at a later call: the
    eviction policy learns of it then.

    Args:
        layer: index of the MoE layer in the cache.
        cache: of the GPU.
        streams: of the GPU.
    """

    def __init__(self, layer: int, cache: ExpertCache, streams: Streams) -> None:
        self._layer, self._cache, self._streams = layer, cache, streams
        self._asked: deque[Later] = deque()
        self.serve_only(None)

    def serve_only(self, experts: Sequence[int] | None) -> None:
        """See `OffloadedExperts.serve_only`."""
        self._only, self._changes = experts, -1
        self._table: Tensor | None = None

    def look_up(self, expert_ids_TK: Tensor) -> Tensor | None:
        """The slots of a call's experts, on the GPU; None if one that it may ask for is absent."""
        self._count()
        changes = self._cache.changes(self._layer)
        if changes != self._changes:
            self._changes = changes
            table = self._cache.slot_ids(self._layer)
            asked = table[:-1] if self._only is None else table[torch.tensor(self._only).long()]
            self._table = None if bool((asked < 0).any()) else self._streams.to_gpu(table)
        if self._table is None:
            return None
        self._asked.append(self._streams.to_host(expert_ids_TK))
        return self._table[expert_ids_TK]

    def _count(self) -> None:
        while self._asked and (ids_TK := self._asked[0]()) is not None:
            self._asked.popleft()
            self._cache.found(self._layer, sorted({*ids_TK.flatten().tolist()} - {UNUSED}))


LayerExperts = AnyExperts | OffloadedExperts
"""Experts of one MoE layer, in memory or not."""


def held_experts(layer: LayerExperts) -> AnyExperts:
    """Return the experts of a layer as kernels see them."""
    return layer.slots if isinstance(layer, OffloadedExperts) else layer


def run_arriving(
    pinned: PinnedExperts, call: LayerCall, slots: AnyExperts, rows: LayerBuffers
) -> bool:
    """Fill the rows' ``out`` by one compiled call, which runs each expert when its read has ended.

    Returns:
        False: these experts cannot be run so, and nothing has been done.

    Raises:
        OffloadError: an expert cannot be read.
    """
    native, arrivals = choose_kernel()[0], pinned.arrivals()
    if native is None or arrivals is None:
        return False
    coming: list[tuple[int, int, ReadJob | None]] = []
    reads: NativeReads | None = None
    for expert, slot, transfer in arrivals:
        if transfer is None:
            coming.append((expert, slot, None))
        elif isinstance(transfer, NativeTransfer):
            coming.append((expert, slot, transfer.record))
            reads = transfer.reads
        else:
            return False
    arriving = native.arriving(call, slots, rows, coming, reads, INTERRUPT_POLL_S)
    while (late := arriving.run()) is not None:  # its read has failed or is slow
        pinned.wait_for(late)
    pinned.all_arrived(arriving.waited)
    return True


def read_ahead(cache: ExpertCache, layer: int, asked: int) -> None:
    """Begin to read experts of the next layer if a call has asked for nearly all of this layer's.

    A prompt does, and will ask for nearly all of the next layer's. Without this, the disk would
    rest while the next layer's attention is computed.

    Args:
        layer: whose call is over.
        asked: how many of its experts the call asked for.
    """
    experts, following = cache.sizes.experts, layer + 1
    if following == len(experts) or asked < NEARLY_ALL * experts[layer]:
        return
    most = max(1, cache.slots // SLOTS_SHARE)
    for expert in cache.absent(following, range(experts[following]))[:most]:
        if not cache.prefetch(following, expert, value=asked / experts[layer]):
            return
