"""A layer quantised on its inputs: what it loses, and what is rounded plainly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from experts.compress.allocation import predicted_damage
from experts.compress.gptq import (
    MIN_ROWS,
    output_errors,
    quantize_at_each_width,
    quantize_calibrated,
    too_few,
)
from experts.compress.statistics import (
    LayerCalibration,
    LayerInputs,
    StatisticsError,
    moments,
    usage,
)
from experts.weights import dequantize_experts, quantize_experts
from kernels import ExpertWeights, QuantizedExperts, experts_forward
from kernels.planes import PREFIX_BITS

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K = 4, 64, 32, 900, 2


def concatenated(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return silu(gate) * up


def interleaved(rows: Tensor) -> Tensor:
    return silu(rows[..., ::2]) * rows[..., 1::2]


@pytest.fixture(params=[concatenated, interleaved])
def layer(request: pytest.FixtureRequest) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    return ExpertWeights(
        torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) / 8,
        torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / 5,
        request.param,
        gate_up_bias_EG=torch.randn(EXPERTS, 2 * WIDTH, generator=generator) / 9,
        down_bias_EH=torch.randn(EXPERTS, HIDDEN, generator=generator) / 9,
    )


@pytest.fixture
def inputs() -> LayerInputs:
    """Inputs that move together; the last expert is hardly ever chosen."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator) / 8
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) @ mixing
    ids = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(-1)[:, :TOP_K]
    ids[:5, 0] = EXPERTS - 1
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return LayerInputs(hidden, ids.to(torch.int16), weights)


def lost_by(layer: ExpertWeights, quantized: QuantizedExperts, inputs: LayerInputs) -> Tensor:
    return output_errors(layer, [dequantize_experts(quantized)], inputs)[:, 0]


def forward(layer: ExpertWeights, inputs: LayerInputs) -> Tensor:
    return experts_forward(inputs.hidden_TH, inputs.expert_ids_TK.long(), inputs.weights_TK, layer)


def test_errors_are_those_of_the_layers_output(layer: ExpertWeights, inputs: LayerInputs) -> None:
    """Each expert replaced alone, in the whole layer's forward."""
    quantized = quantize_calibrated(layer, inputs, [2] * EXPERTS, nested=True)
    coarse, exact = dequantize_experts(quantized), forward(layer, inputs)
    for expert, error in enumerate(lost_by(layer, quantized, inputs)):
        first, second = layer.gate_up_EGH.clone(), layer.down_EHF.clone()
        first[expert], second[expert] = coarse.gate_up_EGH[expert], coarse.down_EHF[expert]
        alone = forward(replace(layer, gate_up_EGH=first, down_EHF=second), inputs)
        assert float(error) == pytest.approx(float((alone - exact).square().sum()), rel=1e-3)


@pytest.mark.parametrize("nested", [False, True])
def test_it_loses_less_than_rounding(
    layer: ExpertWeights, inputs: LayerInputs, nested: bool
) -> None:
    compensated = quantize_calibrated(layer, inputs, [2] * EXPERTS, nested=nested)
    plain = quantize_experts(layer, bits=2)
    lost, lost_plain = (lost_by(layer, q, inputs) for q in (compensated, plain))
    assert (lost[:-1] < 0.9 * lost_plain[:-1]).all()
    assert lost[-1] == lost_plain[-1]  # too few rows


def test_what_is_made_for_its_own_bits_loses_less_there(
    layer: ExpertWeights, inputs: LayerInputs
) -> None:
    for bits in (4, 8):
        own, nested = (
            quantize_calibrated(layer, inputs, [bits] * EXPERTS, nested=nested)
            for nested in (False, True)
        )
        lost = [lost_by(layer, q, inputs).sum() for q in (own, nested)]
        lost_coarse = [lost_by(layer, q.at_most(2), inputs).sum() for q in (own, nested)]
        assert lost[0] < lost[1]
        assert lost_coarse[0] > lost_coarse[1]


