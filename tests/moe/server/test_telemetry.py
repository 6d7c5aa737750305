"""Traces of requests: their spans and times, whose trace they are in, and what is not in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra telemetry")

from opentelemetry.sdk.resources import SERVICE_NAME
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from experts.manifest import read_manifest
from moe import MoE
from moe.commands.convert.convert import convert
from moe.errors import ProfileError
from moe.loading.memory_plan import GIB
from moe.server import serve as serving
from moe.server import telemetry
from moe.server.listener import bind
from moe.server.serve import Service
from moe.server.telemetry import Telemetry, make_telemetry
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from offload.capacity import slot_bytes
from tests.moe.server.conftest import NAMES, Running
from tests.moe.test_offload_faults import Slow, meddling

SECRET = "zebra quagga okapi"
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
URL = "/v1/completions"


@contextmanager
def traced(model: MoE) -> Iterator[tuple[Running, InMemorySpanExporter]]:
    """A server of the model, and the spans that it has sent."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    profile, listener = load_profile({}, environ={}), bind("127.0.0.1", 0)
    service = Service(lambda _: model, NAMES, profile, listener, telemetry=Telemetry(provider))
    running = Running(service)
    yield running, spans
    running.stop()


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_phases_follow_each_other_in_the_trace_of_the_caller(model: MoE) -> None:
    with traced(model) as (server, spans):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = server.http.post(URL, json=BODY, headers=headers)
        usage = answer.json()["usage"]
    found = by_name(spans)
    request = found[f"POST {URL}"]
    assert request.parent is not None
    assert request.parent.span_id == int(PARENT, 16)
    assert {span.context.trace_id for span in found.values() if span.context} == {int(TRACE, 16)}
    about = attributes(request)
    assert about["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert about["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert about["gen_ai.response.finish_reasons"] == ("length",)
    assert about["moe.request_id"] == answer.headers["x-request-id"]
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    times = [time for phase in phases for time in (phase.start_time, phase.end_time)]
    assert times == sorted(times, key=lambda time: time or 0)
    assert times[1] == times[2]
    assert times[3] == times[4]
    for phase in phases:
        assert phase.parent is not None
        assert request.context is not None
        assert phase.parent.span_id == request.context.span_id
    assert SECRET not in str([span.to_json() for span in spans.get_finished_spans()])


def test_refused_and_cancelled_requests_say_so(model: MoE, gate: Any) -> None:
    with traced(model) as (server, spans):
        assert server.http.post(URL, json=BODY | {"max_tokens": 10**6}).status_code == 400
        with server.in_flight(BODY):
            assert gate.reached.wait(20)
        gate.open.set()
        while len(spans.get_finished_spans()) < 4:
            pass
    ended = [each for each in spans.get_finished_spans() if each.name == f"POST {URL}"]
    assert attributes(ended[0])["error.type"] == "ContextError"
    assert attributes(ended[1])["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_steps_that_waited_for_experts_are_spans(
    text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_WAITS", 3)
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(text_checkpoint, tmp_path / "store", settings)
    small: dict[str, Any] = {
        "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
        "prefill": {"wave_tokens": 128},
        "engine": {"max_batch_size": 8},
    }
    plan = MoE.from_pretrained(store, small).memory_plan
    rest = sum(line.bytes for line in plan.lines if line.name != "experts")
    small["memory"]["device_gib"] = (rest + 8 * slot_bytes(read_manifest(store), 8) + 16) / GIB
    model = MoE.from_pretrained(store, small)
    # No read may end before it is waited for: on a fast machine none is waited for.
    late = meddling(model, lambda transfer, _: Slow(transfer, 0.005))
    with late, traced(model) as (server, spans):
        server.http.post(URL, json=BODY)
        stalled = server.http.get("/v1/status").json()["stats"]["offload"]["stall_seconds"]
    found = by_name(spans)
    phases = [found["prefill"], found["decode"]]
    waited = sum(attributes(phase)["moe.expert_wait_seconds"] for phase in phases)
    assert 0 < waited <= 1.001 * stalled
    for phase in phases:
        assert phase.context is not None
        waits = [
            span
            for span in spans.get_finished_spans()
            if span.name == "expert wait"
            and span.parent is not None
            and span.parent.span_id == phase.context.span_id
        ]
        assert len(waits) == min(attributes(phase)["moe.expert_waits"], 3)
        for wait in waits:
            assert (phase.start_time or 0) <= (wait.start_time or 0)
            assert (wait.end_time or 0) <= (phase.end_time or 0)


def test_variables_say_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "box-7")
    monkeypatch.setattr(ConsoleSpanExporter, "export", lambda self, spans: sent.extend(spans))
    sent: list[ReadableSpan] = []
    made = make_telemetry()
    made.begin({}, URL, "tiny", "1").end(None, [])
    made.close()
    assert [span.name for span in sent] == ["queue", f"POST {URL}"]
    assert sent[0].resource.attributes[SERVICE_NAME] == "box-7"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(ProfileError, match="must be otlp, console or none; got 'jaeger'"):
        make_telemetry()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ProfileError, match="OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"):
        make_telemetry()


def test_without_the_packages_the_key_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_installed", lambda extra: False)
    with pytest.raises(ProfileError, match="pip install 'opentelemetry-sdk"):
        serving._telemetry()
