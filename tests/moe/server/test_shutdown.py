"""SIGTERM and draining, and starts that cannot work."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.cli import main
from moe.server.listener import bind
from tests.launched import free_port

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
URL = "/v1/completions"


def test_sigterm_finishes_what_runs_and_exits_with_0(
    text_checkpoint: Path, launch: Any, tmp_path: Path
) -> None:
    """SIGHUP has the keys read again, and ends nothing."""
    headers, keys = {"authorization": "Bearer k"}, tmp_path / "keys.yaml"
    keys.write_text("alice: of-a-file")
    command = ["serve", text_checkpoint, "--port", "0", "--api-key-file", keys]
    with launch(1, command, MOE_API_KEY="k\n") as process:  # as of a file's content
        line = process.wait_for("serving")
        found = re.fullmatch(r"moe: serving tiny at (http://127\.0\.0\.1:\d+)", line)
        assert found, process.everything()
        with httpx.Client(base_url=found[1], headers=headers, timeout=60) as http:
            assert http.get("/ready", headers={"authorization": ""}).status_code == 200
            assert http.get("/v1/models", headers={"authorization": ""}).status_code == 401
            with http.stream("POST", URL, json={**LONG, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.signal(0, signal.SIGHUP)
                process.signal(0, signal.SIGTERM)
                rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert sum(line.startswith("data: {") for line in rest) >= 100
        assert process.codes() == [0]
    assert process.out() == f"{line}\n"
    assert process.errors().startswith("moe: memory:\n  trunk ")
    *plan, refused, reloaded, answered = process.errors().splitlines()
    assert len(plan) == 8, "the memory plan and nothing else"
    assert " INFO GET - 401 " in refused  # before a route was looked for
    assert reloaded.endswith(" WARNING API keys read again: 1")
    assert " INFO POST /v1/completions 200 " in answered


def test_a_full_disk_for_logs_ends_nothing(text_checkpoint: Path, wait_for: Any) -> None:
    port = free_port()
    command = [sys.executable, "-m", "moe", "serve", text_checkpoint, "--port", str(port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*map(str, command)], stdout=full, stderr=full)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_for(lambda: process.poll() is not None or is_ready(http), "the server")
            assert http.post(URL, json=SHORT).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_draining_refuses_new_requests(wait_for: Any, serve: Any, gate: Any) -> None:
    with serve() as server:
        with server.in_flight(SHORT) as first:
            assert gate.reached.wait(20)
            server.service.stop()
            wait_for(lambda: server.http.get("/ready").status_code == 503, "the drain")
            refused = server.http.post(URL, json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down"
            assert server.http.get("/health").status_code == 200
            gate.open.set()
            assert first.recv(100).startswith(b"HTTP/1.1 200")
        server.stop()
        assert server.exit_code == 0


def test_a_drain_that_takes_too_long_ends_with_an_error(serve: Any, gate: Any) -> None:
    with serve(drain_timeout_s=0.1) as server:
        with server.in_flight(SHORT) as first:
            assert gate.reached.wait(20)
            server.service.stop()
            assert first.recv(100).startswith(b"HTTP/1.1 503")
            gate.open.set()
        server.stop()
        assert server.exit_code == 0


def test_a_taken_port_is_a_clear_error(
    text_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(text_checkpoint), "--port", port]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"moe: cannot listen on 127.0.0.1 port \d+: .*in use.*; choose .*\n", error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid port 8000"),
        (["--host", ""], "the host is empty; give one, or leave out --host for 127.0.0.1"),
        (["--api-key", ""], "the API key of --api-key or MOE_API_KEY is empty"),
        (["--served-model-name", "a", ""], "a served model name is empty"),
    ],
)
def test_mistakes_exit_with_2(
    options: list[str],
    message: str,
    text_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", str(text_checkpoint), *options]) == 2
    assert message in capsys.readouterr().err
