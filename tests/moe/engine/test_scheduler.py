"""Planning without a model: what a batch is, who gives way, and what is refused."""

from __future__ import annotations

import pytest

from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from tests.moe.fake_sequences import FakeSequence, is_done, run_step, scheduler


def group(prompt: int, new: int, n: int = 1) -> SequenceGroup:
    ids = list(range(prompt))
    return SequenceGroup([FakeSequence(ids, new) for _ in range(n)])  # type: ignore[misc]


def test_a_layered_wave_takes_one_stage_for_each_group_of_tokens() -> None:
    planner = scheduler("layered")
    planner.submit(group(5, 2))
    planner.submit(group(6, 2))
    stages = []
    for _ in range(3):
        step = planner.schedule()
        assert step.prefill is not None
        stages.append(
            (step.prefill.layer_group, step.prefill.num_layer_groups, len(step.prefill.chunks))
        )
        planner.update(())
    assert stages == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]


def test_chunks_share_the_budget_with_running_sequences() -> None:
    planner = scheduler("chunked")
    planner.submit(group(2, 9))
    run_step(planner)
    planner.submit(group(11, 1))
    sizes: list[list[int]] = []
    while not sizes or planner.waiting:
        step = planner.schedule()
        assert step.prefill is not None
        sizes.append([len(chunk.token_ids) for chunk in step.prefill.chunks])
        planner.update(())
    assert sizes == [[5], [5], [1]]


def test_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    planner = scheduler("whole", kv_tokens=13)
    old, young = group(4, 8), group(4, 8)
    planner.submit(old)
    planner.submit(young)
    order = []
    while not planner.idle:
        run_step(planner)
        order += [g for g in (old, young) if is_done(g.sequences[0]) and g not in order]
    assert order == [old, young]


def test_a_dropped_group_gets_nothing_and_others_go_on() -> None:
    planner = scheduler("layered")
    first, second = group(6, 2), group(6, 2)
    planner.submit(first)
    planner.submit(second)
    planner.schedule()
    planner.update(())
    planner.cancel(first)
    while not planner.idle:
        run_step(planner)
    assert (len(first.sequences[0].token_ids), len(second.sequences[0].token_ids)) == (0, 2)


def test_cancelling_a_preempted_sequence_ends_it_in_the_middle_of_its_wave() -> None:
    planner = scheduler("layered", kv_tokens=20)
    old, young = group(6, 9), group(6, 9)
    planner.submit(old)
    planner.submit(young)
    while not (planner.prefilling and young.sequences[0].token_ids):
        run_step(planner)
    assert planner.prefilling.chunks[0].group.sequences == young.sequences
    planner.cancel(young)
    got = len(young.sequences[0].token_ids)
    while not planner.idle:
        run_step(planner)
    assert (len(old.sequences[0].token_ids), len(young.sequences[0].token_ids)) == (9, got)


def test_one_sample_may_end_with_its_first_token_and_the_others_go_on() -> None:
    planner = scheduler("whole")
    both = group(5, 4, n=2)
    both.sequences[0].max_new_tokens = 1
    planner.submit(both)
    while not planner.idle:
        run_step(planner)
    assert [len(s.token_ids) for s in both.sequences] == [1, 4]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (group(30, 20), "needs memory for 50 tokens and there is room for 40 "),
        (group(15, 1, 3), "needs memory for 48 tokens and there is room for 40 "),
        (group(1, 1, 5), "n is 5 and engine.max_batch_size is 4"),
    ],
)
def test_what_can_never_run_is_refused_at_once(candidate: SequenceGroup, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scheduler("whole", kv_tokens=40).submit(candidate)
