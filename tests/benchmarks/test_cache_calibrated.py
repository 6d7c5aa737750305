"""The regressions of `benchmarks.cache_calibrated` hear nothing of what comes later."""

import numpy as np
import pytest
from benchmarks.cache_calibrated import DISCOUNT, KINDS, Known

TOKENS, LAYERS, WIDTH = 6, 3, 4


def known(later: int | None = None) -> Known:
    """Of random text, changed in whatever is known only behind a visit of this number."""
    draw = np.random.default_rng(0)
    units, usual = LAYERS * WIDTH, np.full(LAYERS * WIDTH, 0.5, np.float32)
    asked = (draw.random((TOKENS, units)) < 0.5).astype(np.float32)
    scores, token, last = (
        draw.standard_normal((TOKENS, size), dtype=np.float32) for size in (units, 2, 2)
    )
    if later is not None:
        after = np.arange(TOKENS * LAYERS).repeat(WIDTH).reshape(TOKENS, units) > later
        asked[after], scores[after] = 1 - asked[after], 9
        token[later // LAYERS + 1 :] = 9  # a token is known from its first layer on
        last[(later + 1) // LAYERS :] = 9
    return Known(asked, scores, token, last, WIDTH, usual)


@pytest.mark.parametrize("visit", range(TOKENS * LAYERS))
def test_nothing_later_is_heard_and_all_before_is(visit: int) -> None:
    tokens, layers = (each[visit : visit + 1] for each in known().visits())
    for target in range(LAYERS):
        for kinds in range(1, len(KINDS) + 1):
            heard = known().features(target, kinds, tokens, layers)
            assert np.array_equal(heard, known(visit).features(target, kinds, tokens, layers))
    heard = known().features(layers[0], len(KINDS), tokens, layers)
    assert not np.array_equal(
        heard, known(visit - 1).features(layers[0], len(KINDS), tokens, layers)
    )


def test_a_next_use_is_worth_less_by_each_visit_until_then() -> None:
    heard = known()
    tokens, layers = heard.visits()
    for target in range(LAYERS):
        soon = heard.next_uses(target, tokens, layers)
        asked = heard.asked.reshape(TOKENS, LAYERS, WIDTH)[:, target]
        for own, token, layer in zip(soon, tokens, layers, strict=True):
            coming = asked[token + (target <= layer) :]
            for expert in range(WIDTH):
                if coming[:, expert].any():
                    wait = int(coming[:, expert].argmax())
                    assert own[expert] == pytest.approx(DISCOUNT**wait)
