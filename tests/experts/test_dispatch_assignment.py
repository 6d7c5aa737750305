"""Who serves what: every slot once, by a rank that may, and both ends count alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.dispatch import assignment
from experts.dispatch.assignment import Assignment, serving_ranks
from experts.dispatch.base import DispatchStatistics
from experts.placement import Placement, linear
from kernels.cpu.compiler import BuildError
from tests.experts.dispatch_cases import random_placement
from tests.oracles.assignment import assign


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[np.ndarray], Placement]:
    """Ids of the tokens of several ranks, also of none, and a placement."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(2, 9))
    slots, seed = draw(st.integers(1, min(4, experts))), draw(st.integers(0, 999))
    random = np.random.default_rng(seed)
    hot = draw(st.booleans())
    ids = []
    for _ in range(ranks):
        tokens = draw(st.sampled_from([0, 1, 2, 7, 30]))
        keys = random.random((tokens, experts)) - (10 * np.arange(experts) if hot else 0)
        chosen = np.sort(np.argsort(keys, 1)[:, :slots], 1)
        unused = random.random(chosen.shape) < draw(st.sampled_from([0, 0.3]))
        ids.append(np.where(unused, -1, chosen).astype(np.int16))
    return ids, random_placement(experts, ranks, draw(st.integers(0, 6)), seed)


Case = tuple[list[np.ndarray], Placement]


def parts_of(case: Case) -> list[Assignment]:
    ids, placement = case
    return [Assignment(ids, rank, placement) for rank in range(len(ids))]


@given(case=tables())
def test_both_ends_agree(case: Case) -> None:
    parts = parts_of(case)
    for rank, part in enumerate(parts):
        rows, slots = part.per_rank, part.per_slot
        assert rows.send_R[rank] == rows.receive_R[rank]
        assert slots.served_R[rank] == slots.returned_R[rank]
        assert len(rows.leaving) == part.pairs == sum(rows.send_R) - rows.send_R[rank]
        for other, peer in enumerate(parts):
            assert rows.send_R[other] == peer.per_rank.receive_R[rank]
            assert slots.returned_R[other] == peer.per_slot.served_R[rank]
        assert sum(rows.receive_R) == len(rows.served_N) == len(rows.experts_NK)
        assert sum(slots.served_R) == len(slots.token_A) == len(slots.experts_A) == part.served


@given(case=tables())
def test_every_slot_is_served_once_by_a_rank_that_may(case: Case) -> None:
    ids, placement = case
    parts = parts_of(case)
    for rank, part in enumerate(parts):
        slots = part.per_slot
        assert (placement.copies_ER[slots.experts_A, rank] > 0).all()
        back = [result for other in own_last(parts, rank) for result in sent_back(other, rank)]
        for token, row in enumerate(slots.position_TK):
            for slot, position in enumerate(row):
                wanted = ids[rank][token, slot]
                assert (position < 0) == (wanted == -1)
                if position >= 0:
                    assert back[position] == (part.first + token, wanted)
        used = slots.position_TK[slots.position_TK >= 0]
        assert sorted(used) == list(range(len(back)))


def own_last(parts: list[Assignment], rank: int) -> list[Assignment]:
    return [part for part in parts if part is not parts[rank]] + [parts[rank]]


def sent_back(part: Assignment, rank: int) -> list[tuple[int, int]]:
    """Token and expert of the results that one rank has for another, or for itself."""
    order = [*(r for r in range(part.ranks) if r != part.rank), part.rank]
    start = sum(part.per_slot.served_R[r] for r in order[: order.index(rank)])
    found = zip(part.per_slot.token_A.tolist(), part.per_slot.experts_A.tolist(), strict=True)
    return list(found)[start : start + part.per_slot.served_R[rank]]


@given(case=tables())
def test_rows_come_to_those_who_serve_them(case: Case) -> None:
    ids, _ = case
    table, parts = np.concatenate(ids), parts_of(case)
    for rank, part in enumerate(parts):
        came = part.per_rank.served_N[: len(part.per_rank.served_N) - part.per_rank.receive_R[rank]]
        there = [*came.tolist(), *range(part.first, part.first + part.tokens)]
        for token in {*part.per_slot.token_A.tolist(), *part.per_rank.served_N.tolist()}:
            assert there[part.place_T[token]] == token
        sent = [t for peer in own_last(parts, rank)[:-1] for t in leaving_for(peer, rank)]
        assert came.tolist() == sent
        for token, experts in zip(part.per_rank.served_N, part.per_rank.experts_NK, strict=True):
            mine = part.per_slot.experts_A[part.per_slot.token_A == token]
            assert sorted(experts[experts >= 0]) == sorted(mine)
            assert set(mine) <= set(table[token])


