"""Prometheus metrics of several ranks, from `MoE.stats`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def rank_metrics(figures: Mapping[str, Any] | None) -> Iterator[Metric]:
    """What each rank has served and sent; nothing where there is one, or before their first step.

    Counters begin anew where ranks go on without one that they have lost.
    """
    ranks = [] if figures is None else [rank for rank in figures["ranks"] if rank is not None]
    if not ranks:
        return
    for name, text, key in (
        ("moe_rank_tokens", "Tokens that a rank brought, of all layers", "tokens"),
        ("moe_rank_served", "Visits of experts that a rank served: its load", "served"),
        ("moe_rank_wait_seconds", "Time for which a rank waited for others", "seconds"),
    ):
        family = CounterMetricFamily(name, text, labels=["rank"])
        for rank in ranks:
            family.add_metric([str(rank["rank"])], rank[key])
        yield family
    text = "Bytes that a rank sent to others: rows, results, and their ids and sizes"
    sent = CounterMetricFamily("moe_rank_bytes", text, labels=["rank", "what"])
    for rank in ranks:
        for what, key in (("rows", "bytes_out"), ("results", "bytes_back"), ("ids", "meta_bytes")):
            sent.add_metric([str(rank["rank"]), what], rank[key])
    yield sent
    served = [rank["served"] for rank in ranks]
    yield GaugeMetricFamily(
        "moe_rank_imbalance",
        "Load of the busiest rank over the mean, since the ranks came together",
        value=max(served) * len(served) / max(sum(served), 1),
    )
