"""OpenTelemetry traces of requests (`server.traces`; the packages of the extra ``telemetry``).

    telemetry = make_telemetry()                          # as OTEL_* variables say
    trace = telemetry.begin(headers, "/v1/completions", "MODEL", request_id)
    ...
    trace.end(None, groups)                               # its spans are made here, and sent

A trace has the request's span, in the caller's trace if it sent a W3C ``traceparent``, and below it
``queue``, ``prefill`` and ``decode``; below these an ``expert wait`` for every step that waited for
experts. The engine only notes times: spans are made when a request has ended. They hold figures,
and no text and no token of any client.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.trace import Span, SpanKind, StatusCode

from moe import __version__
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import ProfileError
from moe.fair_pool import starts

MAX_WAITS = 64
"""Most spans ``expert wait`` of a request, the longest ones; attributes count all of them."""
_KEPT_WAITS = 8192  # steps that waited, of all requests
_CLOSE_TIMEOUT_S = 2.0


class ExpertWait(NamedTuple):
    """A step that waited for experts: when it began and ended, in Unix nanoseconds, and for how
    many seconds of that it waited."""

    start_ns: int
    end_ns: int
    seconds: float


class Telemetry:
    """Makes the traces of one server. Lives in the event loop.

    Args:
        provider: makes spans and sends them; this object closes it.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("moe", __version__)
        self._waits: deque[ExpertWait] = deque(maxlen=_KEPT_WAITS)

    def begin(
        self, headers: Mapping[str, str], route: str, model: str, request_id: str
    ) -> RequestTrace:
        """The trace of a request that arrives now; headers may name its parent."""
        span = self.tracer.start_span(
            f"POST {route}",
            propagate.extract(headers),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": route,
                "gen_ai.request.model": model,
                "moe.request_id": request_id,
            },
        )
        return RequestTrace(self, span)

    def on_wait(self, wait: tuple[int, int, float]) -> None:
        """A step has waited for experts; see `ExpertWait`."""
        self._waits.append(ExpertWait(*wait))

    def waits(self, start_ns: int, end_ns: int) -> list[ExpertWait]:
        """Steps that ended in this time and had waited, in order; the oldest are forgotten."""
        return [wait for wait in self._waits if start_ns < wait.end_ns <= end_ns]

    def close(self) -> None:
        """Send what is left. A collector that does not answer is not waited for long."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        if starts(closing):
            closing.join(_CLOSE_TIMEOUT_S)


class RequestTrace:
    """Notes when a request's tokens came.

    Args:
        telemetry: makes the spans.
        span: of the whole request; it has begun.
    """

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry, self._span = telemetry, span
        self._start_ns = time.time_ns()
        self._first_ns = self._last_ns = 0

    def tick(self) -> None:
        """A token has come."""
        self._last_ns = time.time_ns()
        self._first_ns = self._first_ns or self._last_ns

    def end(self, error: BaseException | None, groups: Sequence[SequenceGroup]) -> None:
        """The request has ended; makes its spans.

        Args:
            error: what ended it; None: nothing did.
            groups: of the request; a sequence without a finish reason was cancelled.
        """
        span, end_ns = self._span, time.time_ns()
        if not span.is_recording():  # by OTEL_TRACES_SAMPLER
            return
        sequences = [sequence for group in groups for sequence in group.sequences]
        num_prompt_tokens = sum(len(group.token_ids) for group in groups)
        span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", sum(len(s.token_ids) for s in sequences))
        reasons = [s.finish_reason or "cancelled" for s in sequences]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        cached = sum(s.num_cached_tokens for s in sequences)
        span.set_attribute("moe.prompt_tokens_cached", cached)
        if error is not None:
            code = getattr(error, "code", None) or type(error).__name__
            span.set_attribute("error.type", code)
            span.set_status(StatusCode.ERROR)
        scheduled = [s.first_scheduled_ns for s in sequences if s.first_scheduled_ns]
        read_ns = min(scheduled, default=end_ns)
        self._phase("queue", self._start_ns, read_ns)
        if scheduled:
            self._phase("prefill", read_ns, self._first_ns or end_ns)
        if self._first_ns:
            self._phase("decode", self._first_ns, self._last_ns)
        span.end(end_ns)

    def _phase(self, name: str, start_ns: int, end_ns: int) -> None:
        tracer = self._telemetry.tracer
        context = trace.set_span_in_context(self._span)
        span = tracer.start_span(name, context, start_time=start_ns)
        if name != "queue":
            waits = self._telemetry.waits(start_ns, end_ns)
            span.set_attribute("moe.expert_waits", len(waits))
            span.set_attribute("moe.expert_wait_seconds", sum(wait.seconds for wait in waits))
            below = trace.set_span_in_context(span)
            longest = sorted(waits, key=lambda wait: -wait.seconds)[:MAX_WAITS]
            for wait in sorted(longest):
                begin = max(wait.start_ns, start_ns)
                one = tracer.start_span("expert wait", below, start_time=begin)
                one.set_attribute("moe.wait_seconds", wait.seconds)
                one.end(wait.end_ns)
        span.end(end_ns)


def make_telemetry() -> Telemetry:
    """Traces that go where the OTEL_* variables say. Raises `ProfileError` if it cannot be done."""
    exporter = _exporter()
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "moe"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Telemetry(provider)


def _exporter() -> SpanExporter | None:
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if kind == "none":
        return None
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ProfileError(
            f"OTEL_TRACES_EXPORTER must be otlp, console or none; got {kind!r} (server.traces)"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise ProfileError(
                f"{name} must be http/protobuf; got {protocol!r}: server.traces sends OTLP over "
                "HTTP, by default to http://localhost:4318 (OTEL_EXPORTER_OTLP_ENDPOINT)"
            )
    return OTLPSpanExporter()
