"""Fitting next uses: learnt where routers tell them, refused where nothing does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe.calibration.gates import FoundGate
from moe.calibration.trace import Scored, Trace
from moe.commands.calibrate import fit_next_use as fit_module
from moe.commands.calibrate.fit_next_use import CAPACITIES, Overheard, Run, fit_next_use, judge
from offload.policies import ForecastPolicy
from offload.replay import hit_ratio
from routing.predict.lookahead import Gate
from routing.routers import RouterRule

LAYERS, WIDTH, HIDDEN, TOKENS = 3, 12, 8, 4000


def told(seed: int, *, telling: bool) -> tuple[Trace, list[FoundGate]]:
    """Routers that give more to what comes sooner, where they tell anything."""
    draw = torch.Generator().manual_seed(seed)
    coming = torch.randint(WIDTH, (TOKENS, LAYERS), generator=draw)
    asked = torch.nn.functional.one_hot(coming, WIDTH).bool().numpy()
    soon = torch.from_numpy(Run(asked, [], np.zeros((TOKENS, 1), np.float16)).soon()[1:])
    noise = 0.02 * torch.randn(TOKENS, LAYERS, WIDTH, generator=draw)
    scores = [own.half() for own in ((soon if telling else 0.0) + noise).unbind(1)]
    read = torch.zeros(TOKENS, HIDDEN).half()
    trace = Trace(
        torch.zeros(TOKENS, dtype=torch.int32),
        [TOKENS],
        [WIDTH] * LAYERS,
        [coming[:, layer, None].to(torch.int16) for layer in range(LAYERS)],
        [torch.ones(TOKENS, 1).half()] * LAYERS,
        scored=Scored(torch.arange(TOKENS), scores, read),
    )
    gate = Gate(torch.zeros(WIDTH, HIDDEN), RouterRule(top_k=1))
    return trace, [FoundGate(gate, None)] * LAYERS


def test_what_routers_nearly_chose_is_kept() -> None:
    trace, found = told(0, telling=True)
    learnt, reason = fit_next_use(trace, found, lambda what, done, total: None)
    assert learnt is not None, reason
    assert not reason
    other, _ = told(1, telling=True)
    assert other.scored is not None
    run, slots = Run.of(other, other.scored), LAYERS * WIDTH // 3
    ratios = [
        hit_ratio(run.calls(), slots, policy, WIDTH)
        for policy in (Overheard(run, learnt, slots), ForecastPolicy(LAYERS, WIDTH))
    ]
    assert ratios[0] > ratios[1] + 0.2, ratios


@pytest.mark.parametrize(("fitted", "kept"), [(0.51, True), (0.5, False), (0.49, False)])
def test_what_hits_no_more_on_text_kept_aside_is_not_kept(
    fitted: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "judge", lambda runs, next_use: (fitted, 0.5))
    learnt, reason = fit_next_use(*told(0, telling=False), lambda what, done, total: None)
    assert (learnt is not None) == kept
    assert kept or f"would hit {fitted:.3f} by it and hits 0.500 without" in reason


def test_it_is_judged_by_what_it_hits() -> None:
    """On uniform routing of which nothing tells, what was fitted to another is worth nothing."""
    trace, found = told(0, telling=True)
    learnt, _ = fit_next_use(trace, found, lambda what, done, total: None)
    other, _ = told(1, telling=False)
    assert learnt is not None
    assert other.scored is not None
    fitted, learning = judge([Run.of(other, other.scored)], learnt)
    assert abs(fitted - learning) < 0.03  # the duel sees to that
    assert abs(learning - sum(CAPACITIES) / len(CAPACITIES)) < 0.03


@pytest.mark.parametrize("which", ["sizes", "gate"])
def test_without_routers_there_is_a_reason(which: str) -> None:
    trace, found = told(0, telling=True)
    reason = "its router follows no rule"
    other = FoundGate(None, None, reason)
    if which == "sizes":
        other = FoundGate(Gate(torch.zeros(WIDTH, HIDDEN + 1), RouterRule(top_k=1)), None)
        reason = "its layers' routers read rows of different sizes"
    learnt, why = fit_next_use(trace, [*found[:-1], other], lambda what, done, total: None)
    assert learnt is None
    assert why == reason


def test_how_soon_counts_visits_of_the_layer() -> None:
    asked = np.zeros((4, 1, 2), bool)
    asked[2, 0, 0] = asked[:, 0, 1] = True
    soon = Run(asked, [], np.zeros((4, 1), np.float16)).soon()
    np.testing.assert_allclose(soon[:3, 0, 0], [0.85**2, 0.85, 1])
    np.testing.assert_allclose(soon[:4, 0, 1], 1)
    np.testing.assert_allclose(soon[3, 0, 0], 0.85 * 0.25)  # nothing is known: the mean
