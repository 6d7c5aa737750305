"""Ways of allotting bits keep their budget and their widths, whatever the statistics."""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from experts.compress.statistics import LayerCalibration, LayerInputs
from kernels.planes import PREFIX_BITS
from lab.compression.__main__ import averaged
from lab.compression.setup import WIDTHS
from lab.compression.ways import METHODS, allotted

pytestmark = pytest.mark.deep


EXPERTS = 16


def statistics(seed: int) -> LayerCalibration:
    """Finer widths lose less, as they do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(EXPERTS, 1, generator=generator).double() + 0.01
    loss = 4.0 ** -torch.tensor(WIDTHS, dtype=torch.float64)
    inputs = LayerInputs(torch.zeros(1, 4), torch.zeros(1, 2).int(), torch.zeros(1, 2))
    shares = torch.rand(3, EXPERTS, generator=generator).double()
    frequency, weight, norm = shares
    return LayerCalibration(inputs, frequency, weight, norm, sizes * loss, loss * (seed + 1))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bits", [1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0])
def test_a_budget_is_kept_and_spent(name: str, bits: float) -> None:
    method = METHODS[name]
    chosen = allotted(method, bits, [statistics(0), statistics(1)], 0)
    if chosen is None:
        assert "also" in name
        return
    every = [width for layer in chosen for width in layer]
    assert len(every) == 2 * EXPERTS
    assert set(every) <= {*PREFIX_BITS, *method.also, *([1] if bits < 2 else [])}
    scales = 0.25 * every.count(0)  # which experts of no bits do not have
    assert bits - 0.3 <= mean(every) <= bits + scales + 1e-9
    if method.by_layer:
        assert all(mean(layer) <= bits for layer in chosen)


def test_means_and_spreads() -> None:
    point = {"bits": 2.0, "used": 2.0, "bits_per_byte": 1.0, "agreement": 1.0, "routing": 1.0}
    points = [
        {"method": "ours", **point, "worse_percent": worse, "kl": 0.1, "routing_by_layer": [1.0]}
        for worse in (1.0, 2.0, 3.0)
    ]
    (found,) = averaged(points, "method")
    assert (found["worse_percent"], found["worse_percent_spread"]) == (2.0, 1.0)
    assert (found["kl_spread"], found["seeds"]) == (0.0, 3)
