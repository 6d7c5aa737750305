"""The best that any choice among copies can do, by a linear program: too slow to serve.

Legend: E experts, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog


def optimum(loads_E: NDArray[np.float64], copies_ER: NDArray[np.int64]) -> float:
    """Least heaviest load of a rank over all ways to share each expert's load among its copies."""
    experts, ranks = np.nonzero(copies_ER)
    shares = len(experts)  # the variable behind them is the heaviest load
    above = np.zeros((copies_ER.shape[1], shares + 1))
    above[ranks, np.arange(shares)] = 1
    above[:, shares] = -1
    whole = np.zeros((len(loads_E), shares + 1))
    whole[experts, np.arange(shares)] = 1
    cost = np.eye(shares + 1)[shares]
    solved = linprog(cost, A_ub=above, b_ub=np.zeros(len(above)), A_eq=whole, b_eq=loads_E)
    return float(solved.fun)
