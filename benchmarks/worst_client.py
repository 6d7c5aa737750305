"""One client that sends its worst: how long do the streams of others wait?

    python -m benchmarks.worst_client [--seconds 10] [--streams 2] [--only NAME]

Serves the demo model. A few clients ask for one streamed answer after the other, first by
themselves, then beside one client (a process of its own) that sends one kind of request at a time:
structures that are slow to follow, many long ones, texts that are long to tokenise, answers that
take much memory, bodies that never end. A stream's longest gap between two tokens must stay under
three times the longest of the quiet times before and behind it, or 100 ms; the same is asked of the
time to the first token, which the rule does not name. What is under way when a time ends counts, so
a stall is seen in full. Ends with exit code 0 or 1 and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
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


def _regex(pattern: str) -> dict[str, Any]:
    structure = {"structured_outputs": {"regex": pattern}}
    return {"prompt": "a", "n": 16, "max_tokens": 60, "temperature": 1, **structure}


def _many(client: httpx.AsyncClient, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    return [client.post(path, json=body) for body in bodies]


async def _half_bodies(client: httpx.AsyncClient) -> None:
    """150 bodies of 5 MB, of which half is sent."""
    writers = []
    for _ in range(150):
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 5000000\r\n\r\n" + b"a" * 2_500_000
        )
        writers.append(writer)
    await asyncio.sleep(3600)


WORST = {
    "regex a{900000}": lambda c: _many(c, "/v1/completions", [_regex("a{900000}")]),
    "regex (ab){300000}": lambda c: _many(c, "/v1/completions", [_regex("(ab){300000}")]),
    "20 long regexes": lambda c: _many(
        c,
        "/v1/completions",
        [_regex(f"([a-z]{{{20_000 + i}}}|[0-9]{{3,{9_000 + i}}})") for i in range(20)],
    ),
    "30 tokenize of 3.9 MB": lambda c: _many(
        c, "/tokenize", [{"prompt": f"{i} {LONG_TEXT}"} for i in range(30)]
    ),
    "n=64, logprobs=20": lambda c: _many(
        c, "/v1/completions", [{"prompt": "a", "n": 64, "max_tokens": 240, "logprobs": 20}]
    ),
    "half-sent bodies": lambda c: [_half_bodies(c)],
}


async def worst(url: str, name: str) -> None:
    """Send it again and again until this process is ended; the first line says that it begins."""
    print(name, flush=True)
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        while True:
            for answer in await asyncio.gather(*WORST[name](client), return_exceptions=True):
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
    parser.add_argument("--only", choices=WORST, action="append")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    rows = []
    with moe_serve(MODEL) as server:
        endpoint = Endpoint(server.endpoint.url, server.endpoint.model, extra={"ignore_eos": True})

        def watched(seconds: float) -> dict[str, float]:
            return asyncio.run(watch(endpoint, options.streams, seconds))

        watched(2)
        quiet = [watched(options.seconds)]
        for name in options.only or WORST:
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
            row = {"worst": name}
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
