"""Routing for Triton's grids, and how a tile is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.triton import tiles
from kernels.triton.experts import experts_forward
from kernels.triton.routing import most_blocks, route, used_experts
from kernels.triton.tiles import DECODE, PREFILL, Tile, choose, fastest
from tests.kernels.kernel_cases import assert_close, make_case

Run = Callable[[Tile], Callable[[], Tensor]]


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


@given(routing=routings())
def test_used_experts_have_places_in_order(routing: tuple[Tensor, int]) -> None:
    ids, experts = routing
    blocks = route(ids, experts, 3)
    expected = sorted({own for own in ids.flatten().tolist() if 0 <= own < experts})
    found, places = used_experts(blocks, experts)
    assert found.tolist() == expected + [-1] * (experts - len(expected))
    for expert, place in zip(blocks.expert_B.tolist(), places.tolist(), strict=True):
        assert expert < 0 or expected[place] == expert


def test_slots_of_many_layers_need_no_more_blocks_than_one_layer() -> None:
    """48 layers of 128 experts share 6144 slots; a prompt of 512 tokens asks for 128 of them."""
    slots = torch.arange(128).mul(48)
    ids = slots[torch.arange(512)[:, None].add(torch.arange(8) * 16) % 128]
    blocks = route(ids, 6144, 64, distinct=128)
    assert blocks.count == most_blocks(4096, 128, 64)
    order, offsets = blocks.order_S, blocks.offsets_E1
    assert int(offsets[-1]) == 4096 == len(order)
    assert int((blocks.expert_B >= 0).sum()) == 128


def run_by(results: dict[Tile, float]) -> tuple[list[Tile], Run]:
    """The tiles tried, and a computation that gives each tile its own number."""
    tried: list[Tile] = []

    def run(tile: Tile) -> Callable[[], Tensor]:
        tried.append(tile)
        return lambda: torch.tensor([results.get(tile, 1.0)])

    return tried, run


def test_the_fastest_tile_with_the_same_bits_is_taken() -> None:
    times = iter((3.0, 2.0, 5.0, 4.0, 6.0))
    other_bits = {PREFILL[1]: 1.0000001}
    tried, run = run_by(other_bits)
    best = fastest(PREFILL, DECODE[0], run, lambda _: next(times))
    assert best == PREFILL[0]
    assert set(tried) == {DECODE[0], *PREFILL}


def test_a_tile_that_does_not_fit_the_gpu_is_left_out() -> None:
    def run(tile: Tile) -> Callable[[], Tensor]:
        if tile in PREFILL:
            raise OutOfResources(300_000, 100_000, "shared memory")
        return lambda: torch.ones(1)

    assert fastest(PREFILL, DECODE[0], run, lambda _: 1.0) == DECODE[0]


def test_a_tile_is_measured_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measured: list[object] = []

    def measure(function: object) -> float:
        measured.append(function)
        return -len(measured)

    monkeypatch.setattr(tiles, "_milliseconds", measure)
    _, run = run_by({})
    assert choose("shape", DECODE, DECODE[0], lambda: run) == DECODE[-1]
    count = len(measured)
    assert choose("shape", DECODE, DECODE[0], lambda: run) == DECODE[-1]
    assert len(measured) == count
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("other shape", PREFILL, DECODE[0], lambda: run) == DECODE[0]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], Sequence[Tile]]]:
    """What `experts_forward` lets be timed: what it runs meanwhile, and the candidates."""
    found: list[tuple[tuple[object, ...], Sequence[Tile]]] = []

    def choose_first(
        key: tuple[object, ...], candidates: Sequence[Tile], reference: Tile,
        prepare: Callable[[], Run],
    ) -> Tile:  # fmt: skip
        call = prepare()(candidates[0])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "sort", None)  # routing is not part of what is timed
            output = call()
        assert torch.equal(output, call())
        assert output.isfinite().all()  # all slots are in use
        found.append((key, candidates))
        return candidates[0]

    monkeypatch.setattr("kernels.triton.experts.choose", choose_first)
    return found


Timed = list[tuple[tuple[object, ...], Sequence[Tile]]]


def test_projections_are_timed_without_routing(timed: Timed) -> None:
    case = make_case(4, 4, 2, hidden=16, width=16, unused=0.4)
    assert_close(experts_forward(*case.arguments), case)
    assert [candidates for _, candidates in timed] == [list(DECODE), [DECODE[0], *DECODE[1:]]]


def test_prompts_of_offloaded_layers_choose_among_tall_tiles(timed: Timed) -> None:
    """Slots of all layers are no reason for tiles of a few rows: a layer has two experts."""
    case = make_case(64, 2, 1, hidden=16, width=16, dtype=torch.bfloat16)
    many = replace(
        case.experts,
        gate_up_EGH=case.experts.gate_up_EGH.repeat(9, 1, 1),
        down_EHF=case.experts.down_EHF.repeat(9, 1, 1),
        layer_experts=2,
    )
    actual = experts_forward(case.hidden, case.ids, case.weights, many)
    assert_close(actual, case)
    assert timed[0][1] == [tile for tile in PREFILL if tile.fits(2)]
