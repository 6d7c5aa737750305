"""What a controller knows, as plain figures for statistics and metrics."""

from __future__ import annotations

from typing import Any

from moe.speculate.control.acceptance import Acceptance
from moe.speculate.control.account import Account
from moe.speculate.control.search import Plan
from moe.speculate.control.steps import StepCosts


def control_figures(
    best: Plan | None, costs: StepCosts, account: Account, acceptance: Acceptance
) -> dict[str, Any]:
    """For JSON; what is predicted is None before the first step.

    Args:
        best: the plan that was best at the last search.
    """
    predicted, errors = None, costs.errors.medians()
    if best is not None:
        batch = len(best.choices)
        predicted = best.option.goodput * costs.verify(batch, batch) / batch
    return {
        "predicted_gain": predicted,
        "measured_gain": account.gain,
        "target_efficiency": costs.efficiency.as_dict(),
        "prediction_error": errors["step"],
        "prediction_error_together": errors["together"],
        "trials": account.trials,
        "mode": None if best is None or best.mode is None else best.mode.name,
        "depth": 0 if best is None else best.way[1],
        "expected_acceptance": {
            mode.name: list(rates.rates(acceptance.step))
            for mode, rates in acceptance.positions.items()
        },
    }
