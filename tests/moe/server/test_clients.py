"""Clients that go away or do not read, queues that are full, keys, and many at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moe import MoE, SamplingParams

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
URL = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_c20_a_client_that_leaves_before_its_first_token(
    wait_for: Any, stream: bool, n: int, serve: Any, gate: Any
) -> None:
    with serve() as server:
        with server.in_flight({**LONG, "stream": stream, "n": n}):
            assert gate.reached.wait(20)
        wait_for(lambda: server.occupancy["waiting_requests"] == 0, "the request to be forgotten")
        gate.open.set()
        wait_for(server.is_idle, "an idle engine")
        assert server.http.post(URL, json=SHORT).status_code == 200
        assert 'status="499"' in server.http.get("/metrics").text or stream


def test_c20_a_client_that_leaves_in_mid_stream(wait_for: Any, serve: Any, gate: Any) -> None:
    gate.steps_before = 3
    with serve() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        body: Any = {key: value for key, value in LONG.items() if key != "ignore_eos"}
        extra = {"ignore_eos": True}
        stream = client.completions.create(**body, n=4, stream=True, extra_body=extra)
        next(iter(stream))
        assert server.occupancy["running_requests"] == 1
        stream.close()
        gate.open.set()
        wait_for(server.is_idle, "an idle engine")
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c20_a_client_that_does_not_read_is_given_up(wait_for: Any, serve: Any, model: MoE) -> None:
    """The engine goes on meanwhile; what was generated waits in bounded buffers."""
    with serve(send_timeout_s=0.2) as server:
        connection = server.connect(receive_buffer=1024)
        many = {**LONG, "prompt": ["hello"] * 8, "n": 8, "logprobs": 20, "stream": True}
        connection.sendall(server.raw(many))
        wait_for(lambda: server.occupancy["running_requests"] == 1, "the request to run")
        wait_for(server.is_idle, "the request to be given up")
        assert server.http.post(URL, json=SHORT).status_code == 200
        connection.close()


def test_d1_a_full_queue_refuses_with_429(wait_for: Any, serve: Any, gate: Any) -> None:
    with serve(max_waiting=2) as server:
        with server.in_flight(SHORT) as first, server.in_flight(SHORT) as second:
            wait_for(lambda: server.occupancy["waiting_requests"] == 2, "two waiting requests")
            refused = server.http.post(URL, json=SHORT)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert server.http.get("/health").status_code == 200
            gate.open.set()
            assert first.recv(100).startswith(b"HTTP/1.1 200")
            assert second.recv(100).startswith(b"HTTP/1.1 200")
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c15_c16_every_route_but_the_public_ones_needs_the_key(serve: Any) -> None:
    with serve(api_key="s3cret") as server:
        paths = server.http.get("/openapi.json", headers={"authorization": "Bearer s3cret"})
        routes = [(m, p) for p, methods in paths.json()["paths"].items() for m in methods]
        assert len(routes) >= 10
        for method, path in [*routes, ("get", "/openapi.json"), ("get", "/nothing")]:
            for key in (
                None,
                "Bearer wrong",
                "Bearer",
                "s3cret",
                "Basic s3cret",
                "Bearer s3cr\xe9t",
            ):
                headers = {} if key is None else {"authorization": key.encode("latin-1")}
                answer = server.http.request(method, path, headers=headers)
                expected = 200 if path in ("/health", "/ready") else 401
                assert answer.status_code == expected, (method, path, key)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret")
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).id
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()


def test_c8_a_request_that_can_never_fit_is_refused(serve: Any, text_checkpoint: Path) -> None:
    def load() -> MoE:
        return MoE.from_pretrained(text_checkpoint, memory={"kv_tokens": 20})

    with serve(load=load) as server:
        refused = server.http.post(URL, json=LONG)
        assert refused.status_code == 400
        assert "room for 20 " in refused.json()["error"]["message"]
        assert server.is_idle()
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_d6_many_requests_at_once_get_their_own_answers(
    wait_for: Any, server: Any, model: MoE
) -> None:
    prompts = ["a", "hello", "def f(", "x" * 50, "12 34", "zz"] * 2
    params = SamplingParams(max_new_tokens=20, temperature=0)
    expected = [c.text for c in model.generate(prompts, params)]
    got: dict[int, str] = {}

    def ask(index: int) -> None:
        body = {"model": "tiny", "prompt": prompts[index], "max_tokens": 20}
        got[index] = httpx.post(server.url + URL, json=body, timeout=60).json()["choices"][0][
            "text"
        ]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == expected
    wait_for(server.is_idle, "an idle engine")
