"""Budgets become slots, and what is too little is refused with numbers."""

from __future__ import annotations

import pytest

from offload.errors import BudgetError
from offload.tiers import GIB, budget, device_tier, host_tier


def test_auto_leaves_a_reserve_and_a_limit_is_kept() -> None:
    assert budget(100 * GIB, None) == 95 * GIB
    assert budget(GIB, None) == GIB - GIB // 4
    assert budget(100 * GIB, 8.0) == 8 * GIB
    assert budget(4 * GIB, 8.0) == 4 * GIB
    assert budget(4 * GIB, 2.0, taken=3 * GIB) == 0


def test_no_more_slots_than_experts() -> None:
    assert device_tier(1000, 10, 64).slots == 64
    tier = device_tier(105, 10, 64)
    assert (tier.slots, tier.nbytes) == (10, 100)


def test_too_little_is_refused_with_numbers() -> None:
    with pytest.raises(BudgetError, match="2 experts, 20 bytes at 10 bytes each, and 19 bytes"):
        device_tier(19, 10, 64)


def test_the_host_is_pinned_as_far_as_allowed() -> None:
    pinned, pageable = host_tier(100, 10, 64, 100), host_tier(100, 10, 64, 99)
    assert pinned is not None
    assert pageable is not None
    assert pinned.pinned
    assert not pageable.pinned
    assert "pageable: only" in pageable.reason
    assert host_tier(19, 10, 64, 100) is None
