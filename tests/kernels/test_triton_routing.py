"""Routing for Triton's grids, and how a tile is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.triton import tiles
from kernels.triton.routing import most_blocks, one_group, route
from kernels.triton.tiles import DECODE, PREFILL, Tile, choose, fastest


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    experts = draw(st.integers(1, 9))
    tokens, slots = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    # Also ids that do not exist: no program may work on them.
    ids = st.lists(st.integers(-2, experts), min_size=tokens * slots, max_size=tokens * slots)
    return torch.tensor(draw(ids)).view(tokens, slots), experts


@given(routing=routings(), rows=st.sampled_from((1, 3, 16)))
def test_blocks_hold_every_used_slot_once_in_order(routing: tuple[Tensor, int], rows: int) -> None:
    ids, experts = routing
    blocks = route(ids, experts, rows)
    assert blocks.count == most_blocks(ids.numel(), experts, rows)
    order, offsets = blocks.order_S.tolist(), blocks.offsets_E1.tolist()
    found: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    for expert, first in zip(blocks.expert_B.tolist(), blocks.first_B.tolist(), strict=True):
        if expert >= 0:
            mine = order[first : min(first + rows, offsets[expert + 1])]
            assert mine
            found[expert] += mine
    flat = ids.flatten().tolist()
    for expert in range(experts):
        assert found[expert] == [slot for slot, own in enumerate(flat) if own == expert]


@given(slots=st.integers(1, 40), experts=st.integers(1, 9), rows=st.integers(1, 8))
def test_some_routing_needs_every_block(slots: int, experts: int, rows: int) -> None:
    """One slot for each expert, and the rest for the first: no smaller grid would do."""
    begun = min(slots, experts)
    ids = torch.tensor([*range(begun), *[0] * (slots - begun)])[:, None]
    used = route(ids, experts, rows).expert_B >= 0
    assert int(used.sum()) == most_blocks(slots, experts, rows)


def test_one_group_is_all_rows_in_order() -> None:
    blocks = one_group(10, 4, torch.device("cpu"))
    assert blocks.order_S.tolist() == list(range(10))
    assert blocks.offsets_E1.tolist() == [0, 10]
    assert (blocks.expert_B.tolist(), blocks.first_B.tolist()) == ([0, 0, 0], [0, 4, 8])


def run_by(results: dict[Tile, float]) -> tuple[list[Tile], object]:
    """The tiles tried, and a computation that gives each tile its own number."""
    tried: list[Tile] = []

    def run(tile: Tile) -> Tensor:
        tried.append(tile)
        return torch.tensor([results.get(tile, 1.0)])

    return tried, run


def test_the_fastest_tile_with_the_same_bits_is_taken() -> None:
    times = iter((3.0, 2.0, 5.0, 4.0))
    other_bits = {PREFILL[1]: 1.0000001}
    tried, run = run_by(other_bits)
    best = fastest(PREFILL, run, lambda _: next(times))  # type: ignore[arg-type]
    assert best == PREFILL[0]
    assert set(tried) == {DECODE[0], *PREFILL}


def test_a_tile_that_does_not_fit_the_gpu_is_left_out() -> None:
    def run(tile: Tile) -> Tensor:
        if tile in PREFILL:
            raise OutOfResources(300_000, 100_000, "shared memory")
        return torch.ones(1)

    assert fastest(PREFILL, run, lambda _: 1.0) == DECODE[0]


@pytest.mark.parametrize(("rows", "candidates"), [(1.0, DECODE), (31.9, DECODE), (32.0, PREFILL)])
def test_a_tile_is_measured_once_for_each_shape_and_regime(
    monkeypatch: pytest.MonkeyPatch, rows: float, candidates: tuple[Tile, ...]
) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measured: list[object] = []

    def measure(function: object) -> float:
        measured.append(function)
        return -len(measured)

    monkeypatch.setattr(tiles, "_milliseconds", measure)
    _, run = run_by({})
    assert choose("shape", rows, run) == candidates[-1]  # type: ignore[arg-type]
    count = len(measured)
    assert choose("shape", rows, run) == candidates[-1]  # type: ignore[arg-type]
    assert len(measured) == count
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("other shape", rows, run) == DECODE[0]  # type: ignore[arg-type]
