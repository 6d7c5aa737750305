"""One client that sends its worst: how long do the streams of others wait?

    python -m benchmarks.worst_client [--seconds 10] [--streams 2] [--only WORD]

Serves the demo model with few descriptors. A few clients ask for one streamed answer after the
other, first by themselves, then beside one client (a process of its own) that sends one kind of
request at a time, of every route: structures that are slow to follow, texts that are long to
tokenise, answers that take much memory, bodies that never end, connections that say nothing. A
stream's longest gap between two tokens must stay under three times the longest of the quiet times
before and behind it, or 100 ms; the same is asked of the time to the first token, which the rule
does not name. What is under way when a time ends counts, so a stall is seen in full. Ends with exit
code 0 or 1 and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.load_generator import Endpoint, Request, Result, closed_load
from benchmarks.servers import moe_serve
from benchmarks.serving_figures import gaps, ttft

MODEL = Path(__file__).parents[1] / "examples" / "demo-model"
TIMES, LEAST_S = 3.0, 0.1
TOKENS = 64
LONG_TEXT = "a quick brown fox " * 216_000  # 3.9 MB
CHATTY = [{"role": "user", "content": "a quick brown fox "}] * 1000
SILENT = 1100
_FOR_EVER_S = 3600
Worst = Callable[[httpx.AsyncClient], list[Any]]


def _regex(pattern: str) -> dict[str, Any]:
    structure = {"structured_outputs": {"regex": pattern}}
    return {"prompt": "a", "n": 16, "max_tokens": 60, "temperature": 1, **structure}


def _posts(path: str, *bodies: dict[str, Any], times: int = 1) -> Worst:
    return lambda client: [client.post(path, json=body) for body in bodies * times]


def _gets(path: str) -> Worst:
    return lambda client: [client.get(path) for _ in range(32)]


async def _viewer(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/v1/experts/stream") as answer:
        async for _ in answer.aiter_raw():
            pass


async def _half_bodies(client: httpx.AsyncClient) -> None:
    """150 bodies of 5 MB, of which half is sent."""
    await _connections(
        client,
        150,
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nContent-Length: 5000000\r\n\r\n" + b"a" * 2_500_000,
    )


async def _connections(client: httpx.AsyncClient, count: int, sent: bytes = b"") -> None:
    """Open connections, which say no more than this."""
    host, port = client.base_url.host, client.base_url.port
    opened = [await asyncio.open_connection(host, port) for _ in range(count)]
    for _, writer in opened:
        writer.write(sent)
    await asyncio.sleep(_FOR_EVER_S)


WORST: dict[tuple[str, str], Worst] = {
    ("any", f"{SILENT} silent connections"): lambda c: [_connections(c, SILENT)],
    ("/v1/completions", "regex a{900000}"): _posts("/v1/completions", _regex("a{900000}")),
    ("/v1/completions", "regex (ab){300000}"): _posts("/v1/completions", _regex("(ab){300000}")),
    ("/v1/completions", "20 long regexes"): _posts(
        "/v1/completions",
        *(_regex(f"([a-z]{{{20_000 + i}}}|[0-9]{{3,{9_000 + i}}})") for i in range(20)),
    ),
    ("/v1/completions", "n=64, logprobs=20"): _posts(
        "/v1/completions", {"prompt": "a", "n": 64, "max_tokens": 240, "logprobs": 20}
    ),
    ("/v1/completions", "half-sent bodies"): lambda c: [_half_bodies(c)],
    ("/v1/chat/completions", "20 of 1000 messages"): _posts(
        "/v1/chat/completions", {"messages": CHATTY}, times=20
    ),
    ("/v1/responses", "20 of 3.9 MB"): _posts("/v1/responses", {"input": LONG_TEXT}, times=20),
    ("/v1/responses/input_tokens", "20 of 1000 messages"): _posts(
        "/v1/responses/input_tokens", {"input": CHATTY}, times=20
    ),
    ("/v1/messages", "20 of 1000 messages"): _posts(
        "/v1/messages", {"model": MODEL.name, "max_tokens": 9, "messages": CHATTY}, times=20
    ),
    ("/v1/messages/count_tokens", "20 of 1000 messages"): _posts(
        "/v1/messages/count_tokens", {"model": MODEL.name, "messages": CHATTY}, times=20
    ),
    ("/tokenize", "30 of 3.9 MB"): _posts(
        "/tokenize", *({"prompt": f"{i} {LONG_TEXT}"} for i in range(30))
    ),
    ("/detokenize", "20 of a million tokens"): _posts(
        "/detokenize", {"tokens": [300] * 1_000_000}, times=20
    ),
    ("/detokenize", "20 of 130,000 tokens"): _posts(
        "/detokenize", {"tokens": [300] * 130_000}, times=20
    ),
    ("/v1/experts/tokens", "16 long texts"): _posts(
        "/v1/experts/tokens", {"prompt": LONG_TEXT[:2000]}, times=16
    ),
    ("/v1/experts/stream", "64 viewers"): lambda c: [_viewer(c) for _ in range(64)],
    ("/v1/status", "32 at a time"): _gets("/v1/status"),
    ("/metrics", "32 at a time"): _gets("/metrics"),
    ("/v1/models", "32 at a time"): _gets("/v1/models"),
    ("/v1/models/{name}", "32 at a time"): _gets(f"/v1/models/{MODEL.name}"),
    ("/version", "32 at a time"): _gets("/version"),
    ("/health", "32 at a time"): _gets("/health"),
    ("/ready", "32 at a time"): _gets("/ready"),
    ("/openapi.json", "32 at a time"): _gets("/openapi.json"),
}


def check_routes(url: str) -> None:
    """Raise RuntimeError if the server has a route that no worst client asks."""
    paths = httpx.get(f"{url}/openapi.json", timeout=60).json()["paths"]
    left = {path.replace(":path", "") for path in paths} - {route for route, _ in WORST}
    if left:
        raise RuntimeError(f"no worst client asks {sorted(left)}; add some to WORST")


async def worst(url: str, name: str) -> None:
    """Send it again and again until this process is ended; the first line says that it begins."""
    make = next(make for case, make in WORST.items() if " ".join(case) == name)
    print(name, flush=True)
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        while True:
            for answer in await asyncio.gather(*make(client), return_exceptions=True):
                status = getattr(answer, "status_code", type(answer).__name__)
                print(f"{name}: {status}", file=sys.stderr)
            await asyncio.sleep(0.1)


async def watch(endpoint: Endpoint, streams: int, seconds: float) -> dict[str, float]:
    """Longest gap and time to a first token of streams that follow one another."""
    until, results = time.perf_counter() + seconds, list[Result]()
    while time.perf_counter() < until:
        asked = [Request(f"Once upon a time {i}", TOKENS) for i in range(streams)]
        results += await closed_load(endpoint, asked, streams)
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(f"a stream failed: {failed[0]}")
    return {
        "gap_s": max(max(gaps(result)) for result in results),
        "ttft_s": max(map(ttft, results)),
        "answers": len(results),
    }


def main() -> int:
    if sys.argv[1:2] == ["--worst"]:
        asyncio.run(worst(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--descriptors", type=int, default=1024, help="of the server")
    parser.add_argument("--only", metavar="WORD", help="those whose route or name has the word")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    rows = []
    names = [name for name in map(" ".join, WORST) if (options.only or "") in name]
    with moe_serve(MODEL, descriptors=options.descriptors) as server:
        check_routes(server.endpoint.url)
        endpoint = Endpoint(server.endpoint.url, server.endpoint.model, extra={"ignore_eos": True})

        def watched(seconds: float) -> dict[str, float]:
            return asyncio.run(watch(endpoint, options.streams, seconds))

        watched(2)
        quiet = [watched(options.seconds)]
        for name in names:
            command = [sys.executable, "-m", "benchmarks.worst_client", "--worst"]
            client = subprocess.Popen([*command, endpoint.url, name], stdout=subprocess.PIPE)
            try:
                assert client.stdout is not None
                if not client.stdout.readline():
                    raise RuntimeError("the worst client did not begin")
                beside = watched(options.seconds)
            finally:
                client.kill()
                client.wait()
            quiet.append(watched(options.seconds))
            row: dict[str, Any] = {"worst": name}
            for key in ("gap_s", "ttft_s"):
                alone = max(each[key] for each in quiet[-2:])
                row |= {f"{key}_quiet": alone, key: beside[key]}
                row[f"{key}_holds"] = beside[key] <= max(TIMES * alone, LEAST_S)
            rows.append(row)
    print_table("the longest of other streams", list(rows[0]), [list(row.values()) for row in rows])
    print_json({**facts, "rows": rows})
    return int(not all(row["gap_s_holds"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
