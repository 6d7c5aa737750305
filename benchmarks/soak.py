"""Minutes of mixed load with cancellations: nothing is lost, nothing leaks, memory stays flat.

    python -m benchmarks.soak [--minutes 5] [--clients 12] [--model PATH] [--set KEY=VALUE]

Starts ``moe serve`` with little memory for keys and values, so that requests are also preempted,
and fills the prefix cache: with prompts that begin each in another way, until it evicts, as memory
may grow until then (``--set memory.prefix_tokens=auto --set memory.kv_tokens=null`` fills that of a
server without settings). Then it drives the server in five rounds with streams and whole answers of
1 to 4 samples. 30 % of the clients leave, half of them before the first token. Every answer must be
accounted for (complete, refused with 429, or left by the client). After each round ``/v1/status``
must show an idle engine, the open files must be those of the start, and the idle server's memory
must not grow by more than 3 % from the second round to the last (the first is warm-up). Ends with
exit code 0 or 1 and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.servers import Server, moe_serve

ROOT = Path(__file__).parents[1]
SETTINGS = ("memory.kv_tokens=4000", "memory.prefix_tokens=1000", "engine.max_batch_size=16")
FILLS = 10_000
"""Prompts within which the prefix cache must be full."""
ANSWER_S = 300.0
"""A machine that measures something else stops us for minutes; who hangs is found all the same."""
LEAVE = 0.3
ROUNDS = 5
MAX_GROWTH = 0.03
# glibc gives freed memory back at once, so that what grows is held by somebody.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
FINE = frozenset({"complete", "refused", "left"})
WORDS = (ROOT / "tests/data/heldout_prose.txt").read_text().split()


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def random_body(model: str, rng: random.Random) -> dict[str, Any]:
    start = rng.randrange(len(WORDS) - 200)
    known = WORDS[:40] if rng.random() < 0.5 else []
    return {
        "model": model,
        "prompt": " ".join([*known, *WORDS[start : start + rng.choice((3, 20, 60, 120))]]),
        "max_tokens": rng.randint(2, 48),
        "n": rng.choice((1, 1, 2, 4)),
        "stream": rng.random() < 0.6,
        "temperature": rng.choice((0, 0.8)),
        "logprobs": rng.choice((None, 2)),
        "ignore_eos": True,
        "cache_salt": rng.choice(("", "tenant")),
    }


async def ask(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> str:
    """Return what became of a request: ``complete``, ``refused``, ``left``, or what was wrong.

    Args:
        leave_after: events of a stream after which the client goes away; of a whole answer,
            hundredths of a second. None stays.
    """
    expected, got = body["n"] * body["max_tokens"], 0
    patience = None if body["stream"] or leave_after is None else leave_after / 100
    try:
        request = http.build_request("POST", "/v1/completions", json=body)
        answer = await asyncio.wait_for(http.send(request, stream=body["stream"]), patience)
    except asyncio.TimeoutError:
        return "left"
    try:
        if answer.status_code != 200:
            return "refused" if answer.status_code == 429 else f"status {answer.status_code}"
        if not body["stream"]:
            got = answer.json()["usage"]["completion_tokens"]
            return "complete" if got == expected else f"{got} tokens of {expected}"
        lines = answer.aiter_lines()
        while got != leave_after:
            line = await anext(lines, "")
            if line == "data: [DONE]":
                return "complete" if got == expected else f"{got} events of {expected}"
            if not line.startswith('data: {"id"'):
                return f"a stream broken off after {got} events"
            got += 1
            await anext(lines)  # the empty line after each event
        return "left"
    finally:
        await answer.aclose()


async def client(
    http: httpx.AsyncClient, model: str, rng: random.Random, until: float, outcomes: Counter[str]
) -> None:
    while time.monotonic() < until:
        leaves = rng.random() < LEAVE
        leave_after = rng.choice((0, rng.randint(1, 20))) if leaves else None
        try:
            outcome = await ask(http, random_body(model, rng), leave_after)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        outcomes[outcome] += 1


async def idle_occupancy(http: httpx.AsyncClient) -> dict[str, int]:
    """Of the engine, once it is idle or after 20 s."""
    for _ in range(200):
        occupancy: dict[str, int] = (await http.get("/v1/status")).json()["occupancy"]
        if not any(occupancy.values()):
            break
        await asyncio.sleep(0.1)
    return occupancy


async def fill(http: httpx.AsyncClient, model: str) -> dict[str, Any]:
    """Ask until the prefix cache evicts; how many prompts that took, and what it holds."""
    for number in range(FILLS):
        words = [WORDS[(number * 173 + at) % len(WORDS)] for at in range(200)]
        body = {"model": model, "prompt": " ".join([str(number), *words]), "max_tokens": 1}
        (await http.post("/v1/completions", json=body)).raise_for_status()
        prefixes = (await http.get("/v1/status")).json()["engine"]["prefixes"]
        if prefixes["evictions"]:
            return {"prompts": number + 1, "held_tokens": prefixes["held_tokens"]}
    raise RuntimeError(f"the prefix cache is not full after {FILLS} prompts")


async def soak(server: Server, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    endpoint, outcomes, pid = server.endpoint, Counter[str](), server.process.pid
    files, memory, left = [len(os.listdir(f"/proc/{pid}/fd"))], [], Counter[str]()
    rngs = [random.Random(f"{seed}:{index}") for index in range(clients)]
    connect = partial(httpx.AsyncClient, base_url=endpoint.url, timeout=ANSWER_S)
    limits = httpx.Limits(max_connections=None)
    before = resident_mb(pid)
    async with connect() as http:
        filled = await fill(http, endpoint.model)
    filled |= {"rss_mb_before": before, "rss_mb_after": resident_mb(pid)}
    for _ in range(ROUNDS):
        until = time.monotonic() + 60 * minutes / ROUNDS
        async with connect(limits=limits) as http:
            await asyncio.gather(*(client(http, endpoint.model, r, until, outcomes) for r in rngs))
            left.update(await idle_occupancy(http))
            status = (await http.get("/v1/status")).json()
        await asyncio.sleep(1)  # until the server has seen that the connections are closed
        files.append(len(os.listdir(f"/proc/{pid}/fd")))
        memory.append(resident_mb(pid))
    times = [minutes * (done + 1) / ROUNDS for done in range(1, ROUNDS)]
    return {
        "requests": sum(outcomes.values()),
        "outcomes": dict(outcomes.most_common()),
        "left_in_the_engine": dict(left),
        "filled": filled,
        "prefixes": status["engine"]["prefixes"],
        "open_files": files,
        "rss_mb": memory,
        "rss_slope_mb_per_min": linear_regression(times, memory[1:]).slope,
    }


def faults(result: dict[str, Any]) -> list[str]:
    found = [f"{count} x {what}" for what, count in result["outcomes"].items() if what not in FINE]
    found += [f"{value} {key} left" for key, value in result["left_in_the_engine"].items() if value]
    if max(result["open_files"][1:]) > result["open_files"][0]:
        found.append(f"files left open: {result['open_files']}")
    growth = result["rss_mb"][-1] / result["rss_mb"][1] - 1
    if growth > MAX_GROWTH:
        found.append(f"memory grew by {growth:.1%}")
    if result["exit_code"] != 0:
        found.append(f"the server ended with {result['exit_code']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-model")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    os.environ.update(MALLOC)
    with moe_serve(options.model, *SETTINGS, *options.set) as server:  # the last counts
        result = asyncio.run(soak(server, options.minutes, options.clients, options.seed))
    result["exit_code"] = server.process.returncode
    result["faults"] = faults(result)
    print_table("soak", ["figure", "value"], list(result.items()))
    print_json({**facts, "minutes": options.minutes, "clients": options.clients, **result})
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
