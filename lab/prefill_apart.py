"""Does a prefill server beside a decode server pay? Tokens of chats, beside long prompts.

    python -m lab.prefill_apart [--quick] [--rounds 4] [--clients 2] [--prompt 1500]

Clients ask for long answers to short prompts, one after another, while prompts of many tokens come
in between. The same requests go, in turns, to one engine with two threads, and to a decode server
with a prefill server behind it (`methods.prefill_apart`), of one thread each. TBT is the time
between two tokens of the clients' answers, TTFT that to the long prompts' first token. Servers
whose turn it is not are stopped. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from contextlib import ExitStack
from itertools import count
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.load_generator import Endpoint, Request, Result, closed_load, open_load
from benchmarks.servers import Server, moe_serve
from benchmarks.serving import DEMO_MODEL
from benchmarks.serving_figures import gaps, percentiles, ttft
from benchmarks.traces import PromptMaker

ONE, APART = "one engine, 2 threads", "decode and prefill, 1 thread each"
ROOM = ("memory.prefix_tokens=16384", "memory.kv_tokens=32768")
_seeds = count()


async def load(
    endpoint: Endpoint, clients: int, answers: int, longs: list[Request], every_s: float
) -> tuple[list[Result], list[Result]]:
    """Results of the clients, and of the long prompts."""
    shorts = [Request(f"# {number}\ndef main():", answers) for number in range(3 * clients)]
    arrivals = [every_s * (number + 0.5) for number in range(len(longs))]
    return await asyncio.gather(
        closed_load(endpoint, shorts, clients), open_load(endpoint, longs, arrivals)
    )


def figures(shorts: list[Result], longs: list[Result]) -> dict[str, Any]:
    assert not any(result.error for result in [*shorts, *longs])
    seconds = max(r.ended for r in shorts) - min(r.sent for r in shorts)
    return {
        "tbt": percentiles([gap for result in shorts for gap in gaps(result)]),
        "ttft_p50": median(map(ttft, longs)),
        "tokens_per_s": sum(result.new_tokens for result in shorts) / seconds,
    }


def measure(rounds: int, clients: int, prompt: int, answers: int, num_longs: int) -> dict[str, Any]:
    """Of each side, a list of `figures`, one of each round."""
    os.environ["MOE_LAUNCH_SECRET"] = secrets.token_hex(16)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    found: dict[str, list[dict[str, Any]]] = {ONE: [], APART: []}
    with ExitStack() as stack:

        def start(threads: int, *settings: str) -> Server:
            made = moe_serve(DEMO_MODEL, f"threads={threads}", *ROOM, *settings)
            return stack.enter_context(made)

        one = start(2)
        key = "methods.prefill_apart"
        prefill = start(1, f"{key}.role=prefill")
        servers = f"{key}.servers=[{prefill.endpoint.url}]"
        decode = start(1, f"{key}.role=decode", servers, f"{key}.tokens=256")
        sides = {ONE: [one], APART: [decode, prefill]}
        for number in range(-1, rounds):  # the first is not counted
            for side in (ONE, APART) if number % 2 else (APART, ONE):
                with ExitStack() as resting:
                    for other in (s for name in sides if name != side for s in sides[name]):
                        resting.enter_context(other.paused())
                    time.sleep(0.2)
                    maker = PromptMaker(tokenizer, next(_seeds))
                    longs = [Request(maker.make(prompt), 1) for _ in range(num_longs)]
                    at = sides[side][0].endpoint
                    endpoint = Endpoint(at.url, at.model, extra={"ignore_eos": True})
                    results = asyncio.run(load(endpoint, clients, answers, longs, 0.8))
                if number >= 0:
                    found[side].append(figures(*results))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill and decode apart, or in one engine.")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 6)
    print_header(environment() | {"rounds": rounds, "clients": options.clients})
    found = measure(rounds, options.clients, options.prompt, 400, 6)
    rows = []
    for side, each in found.items():
        times = [1e3 * median(one["tbt"][p] for one in each) for p in ("p50", "p90", "p99")]
        first, speed = (median(one[key] for one in each) for key in ("ttft_p50", "tokens_per_s"))
        rows.append((side, *(f"{t:.1f}" for t in times), f"{1e3 * first:.0f}", f"{speed:.0f}"))
    columns = ("", "TBT p50, ms", "p90", "p99", "TTFT of long prompts", "tokens/s")
    print_table("median of rounds", columns, rows)
    ratios = [
        apart["tbt"]["p99"] / one["tbt"]["p99"]
        for one, apart in zip(found[ONE], found[APART], strict=True)
    ]
    print_table("TBT p99, apart over one engine", ("median",), [(f"{median(ratios):.2f}",)])
    print_json({"sides": found, "p99_ratio": median(ratios), "environment": environment()})


if __name__ == "__main__":
    main()
