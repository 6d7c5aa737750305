"""`DeepEPDispatcher`: a `DeviceDispatcher` whose rows of exact sizes travel by DeepEP.

A slot is told to DeepEP as ``rank * experts + id``. Results come back as one row a token and rank,
added up by DeepEP in bfloat16 or float32, so they differ from ours by a rounding. Beside each slot
a number comes back, in which the codes of failures travel. The host waits twice a layer: for all
ranks to be there, and in DeepEP for the sizes. Its kernels cannot be aborted when a rank is lost,
they end the process when their time is up; so the ranks do not go on without one.

`prompts_by_deep_ep` tries it against our own dispatcher before use.

Legend: see `experts.dispatch.on_device`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.dispatch import rows as wire
from experts.dispatch.base import Failure, Failures
from experts.dispatch.copies import DeviceCopies
from experts.dispatch.exchange import Exchange, ExchangeError, texts_of
from experts.dispatch.on_device import (
    DeviceDispatcher,
    Flight,
    LayerCounts,
    Links,
    OwnTokens,
    RowKind,
    ranks_of,
)
from experts.placement import Placement
from moe.parallel.group import RankExchanges
from moe.parallel.watchdog import COMPILE_S
from moe.settings import ParallelSettings
from routing import Routing
from routing.routing import UNUSED

Result = TypeVar("Result")

CAPACITIES = (8192, 4096, 2048, 1024, 512)
"""Tokens of a rank that a buffer may take; where a rank brings more, our own dispatch is used."""
MEMORY_SHARE = 1 / 8
"""Most of the device's free memory that the buffer may take."""


@dataclass(frozen=True)
class DeepEPBuffer:
    """DeepEP's buffer, for a kind of rows.

    Attributes:
        buffer: a ``deep_ep.ElasticBuffer``.
        tokens: most of a rank.
        id_dtype: of ids.
    """

    buffer: Any
    rows: RowKind
    tokens: int
    id_dtype: torch.dtype


class DeepEPDispatcher(DeviceDispatcher):
    """A `DeviceDispatcher` whose rows of exact sizes travel by DeepEP.

    Args:
        exchange, host, placements, buffer_rows: see `DeviceDispatcher`.
        kernels: carry the rows.
    """

    name = "deep_ep"

    def __init__(
        self,
        exchange: Exchange,
        host: Exchange,
        placements: Sequence[Placement],
        kernels: DeepEPBuffer,
        *,
        buffer_rows: int | None = None,
    ) -> None:
        super().__init__(exchange, host, placements, buffer_rows=buffer_rows)
        self._kernels = kernels

    def _exact_rows(self, layer: int, own: OwnTokens, links: Links, counts: LayerCounts) -> Flight:
        kernels, (slots, dtype) = self._kernels, (own.ids_TK.shape[1], own.hidden_TH.dtype)
        fits = max(links.tokens_R) <= kernels.tokens and slots <= kernels.rows.slots
        if not fits or dtype != kernels.rows.dtype:  # the same on all ranks
            return super()._exact_rows(layer, own, links, counts)
        num_experts = self.placements[layer].num_experts
        return _DeepEPRows(layer, own, links, self._copies[layer], counts, kernels, num_experts)


