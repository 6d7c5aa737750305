"""Who serves what: every slot once, by a rank that may, and both ends count alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from experts.dispatch.assignment import Assignment, assign, serve
from experts.placement import Placement, linear
from tests.experts.dispatch_cases import random_placement


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
        ids.append(
            np.where(random.random(chosen.shape) < draw(st.sampled_from([0, 0.3])), -1, chosen)
        )
    return ids, random_placement(experts, ranks, draw(st.integers(0, 6)), seed)


@given(case=tables())
def test_both_ends_agree(case: tuple[list[np.ndarray], Placement]) -> None:
    ids, placement = case
    parts = [assign(ids, rank, placement) for rank in range(len(ids))]
    for rank, part in enumerate(parts):
        assert part.send_R[rank] == part.receive_R[rank]
        assert part.rows_N[: len(part.rows_N) - part.send_R[rank]].tolist() == list(
            range(sum(part.receive_R) - part.receive_R[rank])
        )
        assert part.slots_R[rank] == part.returned_R[rank]
        for other, peer in enumerate(parts):
            assert part.send_R[other] == peer.receive_R[rank]
            assert part.returned_R[other] == peer.slots_R[rank]
        assert sum(part.receive_R) == len(part.experts_NK)
        assert sum(part.slots_R) == len(part.served_A) == len(part.experts_A)


@given(case=tables())
def test_every_slot_is_served_once_by_a_rank_that_may(
    case: tuple[list[np.ndarray], Placement],
) -> None:
    ids, placement = case
    parts = [assign(ids, rank, placement) for rank in range(len(ids))]
    for rank, part in enumerate(parts):
        assert (placement.copies_ER[part.experts_A, rank] > 0).all()
        back = walk(parts, rank)
        for token, row in enumerate(part.position_TK):
            for slot, position in enumerate(row):
                wanted = ids[rank][token, slot]
                assert (position == -1) == (wanted == -1)
                if position >= 0:
                    assert back[position] == (token, wanted)
        used = part.position_TK[part.position_TK >= 0]
        assert sorted(used) == list(range(len(back)))


def staying(part: Assignment, rank: int) -> list[int]:
    """Its own tokens that a rank serves."""
    come = sum(part.receive_R) - part.receive_R[rank]
    return [int(row) - come for row in part.rows_N[come:]]


def walk(parts: list[Assignment], rank: int) -> list[tuple[int, int]]:
    """The token and expert of each result that comes back to a rank, followed by hand."""
    order = [*(r for r in range(len(parts)) if r != rank), rank]
    tokens = list(parts[rank].leaving) + staying(parts[rank], rank)
    results, start = [], 0
    for other in order:
        peer, count = parts[other], parts[rank].send_R[other]
        sources = [*(r for r in range(len(parts)) if r != other), other]
        first = sum(peer.receive_R[r] for r in sources[: sources.index(rank)])
        for row, expert in zip(peer.served_A, peer.experts_A, strict=True):
            if first <= row < first + count:
                results.append((int(tokens[start + row - first]), int(expert)))
        start += count
    return results


@given(case=tables())
def test_a_row_goes_once_to_a_rank(case: tuple[list[np.ndarray], Placement]) -> None:
    ids, placement = case
    table = np.concatenate(ids)
    loads = np.bincount(table.reshape(-1) + 1, minlength=placement.num_experts + 1)[1:]
    source = np.repeat(np.arange(len(ids)), list(map(len, ids)))
    serving = serve(table, loads, source, placement)
    starts = np.cumsum([0, *map(len, ids)])
    for rank in range(len(ids)):
        part = assign(ids, rank, placement)
        own = serving[starts[rank] : starts[rank + 1]]
        pairs = sum(len(set(row.tolist()) - {-1}) for row in own)
        assert len(part.leaving) + len(staying(part, rank)) == pairs
        assert part.loads_E.tolist() == loads.tolist()


def test_all_tokens_to_one_expert() -> None:
    ids = [np.zeros((5, 1), np.int64), np.zeros((3, 1), np.int64)]
    part = assign(ids, 0, linear(4, 4, 2))
    assert part.receive_R == [5, 3]
    assert part.send_R == [5, 0]
    assert assign(ids, 1, linear(4, 4, 2)).receive_R == [0, 0]
