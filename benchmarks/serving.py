"""Latency and throughput of a server under load, through OpenAI's API.

    python -m benchmarks.serving [--quick] [--trace sharegpt|arxiv] [--scale S]
                                 [--rate R | --concurrency C]
    python -m benchmarks.serving --url http://HOST:PORT --model NAME [--api-key K] ...

Requests have lengths shaped like a known workload (`benchmarks.traces`) and arrive by a Poisson
process of R a second, or from C clients of which each waits for its answer. Without --url it starts
``moe serve`` on the shipped model, whose context asks for a scale of 1/8.

TTFT is the time to the first token, TBT the time between two tokens of an answer, end to end the
time to the last. Goodput counts requests whose TTFT, and TBT at the 99th percentile, stay within
--ttft and --tbt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.load_generator import Endpoint, Request, Result, closed_load, open_load
from benchmarks.servers import ROOT, moe_serve
from benchmarks.serving_figures import Target, summary
from benchmarks.traces import TRACES, PromptMaker, poisson_arrivals, request_lengths

DEMO_MODEL = ROOT / "examples/demo-model"


def make_requests(
    trace: str, count: int, *, scale: float, context: int, tokenizer: Path, seed: int
) -> list[Request]:
    """Random prompts with the lengths of a trace, and the number of tokens to answer with."""
    lengths = request_lengths(TRACES[trace], count, scale=scale, context=context, seed=seed)
    prompts = PromptMaker(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), seed)
    return [Request(prompts.make(prompt), answer) for prompt, answer in lengths]


def run(
    endpoint: Endpoint,
    requests: list[Request],
    *,
    rate: float | None,
    concurrency: int | None,
    seed: int,
) -> list[Result]:
    """Warm the server up with one short request, then send all of them."""
    warm_up = [Request(requests[0].prompt[:20], 2)]
    asyncio.run(closed_load(endpoint, warm_up, 1))
    if rate is not None:
        arrivals = poisson_arrivals(rate, len(requests), seed)
        return asyncio.run(open_load(endpoint, requests, arrivals))
    assert concurrency is not None
    return asyncio.run(closed_load(endpoint, requests, concurrency))


def print_figures(title: str, figures: dict[str, Any]) -> None:
    rows = [
        (name, *(_milliseconds(value) for value in figures[key].values()))
        for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("end to end", "e2e_s"))
    ]
    print_table(title, ("ms", "p50", "p90", "p99"), rows)
    names = ("requests", "failed", "requests_per_s", "new_tokens_per_s", "all_tokens_per_s")
    print_table("", (*names, "goodput_per_s"), [[figures[n] for n in (*names, "goodput_per_s")]])


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.url is None) != (options.model is None):
        parser.error("--url and --model go together")
    count = options.requests or (32 if options.quick else 128)
    requests = make_requests(
        options.trace,
        count,
        scale=options.scale,
        context=options.context,
        tokenizer=options.tokenizer,
        seed=options.seed,
    )
    rate = options.rate
    if rate is None and options.concurrency is None:
        rate = 4.0
    load = {"rate": rate, "concurrency": options.concurrency}
    target = Target(options.ttft, options.tbt)
    print_header(environment() | {"trace": options.trace, "scale": options.scale} | load)
    with _endpoint(options) as endpoint:
        results = run(endpoint, requests, seed=options.seed, **load)
    for error in sorted({result.error for result in results if result.error}):
        print(f"failed: {error}")
    figures = summary(results, target)
    print_figures(f"{endpoint.model}: {options.trace} x {options.scale:g}", figures)
    print_json(
        {"model": endpoint.model, "trace": options.trace, "scale": options.scale}
        | load
        | {"target": vars(target), "environment": environment()}
        | figures
    )


@contextmanager
def _endpoint(options: argparse.Namespace) -> Iterator[Endpoint]:
    extra = {"ignore_eos": True} if options.ignore_eos or options.url is None else {}
    if options.url is not None:
        yield Endpoint(options.url, options.model, options.api_key, options.chat, extra)
        return
    with moe_serve(DEMO_MODEL) as server:
        yield Endpoint(server.endpoint.url, server.endpoint.model, None, options.chat, extra)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Load a server and time its answers.")
    add = parser.add_argument
    add("--quick", action="store_true", help="32 requests instead of 128")
    add("--url", help="an endpoint that runs already, without /v1")
    add("--model", help="what that endpoint calls its model")
    add("--api-key")
    add("--chat", action="store_true", help="send chats instead of completions")
    add("--ignore-eos", action="store_true", help="ask --url for full-length answers (as vLLM)")
    add("--trace", choices=TRACES, default="sharegpt")
    add("--scale", type=float, default=0.125, help="factor on all lengths (%(default)s)")
    add("--context", type=int, default=2048, help="most tokens of a request (%(default)s)")
    add("--tokenizer", type=Path, default=DEMO_MODEL, help="folder of the model's tokenizer.json")
    add("--requests", type=int)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, help="requests a second (4 unless --concurrency)")
    load.add_argument("--concurrency", type=int, help="requests under way at any time")
    add("--ttft", type=float, default=1.0, help="seconds to a first token that count as good")
    add("--tbt", type=float, default=0.1, help="seconds between tokens that count as good")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
