"""What the simulator says of systems whose figures are published, beside those figures.

- DeepEP's low-latency kernels (github.com/deepseek-ai/DeepEP, docs/legacy.md): H800 with NVLink in
  nodes of 8 and a 400 Gb/s card each; 128 tokens a rank, hidden 7168, top-8 of 256; 8 bits out with
  a scale for 128 values, 16 bits back; a row for each slot. Latency and bandwidths are fitted to
  three of its twelve figures (dispatch at 8, 16 and 256 ranks); nine are predicted.
- CloudMatrix384 (arXiv 2506.12708): decode steps of DeepSeek-R1 on 320 dies,
  one expert each, 61 layers of 1,260 us with one drafted token, of which 70 % are accepted. The
  time of a token (49.4 ms at 96 sequences an NPU) is predicted. So are the gains by two
  micro-batches at 64 and 128 sequences, once the share of a layer's computing that does not shrink
  with the batch has been fitted to the gain at 96.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import brentq

from benchmarks.dispatch_cost import drawn
from experts.placement import eplb, linear
from lab.simulation.costs import Costs, Network
from lab.simulation.simulator import Lane, lanes_of, simulate
from moe.commands.plan.ranks import StepTraffic, step_traffic

HIDDEN, EXPERTS, TOP_K, TOKENS = 7168, 256, 8, 128
OUT_BYTES, BACK_BYTES = HIDDEN + HIDDEN / 128 * 4, 2.0 * HIDDEN
DEEP_EP = {
    "dispatch": {8: 77, 16: 118, 32: 155, 64: 173, 128: 192, 256: 194},
    "combine": {8: 114, 16: 195, 32: 273, 64: 314, 128: 369, 256: 360},
}
"""Microseconds by ranks."""
FITTED = (8, 16, 256)

DIES, LAYERS, LAYER_S, ACCEPTED, TOKEN_S = 320, 61, 1260e-6, 0.70, 49.4e-3
DISPATCH_S, DIE_RATE = 152e-6, 54e9
"""Of a dispatch at 256 ranks; a combine is taken to last as long (118 and 116 us at 8 ranks)."""
GAINS = {64: 0.058, 96: 0.094, 128: 0.069}
"""By two micro-batches, by sequences of an NPU, which is two dies."""
SIMULATED_LAYERS = 6
"""As all layers are alike, so many stand for them."""


def deep_ep() -> dict[str, Any]:
    """Predicted and published microseconds, and the errors of what was not fitted."""
    bytes_by = {ranks: _slots(ranks) for ranks in DEEP_EP["dispatch"]}
    times = {ranks: DEEP_EP["dispatch"][ranks] * 1e-6 for ranks in FITTED}
    # Far bytes alone limit 16 and 256 ranks, near ones 8: three equations, three unknowns.
    far = {ranks: _most(bytes_by[ranks], near=False) * OUT_BYTES for ranks in FITTED[1:]}
    rate = (far[256] - far[16]) / (times[256] - times[16])
    latency = times[16] - far[16] / rate
    near_rate = _most(bytes_by[8], near=True) * OUT_BYTES / (times[8] - latency)
    network = Network(8, near_rate, rate, latency)
    predicted: dict[str, dict[int, float]] = {"dispatch": {}, "combine": {}}
    for ranks, step in bytes_by.items():
        start_R = np.zeros(ranks)
        for way, sent_RR in (
            ("dispatch", step.slots_RR.astype(float) * OUT_BYTES),
            ("combine", step.slots_RR.T.astype(float) * BACK_BYTES),
        ):
            predicted[way][ranks] = float(network.exchange(start_R, sent_RR).max() * 1e6)
    errors = [
        predicted[way][ranks] / DEEP_EP[way][ranks] - 1
        for way, ranks in ((w, r) for w in DEEP_EP for r in DEEP_EP[w])
        if way == "combine" or ranks not in FITTED
    ]
    return {
        "predicted_us": predicted,
        "published_us": DEEP_EP,
        "fitted": {
            "near_gb_s": near_rate / 1e9,
            "far_gb_s": rate / 1e9,
            "latency_us": latency * 1e6,
        },
        "mean_error": float(np.mean(np.abs(errors))),
        "worst_error": max(errors, key=abs),
    }


def _slots(ranks: int) -> StepTraffic:
    ids = drawn(TOKENS * ranks, EXPERTS, TOP_K, 0.0, seed=ranks)
    source = np.repeat(np.arange(ranks), TOKENS)
    return step_traffic(ids, source, linear(EXPERTS, EXPERTS, ranks))


def _most(step: StepTraffic, *, near: bool) -> float:
    """Slots that the busiest rank sends or takes, to its node or beyond it."""
    ranks = len(step.slots_RR)
    node = np.arange(ranks) // 8
    wanted_RR = (node[:, None] == node) == near
    away_RR = step.slots_RR * wanted_RR * ~np.eye(ranks, dtype=bool)
    return float(max(away_RR.sum(0).max(), away_RR.sum(1).max()))


def cloud_matrix() -> dict[str, Any]:
    """Predicted and published time of a token and gains by micro-batches."""
    lanes_by = {(npu, count): _die_lanes(npu, count) for npu in GAINS for count in (1, 2)}

    def seconds(npu: int, count: int, fixed: float) -> float:
        costs, network = die(fixed)
        lanes = lanes_by[npu, count]
        return simulate(lanes, SIMULATED_LAYERS, costs, network).seconds / SIMULATED_LAYERS

    def gain(npu: int, fixed: float) -> float:
        return seconds(npu, 1, fixed) / seconds(npu, 2, fixed) - 1

    fixed = float(brentq(lambda share: gain(96, share) - GAINS[96], 0.0, 1.0, xtol=1e-3))
    one = simulate(lanes_by[96, 1], SIMULATED_LAYERS, *die(fixed))
    token_s = LAYERS * one.seconds / SIMULATED_LAYERS / (1 + ACCEPTED)
    return {
        "token_ms": {"predicted": token_s * 1e3, "published": TOKEN_S * 1e3},
        "token_error": token_s / TOKEN_S - 1,
        "fixed_share": fixed,
        "imbalance": one.imbalance,
        "gains": {npu: {"predicted": gain(npu, fixed), "published": GAINS[npu]} for npu in GAINS},
    }


def _die_lanes(npu: int, count: int) -> list[Lane]:
    """Of as many sequences an NPU, two tokens each; a shared expert has copies on many dies."""
    tokens = DIES * npu // 2 * 2
    layers = []
    for seed in range(2):
        routed = drawn(tokens, EXPERTS, TOP_K, 0.3, seed)
        layers.append(np.concatenate([routed, np.full((tokens, 1), EXPERTS)], axis=1))
    loads = [np.bincount(ids.reshape(-1), minlength=EXPERTS + 1).astype(float) for ids in layers]
    return lanes_of(layers, [eplb(loads_E, DIES, DIES) for loads_E in loads], count)


def die(fixed: float, experts: float = 1.0) -> tuple[Costs, Network]:
    """Costs at 96 sequences an NPU, where two exchanges and the computing make up a layer.

    Args:
        fixed: share of the computing that does not shrink with the batch.
        experts: of a rank, among which the reading of one is spread.
    """
    tokens = 96
    sent_s = tokens * (TOP_K + 1) * OUT_BYTES / DIE_RATE
    half_s = (LAYER_S - 2 * DISPATCH_S) / 2  # attention, and experts
    costs = Costs(
        attention_s=fixed * half_s,
        attention_token_s=(1 - fixed) * half_s / tokens,
        expert_s=fixed * half_s / max(experts, 1.0),
        slot_s=(1 - fixed) * half_s / (tokens * (TOP_K + 1)),
        out_bytes=OUT_BYTES,
        back_bytes=OUT_BYTES,
    )
    return costs, Network(DIES, DIE_RATE, DIE_RATE, DISPATCH_S - sent_s)
