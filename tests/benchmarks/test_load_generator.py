"""The load generator against an endpoint that answers by a script, with known delays.

Delays are lower bounds: a busy machine only makes what is measured longer.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.load_generator import Endpoint, Request, Result, closed_load, open_load
from benchmarks.serving import main
from benchmarks.serving_figures import gaps, ttft

Event = tuple[float, Any]
"""Seconds to wait, then what to send: an object, or None to break the connection off."""


def token(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
ANSWER: list[Event] = [
    (0.08, token("a")),
    (0.03, token("")),
    (0.05, token("bc", "length")),
    (0.0, USAGE),
]


@dataclass
class FakeServer:
    """Streams the same events to everybody, and keeps what it was asked."""

    events: Sequence[Event]
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.lower().split("\r\n") if "content-length" in line)
        self.headers.append(head)
        self.bodies.append(json.loads(await reader.readexactly(int(length.split(":")[1]))))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        writer.write(f"HTTP/1.1 {self.status} X\r\nconnection: close\r\n\r\n".encode())
        for seconds, event in self.events:
            await asyncio.sleep(seconds)
            if event is None:
                break
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
        else:
            writer.write(b"data: [DONE]\n\n")
        self.under_way -= 1
        writer.close()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves in a thread of its own; gives the address."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def start() -> asyncio.Server:
            return await asyncio.start_server(self.answer, "127.0.0.1", 0)

        try:
            server = asyncio.run_coroutine_threadsafe(start(), loop).result()
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            loop.call_soon_threadsafe(server.close)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def ask(server: FakeServer, *, requests: int = 1, **fields: Any) -> list[Result]:
    with server.running() as url:
        endpoint = Endpoint(url, "fake", **fields)
        return asyncio.run(closed_load(endpoint, [Request("hello", 3)] * requests, 1))


def test_the_delays_of_an_answer_are_measured() -> None:
    (result,) = ask(FakeServer(ANSWER))
    assert result.error is None
    assert result.text == "abc"
    assert (result.prompt_tokens, result.new_tokens) == (7, 3)
    assert ttft(result) >= 0.08
    assert len(gaps(result)) == 2  # a token without text is one
    assert result.token_times[1] - result.sent >= 0.11
    assert result.token_times[2] - result.sent >= 0.16
    assert result.ended >= result.token_times[-1]


def test_what_is_asked_for() -> None:
    server = FakeServer(ANSWER)
    ask(server, api_key="secret", extra={"ignore_eos": True})
    (body,) = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("fake", "hello", 3)
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert "authorization: Bearer secret" in server.headers[0]
    assert server.headers[0].startswith("POST /v1/completions ")


def test_chats() -> None:
    def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}

    events = [
        (0.0, delta(role="assistant", content="")),
        (0.05, delta(content="x")),
        (0.0, delta(content="y")),
        (0.0, delta("stop")),
    ]
    server = FakeServer(events)
    (result,) = ask(server, chat=True)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.headers[0].startswith("POST /v1/chat/completions ")
    assert result.text == "xy"
    assert ttft(result) >= 0.05  # the opening is not a token
    assert result.new_tokens == 2  # counted here where the server does not say


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        ([(0.0, {"error": {"message": "too busy"}})], 429, "status 429: .*too busy"),
        ([(0.0, token("a")), (0.0, None)], 200, "the stream ended before the answer"),
        ([(0.0, token("a")), (0.0, {"error": {"message": "oh"}})], 200, "oh"),
        ([(0.0, {"choices": "?"})], 200, "not an answer in OpenAI's format"),
    ],
    ids=["refused", "broken off", "error in the stream", "not OpenAI's format"],
)
def test_failures_are_results(events: list[Event], status: int, error: str) -> None:
    (result,) = ask(FakeServer(events, status))
    assert result.error is not None
    assert re.search(error, result.error)


def test_nobody_there_is_a_failure() -> None:
    with FakeServer(ANSWER).running() as url:
        pass
    (result,) = asyncio.run(closed_load(Endpoint(url, "fake"), [Request("hello", 3)], 1))
    assert result.error is not None
    assert "ConnectError" in result.error


def test_a_closed_load_keeps_its_number_of_requests_under_way() -> None:
    server = FakeServer(ANSWER)
    with server.running() as url:
        requests = [Request(str(number), 3) for number in range(12)]
        results = asyncio.run(closed_load(Endpoint(url, "fake"), requests, 4))
    assert server.most_under_way == 4
    assert [result.error for result in results] == [None] * 12
    assert sorted(body["prompt"] for body in server.bodies) == sorted(map(str, range(12)))


def test_an_open_load_sends_each_request_in_its_time() -> None:
    start = time.perf_counter()
    with FakeServer(ANSWER).running() as url:
        results = asyncio.run(
            open_load(Endpoint(url, "fake"), [Request("hello", 3)] * 3, [0.0, 0.05, 0.2])
        )
    sent = [result.sent - start for result in results]
    assert sent[1] >= 0.05
    assert sent[2] >= 0.2


def test_the_command_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(ANSWER)
    load = ["--requests", "6", "--concurrency", "3", "--scale", "0.01", "--tbt", "1000"]
    with server.running() as url:
        main(["--url", url, "--model", "fake", *load, "--ttft", "1000"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["requests"], figures["failed"]) == (6, 0)
    assert figures["new_tokens"] == 18
    assert figures["ttft_s"]["p50"] >= 0.08
    assert figures["goodput_per_s"] == figures["requests_per_s"] > 0
    assert len(server.bodies) == 7  # one to warm up


def test_an_endpoint_without_a_model_is_a_usage_error() -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:1"])
