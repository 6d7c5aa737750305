"""Prometheus metrics of speculation, from `MoE.stats`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def speculation_metrics(figures: Mapping[str, Any] | None) -> Iterator[Metric]:
    """What drafts came to; nothing where none are made."""
    if figures is None:
        return
    for name, text, key in (
        ("moe_speculation_steps", "Decode steps", "steps"),
        ("moe_speculation_tokens", "Tokens that decode steps brought", "tokens"),
        ("moe_speculation_rows", "Rows that decode steps have read", "rows"),
        ("moe_speculation_draft_seconds", "Time that went into drafts", "draft_seconds"),
        ("moe_speculation_verify_seconds", "Time of the model's own passes", "verify_seconds"),
    ):
        yield CounterMetricFamily(name, text, value=figures[key])
    depths = CounterMetricFamily(
        "moe_speculation_depth", "Sequences of steps by drafted tokens verified", labels=["depth"]
    )
    for depth, count in figures["depths"].items():
        depths.add_metric([depth], count)
    yield depths
    yield from _by_mode(figures["modes"])
    if figures["control"] is not None:
        yield from _control(figures["control"])


def _by_mode(modes: Mapping[str, Any]) -> Iterator[Metric]:
    labels = ["mode", "position"]
    verified = CounterMetricFamily(
        "moe_draft_verified_tokens", "Drafted tokens that the model has read", labels=labels
    )
    accepted = CounterMetricFamily(
        "moe_draft_accepted_tokens", "Those that it would have chosen itself", labels=labels
    )
    read = CounterMetricFamily(
        "moe_draft_expert_bytes", "Bytes of experts that drafting has read", labels=["mode"]
    )
    for mode, record in modes.items():
        read.add_metric([mode], record["draft_bytes"])
        for position, counts in enumerate(record["by_position"], 1):
            verified.add_metric([mode, str(position)], counts["verified"])
            accepted.add_metric([mode, str(position)], counts["accepted"])
    yield from (verified, accepted, read)


def _control(control: Mapping[str, Any]) -> Iterator[Metric]:
    gain = GaugeMetricFamily(
        "moe_speculation_gain", "Speed of late over that of plain decoding", labels=["how"]
    )
    efficiency = GaugeMetricFamily(
        "moe_speculation_target_efficiency",
        "Time of a plain pass over that of one that verifies",
        labels=["how"],
    )
    for how in ("predicted", "measured"):
        if control[f"{how}_gain"] is not None:
            gain.add_metric([how], control[f"{how}_gain"])
        if control["target_efficiency"][how] is not None:
            efficiency.add_metric([how], control["target_efficiency"][how])
    yield from (gain, efficiency)
    if control["prediction_error"] is not None:
        name, text = "moe_speculation_prediction_error", "Median relative error of step times"
        yield GaugeMetricFamily(name, text, value=control["prediction_error"])