def leaving_for(part: Assignment, rank: int) -> list[int]:
    """Tokens, among all ranks', whose rows go from one rank to another."""
    order = [r for r in range(part.ranks) if r != part.rank]
    start = sum(part.per_rank.send_R[r] for r in order[: order.index(rank)])
    leaving = part.per_rank.leaving[start : start + part.per_rank.send_R[rank]]
    places = part.per_rank.position_TR[leaving, order.index(rank)]
    assert places.tolist() == list(range(start, start + len(leaving)))
    return [part.first + int(token) for token in leaving]


@given(case=tables())
def test_a_row_goes_once_to_a_rank(case: Case) -> None:
    ids, placement = case
    table = np.concatenate(ids)
    loads = np.bincount(table.reshape(-1) + 1, minlength=placement.num_experts + 1)[1:]
    source = np.repeat(np.arange(len(ids)), list(map(len, ids)))
    serving = serving_ranks(table, source, placement)
    for part in parts_of(case):
        own = serving[part.first : part.first + part.tokens]
        assert part.pairs == sum(len(set(row.tolist()) - {-1, part.rank}) for row in own)
        assert part.loads_E.tolist() == loads.tolist()


@given(case=tables())
def test_compiled_and_plain_agree_to_the_integer(case: Case) -> None:
    compiled = parts_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "_assigned", assign)
        plain = parts_of(case)
    for one, other in zip(compiled, plain, strict=True):
        assert one.loads_E.tolist() == other.loads_E.tolist()
        assert (one.tokens, one.pairs, one.served) == (other.tokens, other.pairs, other.served)
        assert one.per_rank.served_N.tolist() == other.per_rank.served_N.tolist()
        here, there = one.per_slot, other.per_slot
        assert here.token_A.tolist() == there.token_A.tolist()
        assert here.experts_A.tolist() == there.experts_A.tolist()
        assert (here.served_R, here.returned_R) == (there.served_R, there.returned_R)
        unused = there.position_TK < 0
        assert (here.position_TK < 0).tolist() == unused.tolist()
        assert here.position_TK[~unused].tolist() == there.position_TK[~unused].tolist()


def test_ranks_without_compiled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "choose_kernel", lambda: (None, "no compiler is here"))
    with pytest.raises(BuildError, match=r"several ranks need .* no compiler is here"):
        Assignment([np.zeros((1, 1), np.int16)], 0, linear(4, 4, 1))


def test_an_id_that_is_no_expert_is_refused() -> None:
    with pytest.raises(IndexError):
        parts_of(([np.full((1, 1), 4, np.int16), np.zeros((1, 1), np.int16)], linear(4, 4, 2)))


def test_all_tokens_to_one_expert() -> None:
    ids = [np.zeros((5, 1), np.int16), np.zeros((3, 1), np.int16)]
    first, second = parts_of((ids, linear(4, 4, 2)))
    assert first.per_rank.receive_R == [5, 3]
    assert first.per_rank.send_R == [5, 0]
    assert second.per_rank.receive_R == [0, 0]


@pytest.mark.parametrize("compiled", [True, False])
def test_counts_have_64_bits(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids have 16, of more tokens than these can count."""
    if not compiled:
        monkeypatch.setattr(assignment, "_assigned", assign)
    ids = [np.zeros((2**16, 1), np.int16)] * 2
    loads_E = Assignment(ids, 0, linear(2, 2, 2)).loads_E
    assert loads_E.tolist() == [2**17, 0]
    counted = DispatchStatistics([2])
    for _ in range(2):
        layer, many = range(1), 2**33
        counted.add(
            layer,
            many * loads_E[None],
            tokens=many,
            pairs=many,
            served=many,
            sent_bytes=many,
            row_bytes=4096,
            meta_bytes=0,
        )
    assert counted.take_loads().tolist() == [[2**51, 0]]
    assert counted.lower_bound_bytes == 2 * 2**34 * 4096
