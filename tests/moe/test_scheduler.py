"""Planning without a model: everybody finishes, memory is kept, decoding never waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.prefill import Mode
from moe.scheduler import Group, Scheduler
from moe.settings import PrefillSettings

LAYERS = 6


@dataclass(eq=False)
class Fake:
    """Stands for a sequence that wants ``max_new_tokens`` tokens."""

    prompt_token_ids: list[int]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    cache: Any = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return len(self.token_ids) >= self.max_new_tokens


def group(prompt: int, new: int, n: int = 1) -> Group:
    ids = list(range(prompt))
    return Group([Fake(ids, new) for _ in range(n)])  # type: ignore[misc]


def scheduler(mode: Mode, kv_tokens: int | None = None, batch: int = 4) -> Scheduler:
    settings = PrefillSettings(mode=mode, wave_tokens=12, chunk_tokens=6, group_tokens=4)
    return Scheduler(settings, batch, kv_tokens, LAYERS)


def run_step(planner: Scheduler, kv_tokens: float) -> set[Fake]:
    """What the engine does, without a model; returns who got a token."""
    step = planner.plan()
    held = sum(len(s.prompt_token_ids) + len(s.token_ids) for s in step.decode)
    held += sum(g.num_read for g in planner.waiting)
    served = list(step.decode)
    if step.wave is not None:
        for piece in step.wave.pieces:
            held += piece.group.num_kv
            assert piece.token_ids, "a piece without tokens"
            if step.wave.is_last_stage and piece.is_last and not piece.group.cancelled:
                served += piece.group.sequences
    assert held <= kv_tokens
    for sequence in served:
        sequence.token_ids.append(0)
    gone = [s for s in served if s.done]  # type: ignore[attr-defined]
    planner.finish(gone)
    return set(served)  # type: ignore[arg-type]


@given(
    st.sampled_from(["whole", "chunked", "layered"]),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=8,
    ),
    st.integers(40, 120),
)
def test_everybody_finishes_within_memory(
    mode: Mode, arrivals: list[tuple[int, int, int, int]], kv_tokens: int
) -> None:
    planner = scheduler(mode, kv_tokens)
    pending = []
    for prompt, new, n, at in arrivals:
        candidate = group(prompt, new, n)
        if max(prompt + new, n * (prompt + 1)) <= kv_tokens:
            pending.append((at, candidate))
    groups = [g for _, g in pending]
    for clock in range(3000):
        for at, arrived in pending:
            if at == clock:
                planner.submit(arrived)
        if clock > 6 and planner.idle:
            break
        decoding = set(planner.running)
        served = run_step(planner, kv_tokens)
        # Stall-free: who was running and was not preempted got a token.
        assert all(s in served for s in decoding if s not in _waiting(planner))
    assert planner.idle, "somebody starves"
    for arrived in groups:
        assert all(s.done for s in arrived.sequences)  # type: ignore[attr-defined]


def _waiting(planner: Scheduler) -> set[Any]:
    again = list(planner.waiting)
    if planner.wave is not None:
        again += [piece.group for piece in planner.wave.pieces]
    return {s for g in again for s in g.sequences}


def test_a_layered_wave_takes_one_stage_for_each_group_of_tokens() -> None:
    planner = scheduler("layered")
    planner.submit(group(5, 2))
    planner.submit(group(6, 2))
    stages = []
    for _ in range(3):
        step = planner.plan()
        assert step.wave is not None
        stages.append((step.wave.stage, step.wave.num_stages, len(step.wave.pieces)))
        planner.finish(())
    assert stages == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]


def test_chunks_share_the_budget_with_running_sequences() -> None:
    planner = scheduler("chunked")
    planner.submit(group(2, 9))
    run_step(planner, float("inf"))
    planner.submit(group(11, 1))
    sizes: list[list[int]] = []
    while not sizes or planner.waiting:
        step = planner.plan()
        assert step.wave is not None
        sizes.append([len(piece.token_ids) for piece in step.wave.pieces])
        planner.finish(())
    assert sizes == [[5], [5], [1]]


def test_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    planner = scheduler("whole", kv_tokens=13)
    old, young = group(4, 8), group(4, 8)
    planner.submit(old)
    planner.submit(young)
    order = []
    while not planner.idle:
        run_step(planner, 13)
        order += [g for g in (old, young) if g.sequences[0].done and g not in order]  # type: ignore[attr-defined]
    assert order == [old, young]


def test_a_dropped_group_gets_nothing_and_others_go_on() -> None:
    planner = scheduler("layered")
    first, second = group(6, 2), group(6, 2)
    planner.submit(first)
    planner.submit(second)
    planner.plan()
    planner.finish(())
    planner.drop(first)
    while not planner.idle:
        run_step(planner, float("inf"))
    assert (len(first.sequences[0].token_ids), len(second.sequences[0].token_ids)) == (0, 2)


def test_cancelling_a_preempted_sequence_ends_it_in_the_middle_of_its_wave() -> None:
    planner = scheduler("layered", kv_tokens=20)
    old, young = group(6, 9), group(6, 9)
    planner.submit(old)
    planner.submit(young)
    while not (planner.wave and young.sequences[0].token_ids):
        run_step(planner, 20)
    assert planner.wave.pieces[0].group.sequences == young.sequences
    planner.drop(young)
    got = len(young.sequences[0].token_ids)
    while not planner.idle:
        run_step(planner, 20)
    assert (len(old.sequences[0].token_ids), len(young.sequences[0].token_ids)) == (9, got)


def test_one_sample_may_end_with_its_first_token_and_the_others_go_on() -> None:
    planner = scheduler("whole")
    both = group(5, 4, n=2)
    both.sequences[0].max_new_tokens = 1
    planner.submit(both)
    while not planner.idle:
        run_step(planner, float("inf"))
    assert [len(s.token_ids) for s in both.sequences] == [1, 4]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (group(30, 20), "needs memory for 50 tokens and memory.kv_tokens is 40"),
        (group(15, 1, 3), "needs memory for 48 tokens and memory.kv_tokens is 40"),
        (group(1, 1, 5), "n is 5 and engine.max_batch_size is 4"),
    ],
)
def test_what_can_never_run_is_refused_at_once(candidate: Group, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scheduler("whole", kv_tokens=40).submit(candidate)
