"""Sends requests to any endpoint of OpenAI's API and notes when each token comes.

Answers are streamed. The load is open (each request is sent when its time has come, however many
are under way) or closed (a number of clients, each of which sends its next request when it has the
answer to the last). A failed request is a result with an error, never an exception.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: up to and without ``/v1``.
        chat: send chats instead of completions.
        extra: fields added to every request, such as vLLM's ``ignore_eos``.
    """

    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def route(self) -> str:
        name = "chat/completions" if self.chat else "completions"
        return f"{self.url.rstrip('/')}/v1/{name}"

    def body(self, request: Request) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.prompt}]
        prompt = {"messages": messages} if self.chat else {"prompt": request.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


@dataclass(frozen=True)
class Request:
    prompt: str
    max_tokens: int


@dataclass
class Result:
    """One answer; times in seconds of a clock that all results of a run share.

    Attributes:
        sent: when the request was sent.
        token_times: when each part of the text came: a token, or several that came as one.
        ended: when the answer was complete, or had failed.
        prompt_tokens, new_tokens: as the server counts them, or parts where it does not.
        error: why there is no complete answer.
    """

    sent: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str | None = None


async def open_load(
    endpoint: Endpoint, requests: Sequence[Request], arrivals: Sequence[float]
) -> list[Result]:
    """Send each request at its time after the start."""

    async def later(request: Request, seconds: float) -> Result:
        await asyncio.sleep(seconds)
        return await _ask(client, endpoint, request)

    async with _client(endpoint) as client:
        return await asyncio.gather(*map(later, requests, arrivals))


async def closed_load(
    endpoint: Endpoint, requests: Sequence[Request], concurrency: int
) -> list[Result]:
    """Keep ``concurrency`` requests under way until all are answered."""
    results: dict[int, Result] = {}
    queue = iter(enumerate(requests))

    async def one_client() -> None:
        for index, request in queue:
            results[index] = await _ask(client, endpoint, request)

    async with _client(endpoint) as client:
        await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return [results[index] for index in range(len(requests))]


def _client(endpoint: Endpoint) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=10)
    )


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, request: Request) -> Result:
    result = Result(sent=time.perf_counter())
    try:
        async with client.stream("POST", endpoint.route, json=endpoint.body(request)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                result.error = f"status {response.status_code}: {text[:200]}"
            else:
                await _read(response, result)
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        result.error = f"not an answer in OpenAI's format: {type(error).__name__}: {error}"
    result.ended = time.perf_counter()
    return result


async def _read(response: httpx.Response, result: Result) -> None:
    finished = False
    async for chunk in _chunks(response):
        if "error" in chunk:
            result.error = str(chunk["error"])
            return
        if usage := chunk.get("usage"):
            result.prompt_tokens = usage["prompt_tokens"]
            result.new_tokens = usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            is_opening = "role" in choice.get("delta", {}) and not text
            ended = choice.get("finish_reason") is not None
            finished |= ended
            # A token may add no text yet. A last chunk without text only says that it ended.
            if text or not (is_opening or ended):
                result.token_times.append(time.perf_counter())
                result.text += text or ""
    if not finished:
        result.error = "the stream ended before the answer"
    if not result.new_tokens:
        result.new_tokens = len(result.token_times)


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
