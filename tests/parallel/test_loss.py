"""A rank is lost while requests run: everybody is told within the bound, and nothing is left."""

from __future__ import annotations

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.amounts import deep_except

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
TIMEOUT_S = 6.0
SLACK_S = 15.0
"""Beyond the bound, on a machine that others use too."""
ARGUMENTS = [
    *("serve", str(DEMO), "--profile", "expert-parallel", "--port", "0"),
    *("--set", "device=cpu", "--set", f"parallel.timeout_s={TIMEOUT_S}"),
]
LONG = {"model": "demo-model", "prompt": "import os", "max_tokens": 400, "ignore_eos": True}
KILLED = -signal.SIGKILL
SLOW = {"rank": 1, "kind": "slow"}


def url_of(launched: Any) -> str:
    return str(launched.wait_for("serving").split()[-1])


def ask(url: str, **changes: Any) -> tuple[int, Any]:
    """Status and body; the status of a stream is that of its last event."""
    with httpx.Client(base_url=url, timeout=120) as client:
        if not changes.get("stream"):
            answer = client.post("/v1/completions", json=LONG | changes)
            return answer.status_code, answer.json()
        with client.stream("POST", "/v1/completions", json=LONG | changes) as stream:
            if stream.is_error:  # it came too late to begin
                return stream.status_code, json.loads(stream.read())
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        return 0, json.loads(events[-1])


def running(url: str) -> int:
    status = httpx.get(f"{url}/v1/status", timeout=120).json()
    return int(status["occupancy"]["running_requests"])


def first_token(url: str) -> None:
    assert ask(url, max_tokens=1)[0] == 200


@pytest.mark.deep
def test_everybody_is_told_when_rank_0_is_stopped(launch: Any, wait_for: Any) -> None:
    """The one that talks to callers: another rank lets it go on, so that it tells them."""
    with launch(2, ARGUMENTS, SLOW) as launched, ThreadPoolExecutor(2) as pool:
        url = url_of(launched)
        first_token(url)
        asked = [pool.submit(ask, url, stream=n == 1, seed=n) for n in range(2)]
        wait_for(lambda: running(url) == 2, "two requests under way")
        began = time.monotonic()
        launched.signal(0, signal.SIGSTOP)
        answers = [future.result() for future in asked]
        took = time.monotonic() - began
        codes = launched.codes(TIMEOUT_S + 2 * SLACK_S)
    assert codes[0] == 1
    assert codes[1] in (1, KILLED)  # rank 0 kills it if it is quicker
    for status, body in answers:
        assert status in (0, 500), body
        assert re.search(
            r"rank 1 has ended .*, while rank 0 stood still for \d+\.\d s", body["error"]["message"]
        )
    assert took < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize(
    "fault", deep_except(["kill"], ["kill", "kill on a device", "stop", "raise", "stall"])
)
def test_everybody_is_told_and_all_processes_end(launch: Any, wait_for: Any, fault: str) -> None:
    """Also where rows travel as between GPUs (`DeviceDispatcher`, over gloo in place of NCCL)."""
    ours, device = fault in ("raise", "stall"), fault.endswith("device")
    planned = {"rank": 1, "kind": fault, "step": 40} if ours else SLOW
    if device:
        planned, fault = {"rank": "01", "kind": "device"}, "kill"
    reasons = {
        "kill": "rank 1 has ended",
        "stop": "rank 1 has not been heard of",
        "raise": "rank 1 has failed: AssertionError: broken on purpose",
        "stall": "rank 1 has got nowhere",
    }
    with launch(2, ARGUMENTS, planned) as launched, ThreadPoolExecutor(4) as pool:
        url = url_of(launched)
        if device:
            assert all("DeviceDispatcher" in launched.out(rank) for rank in range(2))
        first_token(url)
        began = time.monotonic()
        asked = [pool.submit(ask, url, stream=n % 2 == 1, seed=n) for n in range(4)]
        if not ours:
            wait_for(lambda: running(url) == 4, "four requests under way")
            began = time.monotonic()
            launched.signal(1, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        answers = [future.result() for future in asked]
        took = time.monotonic() - began
        codes = launched.codes(TIMEOUT_S + 2 * SLACK_S)
    for status, body in answers:
        assert status in (0, 500), body
        assert reasons[fault] in body["error"]["message"], (body, launched.everything())
    if not ours:
        assert took < TIMEOUT_S + SLACK_S
    assert codes[0] == 1, launched.everything()
    assert codes[1] in (1, KILLED)
    assert reasons[fault] in launched.errors(0)