class _DeepEPRows:
    """Rows of one layer that DeepEP carries; see `Flight`."""

    def __init__(
        self,
        layer: int,
        own: OwnTokens,
        links: Links,
        copies: DeviceCopies,
        counts: LayerCounts,
        kernels: DeepEPBuffer,
        num_experts: int,
    ) -> None:
        self.layer, self._own, self._links, self._kernels = layer, own, links, kernels
        rank, ranks = links.rank, links.exchange.size
        serving_NK, loads_E = copies.serving(links.ids_of_all(own, counts))
        serving_TK, here_NK = serving_NK[links.own], serving_NK == rank
        goes_TR, served_N = ranks_of(serving_TK, ranks), here_NK.any(1)
        counts.found(loads_E, goes_TR, here_NK.sum())
        out = goes_TR.sum() - goes_TR[:, rank].sum()
        back = served_N.sum() - served_N[links.own].sum()
        # From here on all ranks are at this layer. DeepEP waits for sizes with Python's lock held,
        # so that no other thread could say that this rank lives.
        links.wait(links.exchange.settle)
        rows_out, self._rows_back = torch.stack([out, back]).tolist()
        hidden, slots = own.hidden_TH, kernels.rows.slots
        self._row_bytes = hidden.shape[1] * hidden.dtype.itemsize
        counts.sent(rows_out * (self._row_bytes + 4 * slots))

        told_TK = (serving_TK * num_experts + own.ids_TK).masked_fill(serving_TK < 0, UNUSED)
        # Each rank brings a row at least, as in DeepEP's own tests.
        more = (0, slots - told_TK.shape[1], 0, int(not len(hidden)))
        with _asking(links):
            self._rows, self._ids_NK, self._weights_NK, self._handle, self._done = (
                kernels.buffer.dispatch(
                    pad(hidden, (0, 0, *more[2:])).contiguous(),
                    topk_idx=pad(told_TK, more, value=UNUSED).to(kernels.id_dtype).contiguous(),
                    topk_weights=pad(own.weights_TK.float(), more).contiguous(),
                    num_experts=num_experts * ranks,
                    async_with_compute_stream=True,
                )
            )

    def arrive(self) -> tuple[Tensor, Routing]:
        with _asking(self._links):
            self._done.current_stream_wait()
        ids_NK = self._ids_NK.long()  # within this rank's range; -1 for other ranks' slots
        weights_NK = self._weights_NK.masked_fill(ids_NK < 0, 0.0)
        return self._rows, Routing(ids_NK, weights_NK).ascending()

    def send_back(self, rows: Tensor, failures: Failures) -> int:
        rows = rows.to(self._own.hidden_TH.dtype).contiguous()
        codes_N = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
        for index, failure in failures.items():
            codes_N[index] = wire.code_of(failure, self._links.rank)
        codes_NK = codes_N[:, None].repeat(1, self._kernels.rows.slots)
        with _asking(self._links):
            self._back, self._codes, self._done = self._kernels.buffer.combine(
                rows, self._handle, topk_weights=codes_NK, async_with_compute_stream=True
            )
        return self._rows_back * self._row_bytes

    def total(self) -> tuple[Tensor, Tensor]:
        with _asking(self._links):
            self._done.current_stream_wait()
        tokens = len(self._own.hidden_TH)
        return self._back[:tokens], self._codes[:tokens].amax(1).long()


@contextmanager
def _asking(links: Links) -> Iterator[None]:
    """End the connection where DeepEP raises: another rank may wait for this one in a kernel."""
    with links.guard:
        try:
            yield
        except Exception as error:
            raise ExchangeError(f"rank {links.rank}: DeepEP failed: {_words(error)}") from error


def carry_prompts(
    exchanges: RankExchanges,
    placements: Sequence[Placement],
    settings: ParallelSettings,
    rows: RowKind,
) -> tuple[DeviceDispatcher | None, str]:
    """See `moe.parallel.worker.MakeDispatcher`."""
    if why_not := _not_for(settings):
        return None, why_not
    assert exchanges.device is not None
    return prompts_by_deep_ep(
        exchanges.device, exchanges.host, placements, rows,
        group=torch.distributed.group.WORLD,
        timeout_s=max(settings.timeout_s, COMPILE_S),
        buffer_rows=settings.buffer_rows,
    )  # fmt: skip


def _not_for(settings: ParallelSettings) -> str:
    """Return what the profile asks for that DeepEP does not do; empty if it does all."""
    if settings.combine == "exact":
        return "parallel.combine is exact, and DeepEP adds up in an order of its own"
    if settings.payload != "plain":
        return f"parallel.payload is {settings.payload}, which DeepEP does not send"
    if settings.on_rank_loss == "continue":
        return "parallel.on_rank_loss is continue, and DeepEP's kernels cannot be aborted"
    return ""


def prompts_by_deep_ep(
    exchange: Exchange,
    host: Exchange,
    placements: Sequence[Placement],
    rows: RowKind,
    *,
    group: Any,
    timeout_s: float,
    buffer_rows: int | None = None,
) -> tuple[DeviceDispatcher, str]:
    """A dispatcher by DeepEP if all ranks have it and it gives what ours gives; collective.

    Args:
        exchange, host, placements, buffer_rows: see `DeviceDispatcher`.
        rows: of the model.
        group: of torch.distributed, over NCCL.
        timeout_s: after which DeepEP gives up waiting for another rank.

    Returns:
        The dispatcher, "summed" and of plain rows; and why it is our own, empty if it is DeepEP's.
    """
    ways = exchange, host, placements
    try:
        deep_ep = _on_all(host, partial(_installed, rows))
        tokens = _on_all(host, partial(_capacity, deep_ep, group, rows, exchange.device))
        tokens = min(map(int, texts_of(host, str(tokens))))
        make = partial(_buffer, deep_ep, group, rows, tokens, math.ceil(timeout_s))
        kernels = _on_all(host, make)
        _on_all(host, partial(_compare, *ways, kernels))
    except _NotUsed as why:
        return DeviceDispatcher(*ways, buffer_rows=buffer_rows), str(why)
    return DeepEPDispatcher(*ways, kernels, buffer_rows=buffer_rows), ""


class _NotUsed(Exception):
    """The reason why DeepEP is not used."""


