"""Planning without a model: what a batch is, who gives way, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe.engine import prefill_batch
from moe.engine.kv_account import KVAccount
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from moe.kv import prefix_cache
from moe.kv.ledger import Windows
from moe.kv.prefix_cache import PrefixCache, block_hashes
from tests.moe.fake_sequences import FakeSequence, is_done, run_step, scheduler


def counting(
    block_tokens: int, windows: Windows | None = None, *, whole_blocks: bool = False
) -> Any:
    """Stands for a pool of blocks."""
    return SimpleNamespace(
        block_tokens=block_tokens,
        counts_blocks=whole_blocks,
        windows=windows or Windows(),
        policy=None,
    )


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


@pytest.mark.parametrize(
    ("common", "own", "kept", "window", "begun"),
    [
        (48, 1, 49, None, 1),
        (48, 1, 48, None, 3),  # the prefix cache has no room for a prompt
        (960, 40, 1000, 20, 1),
        (960, 40, 800, 20, 1),  # of a prompt it keeps the end of windows, from where others go on
        (800, 200, 800, 20, 3),  # and not what is before that
        (960, 40, 200, 20, 3),
    ],
)
def test_prompts_wait_for_a_common_beginning_that_the_prefix_cache_will_have(
    common: int, own: int, kept: int, window: int | None, begun: int
) -> None:
    planner = scheduler("whole")
    planner.prefill = planner.prefill.model_copy(update={"wave_tokens": 4096})
    planner.prefixes = PrefixCache(kept)
    windows = None if window is None else Windows.of({0: window}, {0: 1})
    planner.account = KVAccount(64, counting(64, windows))
    for number in range(3):
        ids = [*range(common), *[-number] * own]
        planner.submit(SequenceGroup([FakeSequence(ids, 1)]))  # type: ignore[list-item]
    batch = planner.schedule().prefill
    assert batch is not None
    assert len(batch.chunks) == begun


def test_a_waiting_prompt_is_hashed_once_and_not_looked_up_while_the_batch_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed, looked_up = Mock(wraps=block_hashes), Mock(wraps=SequenceGroup.look_up)
    for module in (prefix_cache, prefill_batch):
        monkeypatch.setattr(module, "block_hashes", hashed)
    monkeypatch.setattr(SequenceGroup, "look_up", lambda *given: looked_up(*given))
    for batch, kv_tokens, times in ((1, None, 2), (2, 41, 20)):
        planner = scheduler("whole", kv_tokens=kv_tokens, batch=batch)
        planner.prefixes = PrefixCache(30)
        running, waiting = group(3, 20), group(40, 1)
        planner.submit(running)
        run_step(planner)
        planner.submit(waiting)
        for mock in (hashed, looked_up):
            mock.reset_mock()
        while not planner.idle:
            run_step(planner)
        assert hashed.call_count == 1
        assert looked_up.call_count == times


def test_a_prompt_that_cannot_start_yet_undoes_no_reading() -> None:
    planner = scheduler("chunked", kv_tokens=40)
    running, half_read, big = group(6, 30), group(20, 1), group(34, 2)
    big.sequences[0].priority = -9
    for each in (running, half_read):
        planner.submit(each)
        run_step(planner)
    planner.submit(big)
    run_step(planner)
    assert planner.waiting == [big, half_read]
    assert half_read.num_read
    while not planner.idle:
        run_step(planner)


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


@example(prompt=100, new=300, generated=250, n=1, kv_tokens=256, kept=1, full=0)
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(0, 599),
    st.integers(1, 3),
    st.integers(100, 1200),
    st.integers(1, 2000),
    st.sampled_from([0, 1]),
)
def test_behind_windows_what_is_accepted_can_start_and_start_again(
    prompt: int, new: int, generated: int, n: int, kv_tokens: int, kept: int, full: int
) -> None:
    """Whatever the prefix cache could keep. With ``full``, a layer beside that with a window sees
    all tokens."""
    planner = scheduler("whole", kv_tokens=kv_tokens)
    planner.prefixes = PrefixCache(kept)
    windows = Windows.of({0: 20}, {0: 1} | ({1: 1} if full else {}))
    planner.account = KVAccount(64, counting(64, windows))
    fits, whole = group(prompt, new, n), windows.held_tokens(prompt + new, min(prompt, 64))
    try:
        planner.submit(fits)
    except RequestError:
        assert n > 1 or whole > kv_tokens or windows.held_tokens(prompt, 64) + 1 > kv_tokens
        return
    assert planner.schedule().prefill is not None
    assert planner.num_used_tokens() + n <= kv_tokens
    planner.cancel(fits)
    sequence = fits.sequences[0]
    sequence.token_ids[:] = [0] * min(generated, new - 1)
    again = SequenceGroup([sequence])
    again.keeps_all = planner.account.keeps_all(again, planner.prefixes, kv_tokens)
    sequence.cancelled = False
    planner.waiting = [again]
    assert planner.schedule().prefill is not None
    assert planner.num_used_tokens() <= kv_tokens


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(0, 9)), max_size=8),
    st.integers(21, 48),
    st.sampled_from([1, 4]),
)
def test_what_is_scheduled_ahead_is_the_step_that_follows(
    asked: list[tuple[int, int, int]], kv_tokens: int, unit: int
) -> None:
    """Unless a sequence ends, which may make room; and there is memory for both steps."""
    planner = scheduler("chunked", kv_tokens=kv_tokens // unit * unit, batch=3)
    planner.account = KVAccount(pool=counting(unit, whole_blocks=unit > 1))
    left = sorted((arrives, *size) for *size, arrives in asked)
    for step in range(100):
        while left and left[0][0] <= step:
            _, prompt, new = left.pop(0)
            if prompt + new <= 20:
                planner.submit(group(prompt, new))
        if planner.idle:
            continue
        now = planner.schedule()
        served, ahead = list(now.decode), planner.schedule_ahead(now.decode)
        assert ahead is None or now.prefill is None
        if ahead is not None:
            reads = [len(s.prompt_token_ids) + len(s.token_ids) for s in served]
            reads = [rows + (s in ahead.decode) for rows, s in zip(reads, served, strict=True)]
            assert sum(-(-rows // unit) * unit for rows in reads) <= planner.kv_tokens
        if now.prefill is not None and now.prefill.is_last_layer_group:
            last = [chunk.group for chunk in now.prefill.chunks if chunk.is_last]
            served += [s for own in last for s in own.sequences if not s.token_ids]
        for sequence in served:
            sequence.token_ids.append(0)
        ended = [sequence for sequence in served if is_done(sequence)]
        planner.update(ended)
        if ahead is None or ended:
            continue
        following = planner.schedule()
        assert following.prefill is None
        # `schedule` wants room for a token more of each even where its block has that.
        assert following.decode == ahead.decode or unit > 1
        for sequence in following.decode:
            sequence.token_ids.append(0)
        planner.update([s for s in following.decode if is_done(s)])


def test_nothing_is_scheduled_ahead_of_what_the_device_does_not_know() -> None:
    planner = scheduler("whole")
    planner.submit(group(2, 5))
    run_step(planner)
    (sequence,) = planner.running
    assert planner.schedule_ahead([]) is None
    ahead = planner.schedule_ahead([sequence])
    assert ahead is not None
    assert ahead.decode == [sequence]
