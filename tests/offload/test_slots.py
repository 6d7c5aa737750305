"""Slots and their memory: what kernels see is what was put there."""

from __future__ import annotations

import pytest
import torch

from experts.weights import ExpertShape, quantize_experts
from kernels import ExpertWeights, experts_forward
from offload.arena import PAGE, plane_arena, whole_arena
from offload.slots import SlotSizes, SlotTable

HIDDEN, WIDTH, COUNT = 64, 32, 3


def gated(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def layer() -> ExpertWeights:
    random = torch.Generator().manual_seed(0)
    return ExpertWeights(
        torch.randn(COUNT, 2 * WIDTH, HIDDEN, generator=random),
        torch.randn(COUNT, HIDDEN, WIDTH, generator=random),
        gated,
    )


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [2, -1]])
    return torch.randn(4, HIDDEN, generator=random), ids, torch.rand(4, 2, generator=random)


def test_planes_in_slots_compute_what_the_layer_computes() -> None:
    quantized = quantize_experts(layer())
    shape = ExpertShape(HIDDEN, WIDTH, 2, 64)
    arena = plane_arena(shape, {8: 1}, 5, interleaved=False, activation=gated)
    slots = torch.tensor([4, 0, 3, -1])
    for expert in range(COUNT):
        blobs = [quantized.scales[expert].view(torch.uint8), *quantized.planes[expert]]
        (place,) = arena.places(int(slots[expert]))
        place.copy_(torch.cat(blobs))
        assert place.data_ptr() % PAGE == 0
    hidden, ids, weights = inputs()
    expected = experts_forward(hidden, ids, weights, quantized)
    assert torch.equal(experts_forward(hidden, slots[ids], weights, arena.experts), expected)
    arena.move(4, 1)
    slots[0] = 1
    arena.resize(4)
    assert torch.equal(experts_forward(hidden, slots[ids], weights, arena.experts), expected)
    assert not arena.places(4)[0].any()  # its page was given back


def test_whole_experts_in_slots_compute_what_the_layer_computes() -> None:
    whole = layer()
    arena = whole_arena(ExpertShape(HIDDEN, WIDTH, 2, 64), torch.float32, 4, activation=gated)
    slots = torch.tensor([3, 0, 2, -1])
    for expert in range(COUNT):
        first, second = arena.places(int(slots[expert]))
        first.copy_(whole.gate_up_EGH[expert].flatten().view(torch.uint8))
        second.copy_(whole.down_EHF[expert].flatten().view(torch.uint8))
    hidden, ids, weights = inputs()
    expected = experts_forward(hidden, ids, weights, whole)
    assert torch.equal(experts_forward(hidden, slots[ids], weights, arena.experts), expected)


def test_memory_is_taken_when_it_is_filled() -> None:
    shape = ExpertShape(1024, 512, 2, 64)
    arena = plane_arena(shape, {8: 1}, 40_000, interleaved=False, activation=gated)  # 64 GB
    arena.places(39_999)[0].fill_(1)
    arena.resize(10)
    assert not arena.places(39_999)[0].any()  # its memory went back to the system


def test_biases_move_along() -> None:
    shape = ExpertShape(HIDDEN, WIDTH, 2, 64)
    bias = torch.arange(8.0).view(4, 2).repeat(1, HIDDEN // 2)
    arena = plane_arena(shape, {8: 1}, 4, interleaved=False, activation=gated, down_bias_EH=bias)
    arena.move(3, 0)
    assert torch.equal(bias[0], bias[3])


def test_the_table_shows_what_is_there() -> None:
    table = SlotTable(SlotSizes.equal([4, 3], 1), 2, 2)
    table.place(5, 0)
    assert table.slot_ids(1).tolist() == [-1] * 4
    table.publish(5)
    assert table.slot_ids(1).tolist() == [-1, 0, -1, -1]
    assert table.slot_ids(0).tolist() == [-1] * 5
    table.drop(5)
    assert table.slot_ids(1).tolist() == [-1] * 4
    table.place(2, 0)
    with pytest.raises(AssertionError):
        table.place(2, 0)
