"""Loading, and failures of one request or of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe import MoE
from moe.engine.engine import Engine
from moe.errors import MoEError
from moe.loading.progress import LoadProgress
from moe.sequence import RunningSequence
from moe.server.listener import bind
from moe.server.serve import Service, _load
from moe.settings.profile import load_profile

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
URL = "/v1/completions"


@contextmanager
def loading(load: Callable[[], MoE]) -> Iterator[tuple[Service, list[Any]]]:
    """A service that has begun to load, and what becomes of it."""
    service = Service(
        lambda _: load(), ["tiny"], load_profile({}, environ={}), bind("127.0.0.1", 0)
    )
    with running(service) as outcome:
        yield service, outcome


@contextmanager
def running(service: Service) -> Iterator[list[Any]]:
    """What becomes of a service: ``ready``, its exit code or why it could not load."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(service.run(lambda: outcome.append("ready"))))
        except MoEError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(20)
    assert not thread.is_alive()


def test_while_loading_and_when_loading_fails() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def load() -> MoE:
        asked.set()
        assert go_on.wait(60)
        raise MoEError("no such thing")

    with loading(load) as (service, outcome):
        assert asked.wait(20)
        with httpx.Client(base_url=service.address, timeout=60) as http:
            assert http.get("/health").status_code == 200
            for answer in (http.get("/ready"), http.post(URL, json=SHORT)):
                assert answer.status_code == 503
                assert "the model is loading" in answer.json()["error"]["message"]
            assert http.get("/v1/status").json()["state"] == "loading"
            assert http.get("/metrics").status_code == 200
        go_on.set()
    assert outcome == ["no such thing"]


def test_ready_says_how_far_loading_is() -> None:
    moment, go_on = threading.Event(), threading.Event()

    def load(report: Any) -> MoE:
        report(LoadProgress("loading weights", 300, 1000))
        moment.set()
        assert go_on.wait(60)
        raise MoEError("enough")

    service = Service(load, ["tiny"], load_profile({}, environ={}), bind("127.0.0.1", 0))
    with running(service) as outcome:
        assert moment.wait(20)
        answer = httpx.get(f"{service.address}/ready", timeout=60)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        said = answer.json()
        assert said["status"] == said["error"]["code"] == "loading"
        assert said["progress"] == {
            "phase": "loading weights",
            "done_bytes": 300,
            "total_bytes": 1000,
            "fraction": 0.3,
        }
        go_on.set()
    assert outcome == ["enough"]


def test_a_model_reports_while_it_is_loaded_for_a_server(
    text_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[LoadProgress] = []
    model = _load(text_checkpoint, load_profile({}, environ={}), (), seen.append)
    assert seen[0].phase == "planning"
    assert seen[-1].phase == "preparing"
    assert seen[-1].fraction == 1.0
    assert len({now.done_bytes for now in seen}) > 3
    assert str(model.memory_plan) in capsys.readouterr().err


def test_the_status_has_the_memory_plan(server: Any, model: MoE) -> None:
    planned = server.http.get("/v1/status").json()["memory_plan"]
    assert planned["kv_tokens"] == model.memory_plan.kv_tokens
    assert sum(line["bytes"] for line in planned["lines"]) == planned["needed_bytes"]


def test_sigterm_while_loading_does_not_wait(model: MoE) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def load() -> MoE:
        asked.set()
        assert go_on.wait(60)
        return model

    with loading(load) as (service, outcome):
        assert asked.wait(20)
        service.stop()
    go_on.set()
    assert outcome == [0]
    assert service.is_stuck


def test_one_sequence_that_fails_concerns_nobody_else(
    wait_for: Any,
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: MoE,
    caplog: pytest.LogCaptureFixture,
) -> None:
    append = RunningSequence.append_token
    secret = "what the client wrote"

    def failing(sequence: RunningSequence, token: Any) -> Any:
        if sequence.prompt_token_ids == model.codec.encode("unlucky"):
            raise RuntimeError(secret)
        return append(sequence, token)

    monkeypatch.setattr(RunningSequence, "append_token", failing)
    with serve() as server:
        for stream in (False, True):
            with server.in_flight({**SHORT, "prompt": ["hello", "unlucky"], "n": 2}):
                bad = server.http.post(URL, json={**SHORT, "prompt": "unlucky", "stream": stream})
            assert bad.status_code == (200 if stream else 500)
            assert "its log has the details" in bad.text
            assert secret not in bad.text
            assert server.http.post(URL, json=SHORT).status_code == 200
        wait_for(server.is_idle, "an idle engine")
    assert "RuntimeError" in caplog.text
    assert secret not in caplog.text


def test_an_engine_that_fails_tells_everybody_and_ends_the_server(
    wait_for: Any, serve: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Engine.step

    def failing(engine: Engine) -> Any:
        gated(engine)
        raise RuntimeError("broken")

    monkeypatch.setattr(Engine, "step", failing)
    with serve() as server:
        with server.in_flight(SHORT) as first, server.in_flight(LONG) as second:
            wait_for(lambda: server.occupancy["waiting_requests"] == 2, "two waiting requests")
            gate.open.set()
            for connection in (first, second):
                assert connection.recv(100).startswith(b"HTTP/1.1 500")
        server.stop()
        assert server.exit_code == 1
