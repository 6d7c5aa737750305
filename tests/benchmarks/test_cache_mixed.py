"""The voice of `benchmarks.cache_mixed` hears nothing of what comes later, and learns that."""

import pytest
import torch
from benchmarks.cache_calibrated import DISCOUNT
from benchmarks.cache_heard import Heard

from benchmarks.cache_traces import Recorded
from moe.calibrate.trace import Rows, Trace
from moe.selection import FoundSelector, Selector
from routing.routers import RouterRule

TOKENS, LAYERS, WIDTH, HIDDEN = 6, 3, 4, 5


def heard(later: int | None = None) -> Heard:
    """Of random text, changed in whatever is known only behind a visit of this number."""
    draw = torch.Generator().manual_seed(0)
    experts = torch.randint(WIDTH, (TOKENS, LAYERS, 1), generator=draw)
    rows = torch.randn(TOKENS, LAYERS, HIDDEN, generator=draw)
    if later is not None:
        after = (torch.arange(TOKENS * LAYERS) > later).reshape(TOKENS, LAYERS)
        experts[after] = (experts[after] + 1) % WIDTH
        rows[after] = 9
    trace = Trace(
        torch.zeros(TOKENS, dtype=torch.int32),
        [TOKENS],
        [WIDTH] * LAYERS,
        [own.to(torch.int16) for own in experts.unbind(1)],
        [torch.ones(TOKENS, 1).half()] * LAYERS,
        Rows(torch.arange(TOKENS), [own.half() for own in rows.unbind(1)], []),
    )
    weight = torch.randn(WIDTH, HIDDEN, generator=draw)
    routers = [FoundSelector(Selector(weight, None, RouterRule(top_k=1)))] * LAYERS
    usual = torch.full((LAYERS * WIDTH,), 0.25)
    return Heard(Recorded("random", trace, WIDTH), routers, usual, all_visits=True)


@pytest.mark.parametrize("visit", range(TOKENS * LAYERS))
def test_nothing_later_is_heard_and_all_before_is(visit: int) -> None:
    for own, same, changed in zip(
        heard().clues(), heard(visit).clues(), heard(visit - 1).clues(), strict=True
    ):
        assert torch.equal(own[visit], same[visit])
        assert not torch.equal(own[visit], changed[visit])


def test_a_next_use_is_worth_less_by_each_visit_until_then() -> None:
    text = heard()
    soon = text.next_uses().reshape(-1, LAYERS, WIDTH)
    asked = text.asked.reshape(TOKENS, LAYERS, WIDTH)
    for own, (token, layer) in zip(soon, text.visits.tolist(), strict=True):
        for target in range(LAYERS):
            coming = asked[token + (target <= layer) :, target]
            for expert in range(WIDTH):
                if coming[:, expert].any():
                    wait = int(coming[:, expert].argmax())
                    assert float(own[target, expert]) == pytest.approx(DISCOUNT**wait)
