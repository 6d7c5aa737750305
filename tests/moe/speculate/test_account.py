"""What drafting may lose, and when drafts are looked up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.speculate.account import (
    BURST,
    CREDIT,
    EVERY,
    FIRST,
    LOOKING_SHARE,
    SHARE,
    TRUST,
    UNSPENT,
    Account,
    Looking,
)


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.5, 6.0), st.integers(1, 8)), min_size=1, max_size=200
    )
)
def test_no_more_is_lost_in_any_stretch_than_the_account_allows(
    steps: list[tuple[bool, float, int]],
) -> None:
    """Plain steps take 1; others what they like, and bring some tokens of a second each."""
    account, lost, most = Account(), [0.0], [0.0]
    for looking, seconds, tokens in steps:
        if looking and account.affords(seconds - 1.0):
            account.settle(seconds, tokens, 1.0)
            lost.append(lost[-1] + seconds - tokens)
        else:
            seconds = 1.0
            account.earn(seconds, 1.0)
            lost.append(lost[-1])
        most.append(most[-1] + SHARE * seconds)
        assert account.room >= -1e-9
    assert all(lose <= share + UNSPENT + 1e-9 for lose, share in zip(lost, most, strict=True))
    for start in range(len(lost)):
        for end in range(start, len(lost)):
            allowed = most[end] - most[start] + CREDIT
            assert lost[end] - lost[start] <= allowed + 1e-9


def test_trials_are_paid_from_a_share_of_the_time() -> None:
    account = Account()
    assert not account.affords(0.01)
    assert not account.affords_trial(0.01)
    for _ in range(100):
        account.earn(1.0, 1.0)
        assert account.room == UNSPENT  # from the beginning, and no more
    assert not account.affords_trial(0.6)
    for _ in range(100):
        account.earn(1.0, 1.0)
    assert account.affords_trial(0.99)
    account.settle(3.0, 2.2, 1.0)
    account.tried(0.8)
    assert account.room == pytest.approx(UNSPENT - 0.8 + 3 * SHARE)
    assert not account.affords_trial(0.3)
    for _ in range(1000):
        account.earn(1.0, 1.0)
    assert account.room == UNSPENT


def test_what_the_text_speaks_for_may_lose_more_and_then_waits_for_its_share() -> None:
    account, drafts = Account(), 0
    account.earn(1.0, 1.0)
    for _ in range(1000):
        if account.affords(1.0, TRUST):
            account.settle(2.0, 1.0, 1.0)
            drafts += 1
        else:
            account.earn(1.0, 1.0)
    assert drafts == pytest.approx(UNSPENT + TRUST + 1000 * SHARE, abs=1)
    assert not account.affords(1.0)


def test_gains_are_measured_and_may_be_lost_again_in_part() -> None:
    account = Account()
    for _ in range(100):
        account.settle(1.0, 1.3, 1.0)
    assert account.gain == pytest.approx(1.3)
    assert account.room == CREDIT
    assert not account.affords_trial(1.5)  # whatever was gained


def test_looking_goes_on_while_it_pays_and_is_rarer_each_time_where_it_does_not() -> None:
    looking, longest = Looking(), 12
    assert looking.rests(1) == FIRST
    looking.plainly(1.0, 0, 0.0)
    rests = list[int]()
    for _ in range(600):
        looking.missed()
        rests.append(looking.rests(1))
        looking.plainly(1.0, 1, 0.0601)
    assert rests[:16] == [0] * 16
    first = next(index for index, rest in enumerate(rests) if rest)
    assert rests[first : first + 3] == [1, 3, 7]
    assert rests[-1] == longest == int(0.0601 / LOOKING_SHARE)
    looking.found(-0.5)  # in vain
    assert looking.rests(1) == longest
    for _ in range(3):
        looking.found(4.0)
    looking.missed()
    assert looking.rests(1) == 0


def test_plain_steps_are_measured_first_for_every_batch_and_again_where_there_are_none() -> None:
    looking = Looking()
    assert [looking.rests(batch) for batch in (1, 1, 4, 1, 4)] == [FIRST, 0, FIRST, 0, 0]
    for _ in range(EVERY):
        assert looking.rests(4) == 0
        looking.found(1.0)
    assert [looking.rests(4) for _ in range(2)] == [BURST, 0]
    for _ in range(EVERY - 1):
        looking.found(1.0)
    looking.plainly(1.0, 1, 0.0)
    looking.found(1.0)
    assert looking.rests(4) == 0
