"""Prometheus metrics of one server.

`Metrics` counts requests and tokens in a registry of its own. Everything else is read from
`MoE.stats`, `Engine.status` and the occupancy whenever Prometheus asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from routing import LOADED_FOR

Readings = Mapping[str, Mapping[str, Any]]
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Metrics:
    """All metrics of one server.

    Args:
        read: returns ``stats`` (`MoE.stats`), ``engine`` (`Engine.status`) and ``occupancy``;
            each is empty before the model is loaded.
    """

    def __init__(self, read: Callable[[], Readings]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moe_http_requests",
            "Requests answered, by route and HTTP status (499: the client went away)",
            ["route", "status"],
            registry=self.registry,
        )
        self.connections_closed = Counter(
            "moe_connections_closed",
            "Connections that had to go: silent ones that gave way, and new ones that were refused",
            ["why"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("moe_prompt_tokens", "Prompt tokens accepted")
        self.new_tokens = self._counter("moe_generated_tokens", "Tokens generated")
        self.timeouts = self._counter("moe_requests_timed_out", "Requests whose time was up")
        self.first_token = self._histogram(
            "moe_time_to_first_token_seconds", "From the request to its first token"
        )
        self.between_tokens = self._histogram(
            "moe_inter_token_seconds", "Between two tokens of a sequence"
        )
        self.waiting = self._gauge("moe_requests_waiting", "Requests without a first token yet")
        self.running = self._gauge("moe_requests_running", "Requests that are being answered")
        self.registry.register(_Readings(read))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)


class TokenClock:
    """Measures TTFT and the times between tokens of one request, which begins now.

    Attributes:
        first_s: seconds to the first token; None before it.
        decode_s: seconds from the first token to the last one.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self.first_s: float | None = None
        self.decode_s = 0.0
        self._last: dict[tuple[int, int], float] = {}

    def tick(self, prompt: int, sample: int) -> None:
        """Count a new token of one of the request's sequences."""
        now = time.perf_counter()
        self._metrics.new_tokens.inc()
        if self.first_s is None:
            self.first_s = now - self._start
            self._metrics.first_token.observe(self.first_s)
        elif (prompt, sample) in self._last:
            self._metrics.between_tokens.observe(now - self._last[prompt, sample])
        self._last[prompt, sample] = now
        self.decode_s = now - self._start - self.first_s


class _Readings(Collector):
    """The metrics that are read only when Prometheus asks."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        readings = self._read()
        yield from _experts(readings["stats"])
        yield from _offload(readings["stats"].get("offload"))
        yield from speculation_metrics(readings["stats"].get("speculation"))
        yield from rank_metrics(readings["stats"].get("parallel"))
        yield from _prefixes(readings["engine"].get("prefixes") or {})
        yield from _images(readings["stats"].get("images"))
        for name, text, key in (
            ("moe_prompts_waiting", "Prompts in the engine's queue", "waiting_prompts"),
            ("moe_prompt_tokens_waiting", "Their tokens that are not read yet", "waiting_tokens"),
            ("moe_sequences_running", "Sequences that are decoded", "running_sequences"),
            ("moe_kv_tokens", "Tokens whose keys and values requests hold", "kv_tokens"),
        ):
            yield GaugeMetricFamily(name, text, value=readings["occupancy"].get(key, 0))
        limit = readings["engine"].get("kv_tokens_limit")
        text = "Most tokens whose keys and values may be held"
        yield GaugeMetricFamily("moe_kv_tokens_limit", text, value=limit or math.inf)


def _experts(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Bytes and loads of experts by phase (`routing.LoadedFor`)."""
    for name, text, key in (
        ("moe_expert_bytes_read", "Bytes of the distinct experts of every step", "bytes_read"),
        ("moe_expert_loads", "Distinct experts of every layer and step", "loads"),
    ):
        family = CounterMetricFamily(name, text, labels=["phase"])
        by_phase = stats.get(f"expert_{key}_by", {})
        for phase in LOADED_FOR:
            family.add_metric([phase], by_phase.get(phase, 0))
        yield family


