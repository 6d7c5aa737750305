"""How even loads are, and the most even that any choice among copies can make them, by programs too
slow to serve with: a linear one, which may cut tokens, and the same with whole tokens.

Legend: E experts, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp


def optimum(
    loads_E: NDArray[np.float64], copies_ER: NDArray[np.int64], *, whole: bool = False
) -> float:
    """Least heaviest load of a rank over all ways to share each expert's load among its copies.

    Args:
        whole: each rank's part of an expert must be an integer.
    """
    experts, ranks = np.nonzero(copies_ER)
    shares = len(experts)  # the variable behind them is the heaviest load
    above = np.zeros((copies_ER.shape[1], shares + 1))
    above[ranks, np.arange(shares)] = 1
    above[:, shares] = -1
    all_of = np.zeros((len(loads_E), shares + 1))
    all_of[experts, np.arange(shares)] = 1
    solved = milp(
        np.eye(shares + 1)[shares],
        integrality=np.full(shares + 1, int(whole)),
        bounds=Bounds(0, np.inf),
        constraints=[LinearConstraint(above, ub=0), LinearConstraint(all_of, loads_E, loads_E)],
    )
    assert solved.success, solved.message
    return float(solved.fun)


def imbalance(loads_SR: NDArray[np.float64]) -> NDArray[np.float64]:
    """``(S,)``: the heaviest rank's load over the mean; 1 where a step has none."""
    mean_S = loads_SR.mean(1)
    return np.divide(loads_SR.max(1), mean_S, out=np.ones_like(mean_S), where=mean_S > 0)
