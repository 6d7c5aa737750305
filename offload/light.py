"""Light experts: those whose part in a result is so small that a prefix of their bits may do."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from routing.routing import UNUSED


def light_experts(ids_TK: Tensor, weights_TK: Tensor, share: float) -> list[int]:
    """Experts that are light to every token that asks for them, ascending.

    A token's heaviest experts that have ``share`` of its router weight together are heavy, and
    those behind them light: the rule of HOBBIT (arXiv 2411.01433). Of equal weights the one in the
    earlier slot counts as heavier.

    Args:
        ids_TK: on the CPU.
        share: in [0, 1]; at 0 all are light, at 1 none but those without weight.
    """
    ids = ids_TK.numpy()
    weights = np.where(ids == UNUSED, 0.0, np.abs(weights_TK.double().cpu().numpy()))
    order = np.argsort(-weights, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    weights = np.take_along_axis(weights, order, axis=1)
    before = np.cumsum(weights, axis=1) - weights
    heavy = before < share * weights.sum(axis=1, keepdims=True)
    light: list[int] = np.setdiff1d(ids[~heavy], np.append(ids[heavy], UNUSED)).tolist()
    return light
