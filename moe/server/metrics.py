"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Metrics:
    """What is counted.

    Args:
        read_model: `MoE.stats` of the loaded model; empty before it is loaded.
    """

    def __init__(self, read_model: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moe_http_requests",
            "Requests answered, by route and HTTP status (499: the client went away)",
            ["route", "status"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("moe_prompt_tokens", "Prompt tokens accepted")
        self.new_tokens = self._counter("moe_generated_tokens", "Tokens generated")
        self.first_token = self._histogram(
            "moe_time_to_first_token_seconds", "From the request to its first token"
        )
        self.between_tokens = self._histogram(
            "moe_inter_token_seconds", "Between two tokens of a sequence"
        )
        self.waiting = self._gauge("moe_requests_waiting", "Requests without a first token yet")
        self.running = self._gauge("moe_requests_running", "Requests that are being answered")
        self.registry.register(_ExpertCollector(read_model))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)


class TokenClock:
    """Times of one request's tokens, from the moment it came in."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}

    def tick(self, prompt: int, sample: int) -> None:
        """A token of one of the request's sequences has come."""
        now = time.perf_counter()
        self._metrics.new_tokens.inc()
        if not self._last:
            self._metrics.first_token.observe(now - self._start)
        elif (prompt, sample) in self._last:
            self._metrics.between_tokens.observe(now - self._last[prompt, sample])
        self._last[prompt, sample] = now


class _ExpertCollector(Collector):
    """The model's own counters, read when somebody asks."""

    def __init__(self, read_model: Callable[[], Mapping[str, Any]]) -> None:
        self._read_model = read_model

    def collect(self) -> Iterator[Metric]:
        stats = self._read_model()
        loads = sum(layer["expert_loads"] for layer in stats.get("layers", ()))
        yield CounterMetricFamily(
            "moe_expert_bytes_read",
            "Bytes of the distinct experts of every step",
            value=stats.get("expert_bytes_read", 0),
        )
        yield CounterMetricFamily(
            "moe_expert_loads", "Distinct experts of every layer and step", value=loads
        )
