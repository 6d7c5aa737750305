"""Random steps of a layer whose experts have copies on several ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Ints, Ints]:
    """Tokens of each expert in a step, and the copies of each on each rank."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    copies_ER = (rng.random((experts, ranks)) < draw(st.floats(0, 0.5))).astype(np.int64)
    copies_ER[np.arange(experts), rng.integers(ranks, size=experts)] = 1
    popularity = rng.permutation(experts) + 1.0
    tokens_E = rng.poisson(200 * popularity ** -draw(st.sampled_from((0.0, 0.5, 1.0, 2.0))))
    return tokens_E.astype(np.int64), copies_ER
