"""Compiled foresight against numpy's, and numpy's against the network and the memories it is of."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import choose_kernel
from offload.policies import ForecastPolicy
from offload.policies.base import HALF_LIVES, Heard, log_odds
from offload.policies.foresight import Foresight, Reference, new_arithmetic
from offload.policies.next_use import NextUse
from routing.predict.forecast import Floats


def some(num_experts: tuple[int, ...], hidden: int, units: int, seed: int) -> NextUse:
    """Random numbers; what stands for experts that a layer has not is 0."""
    draw = np.random.default_rng(seed)
    layers, width = len(num_experts), max(num_experts)

    def numbers(*shape: int) -> Floats:
        return draw.normal(0, 0.3, shape).astype(np.float32)

    there = np.arange(width) < np.array(num_experts)[:, None]
    context = 2 * layers * width + hidden + layers
    return NextUse(
        num_experts,
        gates=numbers(layers, width, hidden) * there[..., None],
        gate_bias=numbers(layers, width) * there,
        usual=(np.abs(numbers(layers, width)) * there).clip(0, 0.9),
        shares=numbers(len(HALF_LIVES) + 1, layers, layers),
        up=numbers(context, units),
        up_bias=numbers(units),
        down=numbers(layers, width, units),
        down_bias=numbers(layers, width),
    )


@settings(max_examples=40)
@given(
    num_experts=st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple),
    units=st.integers(1, 40),
    together=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_compiled_foresight_equals_the_reference(
    num_experts: tuple[int, ...], units: int, together: int, seed: int
) -> None:
    if choose_kernel()[0] is None:
        pytest.skip("no compiler")
    learnt, draw = some(num_experts, 6, units, seed), random.Random(seed)
    compiled, reference = new_arithmetic(learnt), Reference(learnt)
    numbers, news = np.random.default_rng(seed), []
    layers, width = learnt.usual.shape
    for call in range(60):
        layer = call % layers
        row = numbers.normal(size=6).astype(np.float32)
        scores = numbers.normal(size=num_experts[layer]) if draw.random() < 0.3 else None
        for each in (compiled, reference):
            each.hear(layer, row, scores)
        news.append((layer, sorted(draw.sample(range(num_experts[layer]), 1))))
        if len(news) == together:
            learning, discounts = (
                numbers.random(layers * width),
                0.5 + 0.5 * numbers.random((layers,)),
            )
            whole = draw.random() < 0.5
            for each in (compiled, reference):
                each.foresee(news, learning, discounts, whole=whole)
            news.clear()
            np.testing.assert_allclose(compiled.soon, reference.soon, rtol=2e-3, atol=2e-4)


def test_what_hidden_units_sum_up_is_what_the_context_gives_them() -> None:
    """After a hundred changes, without corrections, all by torch from `Heard.context`."""
    learnt, numbers = some((5, 3), 6, 16, 0), np.random.default_rng(0)
    reference, heard = Reference(learnt), Heard(learnt.usual, 6)
    learning = numbers.random(10)
    for call in range(100):
        layer = call % 2
        experts = learnt.num_experts[layer]
        row = numbers.normal(size=6).astype(np.float32)
        scores = learnt.gates[layer, :experts] @ row + learnt.gate_bias[layer, :experts]
        reference.hear(layer, row, None)
        heard.listen(layer, scores, row)
        heard.visit(layer, [call % experts])
        reference._drift[:] = 0
        reference.soon[layer] = 0  # the error, and so the correction, is known
        reference.foresee([(layer, [call % experts])], learning, np.ones(2), whole=True)
        context = torch.from_numpy(heard.context() @ learnt.up + learnt.up_bias)
        inside = torch.nn.functional.gelu(context, approximate="tanh").numpy()
        said = np.concatenate(
            [heard.memories, log_odds(learning.reshape(1, 2, 5).astype(np.float32))]
        )
        odds = np.einsum("fl,flw->lw", learnt.shares[:, layer], said)
        odds += learnt.down @ inside + learnt.down_bias
        other = 1 - layer  # its units are not corrected
        np.testing.assert_allclose(
            reference.soon[other], 1 / (1 + np.exp(-odds[other])), rtol=1e-3, atol=1e-5
        )


def test_memories_are_means_over_the_visits_of_a_layer() -> None:
    usual = np.full((2, 3), 0.2, np.float32)
    heard, asked = Heard(usual, 1), np.array([[1, 0, 0], [1, 0, 1], [0, 0, 1], [1, 0, 0]])
    for experts in asked:
        heard.visit(1, np.flatnonzero(experts).tolist())
    mean = usual[1].astype(float)
    for visit, experts in enumerate(asked):
        keep = min(0.5 ** (1 / 300), 1 - 1 / (visit + 2))
        mean = keep * mean + (1 - keep) * experts
    np.testing.assert_allclose(heard.memories[-1, 1], log_odds(mean), rtol=1e-5)
    np.testing.assert_array_equal(heard.memories[:, 0], log_odds(np.repeat(usual[:1], 5, 0)))


def test_units_that_are_asked_for_more_than_the_network_believes_are_corrected() -> None:
    learnt = some((4,), 2, 8, 3)
    foresight, row = Foresight(learnt), np.zeros(2, np.float32)
    soon = []
    for _ in range(200):
        foresight.listen(0, np.zeros(4, np.float32), row)
        foresight.visit(0, [1])
        soon.append(foresight.soon(np.full(4, 0.5), np.ones(1)).copy())
    assert soon[-1][0, 1] > 0.9
    assert all(soon[-1][0, other] < 0.2 for other in (0, 2, 3))


def test_it_speaks_of_one_sequence_only() -> None:
    foresight = Foresight(some((4,), 2, 8, 3))
    spoke = [foresight.speaks]
    for rows in (1, 3, 1, 0):
        foresight.hear(0, torch.zeros(rows, 2))
        spoke.append(foresight.speaks)
    assert spoke == [False, True, False, True, False]


def test_what_is_kept_comes_back_and_what_is_not_whole_is_refused() -> None:
    learnt = some((4, 3), 2, 8, 3)
    back = NextUse.restore(learnt.tensors(), (4, 3))
    for name, array in learnt.arrays.items():
        np.testing.assert_allclose(back.arrays[name], array, atol=1e-3)
    with pytest.raises(ValueError, match="no finite"):
        NextUse.restore(learnt.tensors(), (4, 3, 3))
    with pytest.raises(LookupError):
        NextUse.restore({k: v for k, v in learnt.tensors().items() if k != "up"}, (4, 3))
    broken = learnt.tensors()
    broken["down"][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="down of"):
        NextUse.restore(broken, (4, 3))


def test_where_several_sequences_decode_the_policy_is_as_without_a_calibration() -> None:
    learnt, draw = some((6, 6), 2, 8, 1), random.Random(0)
    calibrated, learning = ForecastPolicy(2, 6), ForecastPolicy(2, 6)
    calibrated.calibrate(learnt, lambda: 4)
    apart = 0
    for call in range(80):
        layer, rows = call % 2, 1 if 40 <= call < 60 else 3
        calibrated.hear(layer, torch.randn(rows, 2))
        units = sorted(6 * layer + expert for expert in draw.sample(range(6), 2))
        calibrated.touch(layer, units)
        learning.touch(layer, units)
        if rows == 3:
            np.testing.assert_array_equal(calibrated.values(), learning.values())
            assert calibrated.bid(3, 0.5) == learning.bid(3, 0.5)
        else:
            apart += not np.array_equal(calibrated.values(), learning.values())
    assert apart > 0