def _on_all(host: Exchange, act: Callable[[], Result]) -> Result:
    """Return what `act` returns; raises `_NotUsed` on all ranks if it raised on one. Collective."""
    reason = ""
    try:
        result = act()
    except _NotUsed as why:
        reason = str(why)
    except Exception as error:  # of a foreign library: none can be foreseen
        reason = _words(error)
    for rank, text in enumerate(texts_of(host, reason, 512)):
        if text:
            raise _NotUsed(f"rank {rank}: {text}")
    return result


def _installed(rows: RowKind) -> Any:
    """The package."""
    if rows.dtype != torch.bfloat16:
        kind = str(rows.dtype).removeprefix("torch.")
        raise _NotUsed(f"hidden states are {kind}, and DeepEP carries bfloat16")
    try:
        deep_ep = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise
        raise _NotUsed("deep_ep is not installed") from error
    if not hasattr(deep_ep, "ElasticBuffer"):
        raise _NotUsed("deep_ep has no ElasticBuffer: version 2 is needed")
    return deep_ep


def _capacity(deep_ep: Any, group: Any, rows: RowKind, device: torch.device) -> int:
    """Most tokens of a rank whose buffer has room."""
    room = MEMORY_SHARE * (
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    )
    size_of = deep_ep.ElasticBuffer.get_buffer_size_hint
    for tokens in CAPACITIES:
        size = size_of(group, tokens, rows.hidden, num_topk=rows.slots)
        if size <= room:
            return tokens
    raise _NotUsed(f"its smallest buffer takes {size} bytes, and there is room for {room:.0f}")


def _buffer(deep_ep: Any, group: Any, rows: RowKind, tokens: int, timeout_s: int) -> DeepEPBuffer:
    # It goes with the process: destroying it waits for the other ranks, which may be lost.
    buffer = deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=tokens,
        hidden=rows.hidden,
        num_topk=rows.slots,
        num_cpu_timeout_secs=timeout_s,
        num_gpu_timeout_secs=timeout_s,
        explicitly_destroy=True,
    )
    return DeepEPBuffer(buffer, rows, tokens, deep_ep.topk_idx_t)


def _compare(
    exchange: Exchange, host: Exchange, placements: Sequence[Placement], kernels: DeepEPBuffer
) -> None:
    """Raise `_NotUsed` if DeepEP's dispatch differs from ours by more than rounding. Experts are
    numbers here: each multiplies a row by one of its own, and the first one fails."""
    kind, random = kernels.rows, torch.Generator().manual_seed(exchange.rank)
    theirs = DeepEPDispatcher(exchange, host, placements, kernels, buffer_rows=0)
    ours = DeviceDispatcher(exchange, host, placements, buffer_rows=0)
    sizes = {placement.num_experts: at for at, placement in enumerate(placements)}
    for layer, last_alone in product(sizes.values(), (False, True)):
        idle = last_alone and exchange.rank < exchange.size - 1
        tokens, num_experts = 0 if idle else 64 + exchange.rank, placements[layer].num_experts
        hidden = 1 + torch.rand(tokens, kind.hidden, generator=random)
        hidden = hidden.to(exchange.device, kind.dtype)
        ids = torch.rand(tokens, num_experts, generator=random).argsort(1)[:, : kind.slots]
        ids[torch.rand(ids.shape, generator=random) < 0.1] = UNUSED
        weights = (torch.rand(ids.shape, generator=random) + 0.5).masked_fill(ids < 0, 0.0)
        routing = Routing(ids.to(exchange.device), weights.to(exchange.device)).ascending()
        (rows, codes), (expected, expected_codes) = (
            _tried(one, layer, hidden, routing) for one in (theirs, ours)
        )
        near = (rows - expected).abs() <= 4 * torch.finfo(kind.dtype).eps * expected.abs()
        if not torch.equal(codes, expected_codes):
            raise _NotUsed("rows that failed do not come back as failures")
        if wrong := int((~near).any(1).sum()):
            raise _NotUsed(f"{wrong} of {tokens} rows differ from those of our own dispatch")


def _tried(
    dispatcher: DeviceDispatcher, layer: int, hidden: Tensor, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Rows and codes of failures."""
    arrived = dispatcher.dispatch(layer, hidden, routing)
    ids, weights = arrived.routing.expert_ids, arrived.routing.weights
    factor = (weights * (1 + ids % 5)).masked_fill(ids < 0, 0.0).sum(1, keepdim=True)
    lost = (ids == 0).any(1).nonzero()[:, 0].tolist()
    failures = dict.fromkeys(lost, Failure("on trial", unreadable=True))
    combined = dispatcher.combine(arrived, arrived.hidden_states.float() * factor, failures)
    assert combined.codes is not None
    return combined.rows.float(), combined.codes.codes_T


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