def test_experts_keep_their_own_bits_and_prefixes(
    layer: ExpertWeights, inputs: LayerInputs
) -> None:
    bits = [2, 8, 4, 2]
    mixed = quantize_calibrated(layer, inputs, bits, nested=False)
    assert [mixed.bits_of(expert) for expert in range(EXPERTS)] == bits
    for expert, own in enumerate(bits):
        alone = quantize_calibrated(layer, inputs, [own] * EXPERTS, nested=False)
        pairs = zip(mixed.planes[expert], alone.planes[expert], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_all_widths_at_once_are_each_alone(layer: ExpertWeights, inputs: LayerInputs) -> None:
    for bits, found in zip(PREFIX_BITS, quantize_at_each_width(layer, inputs, 32), strict=True):
        alone = quantize_calibrated(layer, inputs, [bits] * EXPERTS, 32, nested=False)
        for expert in range(EXPERTS):
            pairs = zip(found.planes[expert], alone.planes[expert], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_some_experts_of_the_inputs(layer: ExpertWeights, inputs: LayerInputs) -> None:
    """What another order and absent experts leave is the same rows with the same weights."""
    some = inputs.of_experts([2, 0])
    assert torch.equal(some.counts(2), inputs.counts(EXPERTS)[[2, 0]])
    for new, old in enumerate((2, 0)):
        pairs = zip(some.rows_of(new), inputs.rows_of(old), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_eight_bits_are_close(layer: ExpertWeights, inputs: LayerInputs) -> None:
    finest = quantize_calibrated(layer, inputs, [8] * EXPERTS, nested=False)
    close = experts_forward(
        inputs.hidden_TH, inputs.expert_ids_TK.long(), inputs.weights_TK, finest
    )
    exact = forward(layer, inputs)
    assert (close - exact).square().mean() < 1e-3 * exact.square().mean()


def test_experts_with_few_rows_are_listed(inputs: LayerInputs) -> None:
    assert too_few(inputs, EXPERTS) == [EXPERTS - 1]
    assert int(inputs.counts(EXPERTS)[:-1].min()) >= MIN_ROWS


def test_moments_count_rows_by_their_squared_weight(
    layer: ExpertWeights, inputs: LayerInputs
) -> None:
    first, second = moments(inputs, layer, [1, 3])
    chosen = (inputs.expert_ids_TK == 1).double() * inputs.weights_TK.double()
    weighted = inputs.hidden_TH.double() * chosen.square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(first[0].double(), weighted.T @ weighted, rtol=1e-4, atol=1e-2)
    assert second.shape == (2, WIDTH, WIDTH)


@pytest.fixture
def statistics(layer: ExpertWeights, inputs: LayerInputs) -> LayerCalibration:
    finest = quantize_calibrated(layer, inputs, [8] * EXPERTS, nested=True)
    errors = [lost_by(layer, finest.at_most(bits), inputs) for bits in PREFIX_BITS]
    losses = torch.tensor([0.5, 0.2, 0.1, 0.01], dtype=torch.float64)
    return LayerCalibration(inputs, *usage(inputs, EXPERTS), torch.stack(errors, 1), losses)


def test_damage(statistics: LayerCalibration) -> None:
    damage_EW = predicted_damage([statistics] * 2)
    assert damage_EW.shape == (2 * EXPERTS, 4)
    measured = torch.from_numpy(damage_EW)[:EXPERTS]
    torch.testing.assert_close(measured.sum(0), statistics.kl_W)  # shared out, nothing lost
    assert (measured[:, 0] > measured[:, 1]).all()
    assert statistics.frequency_E.sum() == pytest.approx(TOP_K)


def test_statistics_on_disk(statistics: LayerCalibration, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    statistics.save(path, "this")
    loaded = LayerCalibration.load(path, "this")
    assert torch.equal(loaded.error_EW, statistics.error_EW)
    assert torch.equal(loaded.inputs.hidden_TH, statistics.inputs.hidden_TH)
    with pytest.raises(StatisticsError, match="belongs to another calibration"):
        LayerCalibration.load(path, "that")
    with pytest.raises(StatisticsError, match="cannot be used: No such file"):
        LayerCalibration.load(tmp_path / "none")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StatisticsError, match="cannot be used"):
        LayerCalibration.load(path)
    replace(statistics, kl_W=torch.tensor([1.0, torch.nan, 1.0, 1.0])).save(path, "this")
    with pytest.raises(StatisticsError, match="not finite"):
        LayerCalibration.load(path)
