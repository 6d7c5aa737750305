"""Nothing that runs at each layer on a GPU waits for it: operations that would wait are noted
here, on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from experts.dispatch.base import Failure
from experts.dispatch.rows import read_failures, write_failures
from experts.weights import quantize_experts
from kernels import QuantizedExperts
from kernels.triton.experts import experts_forward, linear_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.routing import route, used_experts
from moe.kv.cache import KVCache
from moe.network.attention import packed_pass
from moe.network.lanes import ExpertCall
from moe.network.packed_pass import PackedCache
from moe.network.per_sequence import StatefulModules, serve_packed
from moe.settings.device import to_device
from moe.speculate.elastic import DraftLayers, Mode
from routing import Routing
from routing.routing import counted
from tests.amounts import deep_except
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import quantize_matrix
from tests.readbacks import readbacks, waits

CUDA = torch.device("cuda")


def test_the_mode_sees_what_waits() -> None:
    x = torch.arange(4)
    assert waits(lambda: x.sum().item())
    assert waits(lambda: torch.bincount(x))
    assert waits(lambda: x[x > 2])
    assert waits(lambda: x.tolist())
    assert not waits(lambda: x.cumsum(0) + x[x])


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.to("cpu").numpy(),
        lambda x: x.cpu().tolist(),
        lambda x: torch.zeros(4).to(x.device),
        lambda x: x.copy_(torch.zeros(4, 6)),
        lambda x: torch.empty(4, 6).copy_(x),
        lambda x: x.__setitem__(0, torch.zeros(6)),
        lambda x: x[torch.tensor([2, 1]).argsort()],
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.as_tensor([1, 2], device=x.device),
        lambda x: x.new_tensor([1, 2]),
        lambda x: x[:, [0, 2]],
        lambda x: x[np.array([0, 2])],
        lambda x: x.__setitem__([0, 2], 0.0),
    ],
)
def test_copies_that_wait_are_seen_once(copy: Callable[[Tensor], object]) -> None:
    """Though main memory copies nothing, or needs no operation for it."""
    x = torch.ones(4, 6)
    assert len(readbacks(lambda: copy(x))) == 1


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.copy_(torch.zeros(4, 6), non_blocking=True),
        lambda x: x.copy_(x + torch.zeros(6, device=x.device)),
        lambda x: x.to(x.device),
        lambda x: torch.arange(3).flip(0).tolist(),
        lambda x: x.to(torch.float64)[1:3, None, ..., -1],
        lambda x: x.__setitem__((slice(1, 2), 0), 0.0),
        lambda x: x[:, to_device(torch.tensor([0, 2]), x.device)],
    ],
)
def test_what_does_not_wait_is_not_seen(copy: Callable[[Tensor], object]) -> None:
    x = torch.ones(4, 6)
    assert not waits(lambda: copy(x))


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    decoding=st.booleans(),
    together=st.booleans(),
)
def test_modules_of_one_sequence_get_rows_of_a_packed_pass(
    sizes: list[int], decoding: bool, together: bool
) -> None:
    """Prompts, single tokens and drafts."""

    class Product(nn.Module):
        def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
            return x * pair[0] + pair[1], None

    module, total = Product(), sum(sizes)
    serve_packed(StatefulModules([module] if together else [], [] if together else [module]))
    cache = PackedCache([KVCache(9) for _ in sizes], sizes, set(), decoding=decoding)
    x, scale, offset = torch.randn(3, 1, total, 6)
    found: list[Tensor] = []
    with packed_pass(cache):
        assert not readbacks(lambda: found.append(module(x, (scale, offset))[0]))
    assert torch.equal(found[0], x * scale + offset)


def test_tokens_are_counted() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [2, -1]])
    routing = Routing(ids, torch.ones(3, 2))
    assert not waits(lambda: routing.tokens_per_expert(5))
    assert routing.tokens_per_expert(5).tolist() == [1, 0, 1, 2, 0]
    values = torch.randint(0, 30, (1000,))
    assert torch.equal(counted(values, 31), torch.bincount(values, minlength=31))


def test_slots_are_sorted_into_blocks() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [2, -1]])
    assert not waits(lambda: used_experts(route(ids, 5, 2), 4))


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
@pytest.mark.parametrize("tokens", deep_except([8], [2, 8]))
@pytest.mark.parametrize("bits", [None, 4])
def test_experts_and_linear_layers(
    tokens: int, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step's rows and, dequantised first, a prompt's; kernels themselves are not seen."""
    monkeypatch.setattr("kernels.triton.experts._PANEL_ROWS", 3)
    case = make_case(tokens, 4, 2, hidden=32, width=32)
    experts = case.experts if bits is None else quantize_experts(case.experts, 32, bits)
    if isinstance(experts, QuantizedExperts):
        experts = experts.for_device(CUDA)
    matrix = quantize_matrix(torch.randn(32, 32), 32).for_device(CUDA)

    def run() -> None:
        experts_forward(case.hidden, case.ids, case.weights, experts)
        linear_forward(case.hidden, matrix)

    run()  # learns the activation, and where the weights are
    assert not readbacks(run)


def test_failures_are_written_to_rows_on_any_device() -> None:
    rows = torch.ones(3, 40)
    assert not waits(lambda: write_failures(rows, 2, {1: Failure("gone", unreadable=True)}))
    assert read_failures(rows) == {1: Failure("rank 2: gone", unreadable=True)}
    assert torch.equal(rows[::2], torch.ones(2, 40))


def test_a_draft_counts_what_it_reads_without_waiting() -> None:
    case = make_case(3, 6, 2, hidden=16, width=16)
    layers = DraftLayers([case.experts], lambda hidden, *_: hidden, [None])
    layers.begin(Mode("elastic"))
    call = ExpertCall(0, case.hidden, Routing(case.ids, case.weights))
    assert not waits(lambda: layers.run(0, [call]))
    layers.run(0, [call])
    distinct = len(set(case.ids.flatten().tolist()))
    assert layers.bytes_read == 2 * distinct * case.experts.expert_bytes
