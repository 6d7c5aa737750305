"""What `/v1/experts/stream` costs a server: nothing without viewers, and with five?

    python -m benchmarks.viewers [--quick] [--viewers 5] [--rounds 8]

One server of the shipped model answers the same requests again and again, in turns with and
without viewers. Times of a busy machine are noise, so the ratio of new tokens for a second of the
server's processor time stands beside that of tokens a second; each is the median over rounds, of
a round with viewers over the one without beside it, and its standard error says what it can
resolve. And the stream by itself, which resolves far less than a percent: the processor time of a
server that does nothing else, in turns with and without viewers. Over the processors that the
server keeps busy under load, that is the stream's share of its time. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, stdev
from typing import Any

import httpx

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.load_generator import Endpoint, Request, closed_load
from benchmarks.servers import Server, moe_serve
from benchmarks.serving import DEMO_MODEL

CLIENTS = 4
RATIOS = ("ratio", "cpu_ratio")


@contextmanager
def watching(url: str, viewers: int) -> Iterator[list[int]]:
    """So many clients that read the stream meanwhile; of each, how many events it got."""
    events, stop = [0] * viewers, threading.Event()

    def view(number: int) -> None:
        with httpx.stream("GET", f"{url}/v1/experts/stream", timeout=None) as response:
            for line in response.iter_lines():
                events[number] += line.startswith("data:")
                if stop.is_set():
                    return

    threads = [threading.Thread(target=view, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    while not all(events):
        time.sleep(0.05)
    yield events
    stop.set()
    for thread in threads:
        thread.join()


def cpu_seconds(server: Server) -> float:
    """Processor time of the server so far, to the nanosecond, with that of threads that ended."""
    scheduler = 2  # as clock_getcpuclockid(3) names the clock of a process on Linux
    return time.clock_gettime((~server.process.pid << 3) | scheduler)


def round_of(server: Server, requests: list[Request], viewers: int) -> tuple[float, float]:
    """New tokens for a second, and for a second of the server's processor time."""
    with watching(server.endpoint.url, viewers):
        start, cpu = time.perf_counter(), cpu_seconds(server)
        results = asyncio.run(closed_load(server.endpoint, requests, CLIENTS))
        seconds, busy = time.perf_counter() - start, cpu_seconds(server) - cpu
    assert not any(result.error for result in results)
    tokens = sum(result.new_tokens for result in results)
    return tokens / seconds, tokens / busy


def idle_share(server: Server, viewers: int, seconds: float) -> float:
    """Share of one processor that a server takes that has no requests."""
    with watching(server.endpoint.url, viewers):
        start, cpu = time.perf_counter(), cpu_seconds(server)
        time.sleep(seconds)
        return (cpu_seconds(server) - cpu) / (time.perf_counter() - start)


def error_of(ratios: list[float]) -> float:
    """Standard error of their median, were they normal; infinite for one."""
    if len(ratios) < 2:
        return float("inf")
    return 1.25 * stdev(ratios) / len(ratios) ** 0.5


def measure(viewers: int, rounds: int, tokens: int, idle_s: float) -> dict[str, Any]:
    """All figures, by name."""
    requests = [Request(f"# {number}\ndef main():", tokens) for number in range(2 * CLIENTS)]
    found: dict[int, list[tuple[float, float]]] = {0: [], viewers: []}
    with moe_serve(DEMO_MODEL) as server:
        endpoint = server.endpoint
        server.endpoint = Endpoint(endpoint.url, endpoint.model, extra={"ignore_eos": True})
        round_of(server, requests, 0)
        for number in range(rounds):
            for count in (0, viewers) if number % 2 else (viewers, 0):
                found[count].append(round_of(server, requests, count))
        rests = [[idle_share(server, count, idle_s) for count in (0, viewers)] for _ in range(3)]
    idle = {count: median(rest[i] for rest in rests) for i, count in enumerate((0, viewers))}
    pairs = list(zip(found[0], found[viewers], strict=True))
    speeds, processor = ([seen[i] / alone[i] for alone, seen in pairs] for i in (0, 1))
    busy = [alone[0] / alone[1] for alone in found[0]]
    return {
        "tokens_per_s": {count: median(a for a, _ in each) for count, each in found.items()},
        "tokens_per_cpu_s": {count: median(b for _, b in each) for count, each in found.items()},
        "ratio": median(speeds),
        "ratio_error": error_of(speeds),
        "cpu_ratio": median(processor),
        "cpu_ratio_error": error_of(processor),
        "idle_cpu_share": idle,
        "busy_processors": median(busy),
        "share": (idle[viewers] - idle[0]) / median(busy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the stream of the experts costs.")
    parser.add_argument("--quick", action="store_true", help="4 rounds")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.quick else 12)
    print_header(environment() | {"viewers": options.viewers, "rounds": rounds})
    figures = measure(options.viewers, rounds, 120, 5.0 if options.quick else 15.0)
    print_table(
        "median of rounds",
        ("viewers", "tokens/s", "tokens a second of processor time", "processor when idle"),
        [
            (
                count,
                *(f"{figures[name][count]:.1f}" for name in ("tokens_per_s", "tokens_per_cpu_s")),
                f"{figures['idle_cpu_share'][count]:.2%}",
            )
            for count in (0, options.viewers)
        ],
    )
    print_table(
        "with viewers over without",
        ("tokens/s", "tokens a second of processor time", "the stream's share of the time"),
        [
            (
                *(f"{figures[n]:.3f} ± {figures[f'{n}_error']:.3f}" for n in RATIOS),
                f"{figures['share']:.2%} ({figures['busy_processors']:.2f} busy)",
            )
        ],
    )
    print_json(figures | {"viewers": options.viewers, "environment": environment()})


if __name__ == "__main__":
    main()
