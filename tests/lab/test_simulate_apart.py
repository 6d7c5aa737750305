"""Prefill apart in the simulation of many ranks."""

from __future__ import annotations

import pytest

from benchmarks.dispatch_cost import drawn
from lab.simulation.apart import apart
from lab.simulation.costs import Network
from lab.simulation.routing import Routed


@pytest.mark.deep
def test_groups_that_only_read_shorten_the_gaps_of_others() -> None:
    routed = Routed("drawn", 64, [drawn(64 * 96 * 2, 64, 8, 0.6, 0)])
    together, split = apart(routed, [64], Network(8, 160e9, 50e9, 37e-6), fixed=0.3)
    assert split["tbt_p99"] < 0.5 * together["tbt_p99"]
    assert (together["prefill"], split["prefill"]) == (0, 1)
