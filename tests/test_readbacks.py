"""Nothing that runs at each layer on a GPU waits for it: operations that would wait are noted
here, on any device.
"""

from __future__ import annotations

import pytest
import torch

from experts.dispatch.base import Failure
from experts.dispatch.rows import read_failures, write_failures
from experts.weights import quantize_experts
from kernels import QuantizedExperts
from kernels.triton.experts import experts_forward, linear_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.routing import route, used_experts
from moe.network.lanes import ExpertCall
from moe.speculate.elastic import DraftLayers, Mode
from routing import Routing
from routing.routing import counted
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
@pytest.mark.parametrize("tokens", [2, 8])
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
