"""A server whose model is four times its memory answers 16 clients for minutes and stays inside.

    python -m benchmarks.offload_soak [--minutes 5] [--clients 16] [--times 4] [--model 30b|STORE]

Starts ``moe serve`` in a control group whose limit is a fourth of the model, so that the kernel
would kill it for taking more, and reads its highest use from outside. Every client asks one request
after the other, streamed, greedily; every answer must be whole. Half of the clients ask the same
few prompts over and over, and it is counted how many different answers each got: attention rounds
differently for a prompt alone and in company, and a deep random model may make other words of it.
Ends with exit code 0 or 1 and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.memory_group import drop_from_cache, memory_group
from benchmarks.servers import Server, moe_serve
from examples.models.random_store import random_30b

SETTINGS = (
    "memory.kv_tokens=1536",
    "prefill.wave_tokens=512",
    "engine.max_batch_size=16",
    "server.send_timeout_s=600",
)
PROMPTS = 4  # that are asked over and over
NEW_TOKENS = 8


class Clients:
    """All clients of one server, and what became of their requests."""

    def __init__(self, server: Server, until: float) -> None:
        self.server, self.until = server, until
        self.outcomes: Counter[str] = Counter()
        self.answers: dict[int, set[str]] = defaultdict(set)
        self.tokens = 0

    async def run(self, count: int) -> None:
        limits = httpx.Limits(max_connections=None)
        url = self.server.endpoint.url
        async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as http:
            await asyncio.gather(*(self._client(http, index) for index in range(count)))

    async def _client(self, http: httpx.AsyncClient, index: int) -> None:
        rng = random.Random(index)
        while time.monotonic() < self.until:
            again = rng.randrange(PROMPTS) if index % 2 else None
            draw = rng if again is None else random.Random(-1 - again)
            prompt = [draw.randrange(1000) for _ in range(draw.randint(4, 48))]
            try:
                outcome, text = await self._ask(http, prompt)
            except httpx.HTTPError as error:
                outcome, text = type(error).__name__, ""
            self.outcomes[outcome] += 1
            if again is not None and outcome == "complete":
                self.answers[again].add(text)

    async def _ask(self, http: httpx.AsyncClient, prompt: list[int]) -> tuple[str, str]:
        body = {
            "model": self.server.endpoint.model,
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        parts: list[str] = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}", ""
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "complete", "".join(parts)
                if line.startswith('data: {"id"'):
                    self.tokens += 1
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
        return "a stream broken off", ""


def soak(model: Path, times: float, minutes: float, count: int) -> dict[str, Any]:
    """Serve and ask; the figures."""
    files = sorted(model.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    limit = int(size / times)
    drop_from_cache(*files)
    with memory_group(limit) as group:
        start = time.monotonic()
        with moe_serve(model, *SETTINGS, within=group) as server:
            ready = time.monotonic()
            clients = Clients(server, ready + 60 * minutes)
            asyncio.run(clients.run(count))
            seconds = time.monotonic() - ready
        usage = group.usage()
    return {
        "model_bytes": size,
        "ready_s": ready - start,
        "seconds": seconds,
        "outcomes": dict(clients.outcomes),
        "tokens": clients.tokens,
        "tokens_per_second": clients.tokens / seconds,
        "different_answers": {str(k): len(v) for k, v in sorted(clients.answers.items())},
        "memory": asdict(usage),
        "exit_code": server.process.returncode,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """Return what must not be."""
    found = [f"{n} x {what}" for what, n in result["outcomes"].items() if what != "complete"]
    memory = result["memory"]
    if memory["limit_bytes"] is None:
        found.append("no limit could be set: nothing is shown")
    elif memory["killed"] or memory["peak_bytes"] > memory["limit_bytes"]:
        found.append("the server left its limit")
    if result["exit_code"] != 0:
        found.append(f"the server ended with {result['exit_code']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=5.0)
    add("--clients", type=int, default=16)
    add("--times", type=float, default=4.0, help="how many times its memory the model is")
    add("--model", default="30b", help="30b or a store")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = random_30b() if options.model == "30b" else Path(options.model)
    if model is None:
        print_json({**facts, "skipped": True})
        return 0
    result = soak(model, options.times, options.minutes, options.clients)
    result["faults"] = faults(result)
    print_table("soak under a limit", ["figure", "value"], list(result.items()))
    print_json({**facts, "minutes": options.minutes, "clients": options.clients, **result})
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
