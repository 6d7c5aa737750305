"""How much of a model's routing each way of guessing foretells, for `benchmarks.routers`.

Without any training but counting: a table by token, popularity, the layer's gate on what the layer
before has read (look-ahead), and on what enters the layer, before its attention.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from moe import MoE
from moe.calibrate.gates import FoundGate, find_gates
from moe.calibrate.trace import Trace
from moe.tracing.tokens import table_recall
from routing.predict.base import floats
from routing.predict.gate import Gate


def recalls(model: MoE, trace: Trace) -> dict[str, float]:
    """Share of visits that are among the K named, mean over layers; only what can be asked.

    Args:
        trace: with rows of all tokens.
    """
    kinds = ("softmax", "sigmoid")
    if model.config.router not in kinds:
        return {}
    found = {f"recall_{k}": v for k, v in table_recall(trace, model.config.vocab_size).items()}
    gates, rows = find_gates(model._trunk), trace.rows
    assert rows is not None
    if model.config.router_reads == "block":
        return {**_means(found), "recall_pre_attention": 1.0}  # it is what the router itself reads
    known = [(layer, gate) for layer, gate in enumerate(gates) if gate.gate is not None]
    found["recall_lookahead"] = [
        _recall(found.gate, rows.read[layer - 1], trace.expert_ids[layer])
        for layer, found in known
        if found.gate is not None and layer
    ]
    found["recall_pre_attention"] = [
        _recall(_unnormed(found), rows.entered[layer], trace.expert_ids[layer])
        for layer, found in known
    ]
    return _means(found)


def _means(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _unnormed(found: FoundGate) -> Gate:
    """The gate for rows that are normed but not weighted yet."""
    assert found.gate is not None
    assert found.norm is not None
    return replace(found.gate, weight=found.gate.weight * found.norm)


def _recall(gate: Gate, rows: Tensor, ids: Tensor) -> float:
    named, chosen = gate.choose(floats(rows)), ids.long().numpy()
    return float((chosen[:, :, None] == named[:, None]).any(-1).mean())
