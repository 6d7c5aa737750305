"""Replicas on Ray Serve: one is killed under load, settings change under load, load makes it grow.

Skipped where Ray is not installed (``pip install 'ray[serve]'``): it is no part of the extras.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")

import psutil
import ray
from ray import serve

from examples.ray_serve import Settings, build, session_of

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo-model"
SET = {"threads": 1, "engine.max_batch_size": 2, "server.drain_timeout_s": 20.0}
PATIENCE_S = 600
"""A replica starts with 7 s of computing, which takes minutes where twenty others compute."""
CLIENTS = 12


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    os.environ["PYTHONPATH"] = str(ROOT)
    # 15 by default, with which replicas starve beside a busy process.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def deploy(**settings: Any) -> None:
    changed = SET | settings.pop("set", {})
    serve.run(build(Settings(model=str(MODEL), set=changed, **settings)), name="moe")


def running() -> int:
    """Replicas that take requests."""
    deployment = serve.status().applications["moe"].deployments["Replica"]
    return deployment.replica_states.get("RUNNING", 0)


def processes() -> list[Any]:
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if any("ServeReplica:moe:Replica" in part for part in process.info["cmdline"] or ())
    ]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.2)


def ask(url: str, number: int, tokens: int = 60, stream: bool = False) -> tuple[str, str]:
    """The text of an answer, and the code of the error that ended it."""
    prompt = f"# {number}\ndef main():"
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    route = f"{url}/v1/completions"
    if not stream:
        answer = httpx.post(route, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], ""
    text, code = "", ""
    with httpx.stream("POST", route, json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                code = event.get("error", {}).get("code", code)
                text += event["choices"][0]["text"] if event.get("choices") else ""
    return text, code


def test_a_killed_replica_costs_no_request_and_an_update_neither(url: str) -> None:
    deploy(min_replicas=2, max_replicas=2)
    until(lambda: running() == 2)
    expected = [ask(url, number)[0] for number in range(8)]
    before = processes()
    assert len(before) == 2
    with ThreadPoolExecutor(16) as pool:
        whole = [pool.submit(ask, url, number) for number in range(8)]
        streams = [pool.submit(ask, url, number, stream=True) for number in range(8)]
        until(lambda: any(each.done() for each in whole))
        before[0].send_signal(signal.SIGKILL)
        assert [each.result() for each in whole] == [(text, "") for text in expected]
        for each, text in zip(streams, expected, strict=True):
            said, code = each.result()
            assert (said == text and not code) or (text.startswith(said) and code == "replica_lost")
    until(lambda: running() == 2)

    done, answers = threading.Event(), []

    def go_on(number: int) -> None:
        while not done.is_set():
            answers.append((number, *ask(url, number)))

    with ThreadPoolExecutor(2) as pool:
        going = [pool.submit(go_on, number) for number in range(2)]
        deploy(min_replicas=2, max_replicas=2, set={"engine.max_batch_size": 3})
        old = {process.pid for process in before}
        until(lambda: running() == 2 and not old & {process.pid for process in processes()})
        done.set()
        for loop in going:
            loop.result()
    assert answers
    assert all((text, code) == (expected[number], "") for number, text, code in answers)


def test_it_grows_by_waiting_tokens_and_shrinks_again(url: str) -> None:
    deploy(
        min_replicas=1,
        max_replicas=2,
        waiting_tokens=40,
        requests=2,
        upscale_delay_s=0.5,
        downscale_delay_s=2,
        look_back_s=1,
        set={"engine.max_batch_size": 1},
    )
    until(lambda: running() == 1)
    done = threading.Event()

    def go_on(number: int) -> None:
        while not done.is_set():
            ask(url, number)

    # The load lasts until the second replica runs, however long that takes to start.
    with ThreadPoolExecutor(CLIENTS) as pool:
        going = [pool.submit(go_on, number) for number in range(CLIENTS)]
        try:
            until(lambda: running() == 2)
        finally:
            done.set()
        for each in going:
            each.result()
    until(lambda: running() == 1)


def test_what_begins_alike_goes_to_one_replica() -> None:
    def chat(*texts: str, **more: Any) -> bytes:
        roles = ("system", "user", "assistant", "user")
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        return json.dumps({"messages": messages, **more}).encode()

    first = session_of({}, chat("be brief", "hello"))
    assert session_of({}, chat("be brief", "hello", "hi", "more")) == first
    assert session_of({}, chat("be brief", "good day")) != first
    assert session_of({}, chat("be brief", "hello", prompt_cache_key="mine")) == "mine"
    assert session_of({"x-session-id": "7"}, chat("be brief", "hello")) == "7"
    assert session_of({}, b"[") == session_of({}, b"")