def _offload(offload: Mapping[str, Any] | None) -> Iterator[Metric]:
    """The expert cache; nothing if all experts are in memory."""
    if offload is None:
        return
    for name, text, key in (
        ("moe_expert_cache_hits", "Experts that a layer asked for and were in memory", "hits"),
        ("moe_expert_cache_misses", "Experts that a layer had to wait for", "misses"),
        ("moe_expert_prefixes", "Experts computed with a prefix of their bits", "prefixes"),
        ("moe_expert_prefixes_refined", "Prefixes that had to be read again, whole", "refined"),
        ("moe_expert_cache_evictions", "Experts that gave their slot to others", "evictions"),
        ("moe_offload_prefetches", "Reads begun for layers to come", "prefetches"),
        ("moe_offload_prefetches_cancelled", "Those taken back in time", "cancelled"),
        ("moe_offload_read_failures", "Reads that failed", "failures"),
        ("moe_offload_stall_seconds", "Time that steps waited for experts", "stall_seconds"),
    ):
        yield CounterMetricFamily(name, text, value=offload[key])
    text = "Bytes of experts brought to be computed with: why, and prefetched ones by their use"
    family = CounterMetricFamily("moe_offload_bytes", text, labels=["cause"])
    for cause in ("demand", "streamed", "useful", "wasted", "restored"):
        family.add_metric([cause], offload[f"{cause}_bytes"])
    yield family
    yield from _tiers(offload["tiers"])
    for name, text, key in (
        ("moe_expert_cache_hit_ratio", "Share of hits since the start", "hit_ratio"),
        ("moe_expert_cache_slots", "Experts that fit into memory", "slots"),
        ("moe_expert_slot_bytes", "Bytes of one expert, on average", "expert_bytes"),
    ):
        yield GaugeMetricFamily(name, text, value=offload[key])


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Each memory that holds experts, beginning with the device's."""
    for name, text, key in (
        ("moe_expert_tier_hits", "Experts asked of a tier that were there", "hits"),
        ("moe_expert_tier_misses", "Experts asked of a tier that it had to bring", "misses"),
        (
            "moe_expert_tier_bytes",
            "Bytes brought to a tier from the next, or from disk",
            "bytes_in",
        ),
        ("moe_expert_tier_stall_seconds", "Time for which a tier was waited for", "stall_seconds"),
    ):
        family = CounterMetricFamily(name, text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier["name"]], tier[key])
        yield family
    slots = GaugeMetricFamily(
        "moe_expert_tier_slots", "Experts a tier has room for", labels=["tier"]
    )
    for tier in tiers:
        slots.add_metric([tier["name"]], tier["slots"])
    yield slots


def _prefixes(prefixes: Mapping[str, int]) -> Iterator[Metric]:
    for name, text, key in (
        ("moe_prefix_asked_tokens", "Prompt tokens looked up", "asked_tokens"),
        ("moe_prefix_hit_tokens", "Prompt tokens that were known already", "hit_tokens"),
        ("moe_prefix_evictions", "Known prefixes given up", "evictions"),
    ):
        yield CounterMetricFamily(name, text, value=prefixes.get(key, 0))
    held = prefixes.get("held_tokens", 0)
    yield GaugeMetricFamily("moe_prefix_tokens", "Tokens of known prefixes held", value=held)


def _images(images: Mapping[str, int] | None) -> Iterator[Metric]:
    """Images of prompts; nothing if the model reads none."""
    if images is None:
        return
    for name, text, key in (
        ("moe_images_encoded", "Images of prompts that a tower encoded", "encoded"),
        ("moe_images_reused", "Images whose rows were known already", "reused"),
    ):
        yield CounterMetricFamily(name, text, value=images[key])
    text = "Bytes of known rows of images"
    yield GaugeMetricFamily("moe_image_bytes", text, value=images["kept_bytes"])


def rank_metrics(figures: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Load and traffic of each rank; nothing with one rank, or before the first step.

    After a rank is lost, the others count from 0 again.
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


def speculation_metrics(figures: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Drafts and their acceptance; nothing if no tokens are drafted."""
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
        "moe_speculation_gain", "Recent speed over that of plain decoding", labels=["how"]
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
