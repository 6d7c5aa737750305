"""What serving many requests at once brings, and beside transformers' continuous batching.

    python -m benchmarks.batching [--quick] [--model 2b|hybrid|demo|PATH]
        [--prompt 64] [--answer 64]

The same requests, of random words and with answers of a fixed length, go to ``moe serve`` 16 at a
time and one by one, and 16 at a time to ``transformers serve --continuous-batching`` on the same
model, which computes in float32. The three take turns within one run; while one server works, the
other is stopped by a signal.

Throughput is new tokens over the time to the last answer, and over the server's own processor time;
the ratio is that of the first contender to another. Answers are greedy, so they can be compared:
"same" are those that equal the first contender's to the letter.

Two copies of a model must fit in memory. --quick takes the shipped model and shorter answers. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.load_generator import Request, Result, closed_load
from benchmarks.servers import ROOT, Server, ServerError, moe_serve, transformers_serve
from benchmarks.serving_figures import Target, summary
from benchmarks.traces import PromptMaker
from examples.models.random_models import random_2b, random_hybrid, without_end

ANY = Target(float("inf"), float("inf"))


@dataclass
class Contender:
    """A server and how many requests it gets at once."""

    name: str
    server: Server
    concurrency: int
    runs: list[list[Result]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, requests: Sequence[Request]) -> None:
        before = self.server.cpu_seconds()
        load = closed_load(self.server.endpoint, requests, self.concurrency)
        self.runs.append(asyncio.run(load))
        self.cpu_s.append(self.server.cpu_seconds() - before)

    def forget(self) -> None:
        self.runs.clear()
        self.cpu_s.clear()

    def figures(self) -> dict[str, Any]:
        """Medians over the runs; failures of all runs."""
        runs = [summary(results, ANY) for results in self.runs]
        errors = {r.error for results in self.runs for r in results if r.error is not None}
        return {
            "concurrency": self.concurrency,
            "new_tokens_per_s": median(run["new_tokens_per_s"] for run in runs),
            "new_tokens_per_cpu_s": median(
                run["new_tokens"] / seconds for run, seconds in zip(runs, self.cpu_s, strict=True)
            ),
            "ttft_p50_s": median(run["ttft_s"]["p50"] or 0.0 for run in runs),
            "tbt_p50_s": median(run["tbt_s"]["p50"] or 0.0 for run in runs),
            "tbt_p99_s": median(run["tbt_s"]["p99"] or 0.0 for run in runs),
            "e2e_p50_s": median(run["e2e_s"]["p50"] or 0.0 for run in runs),
            "runs_new_tokens_per_s": [run["new_tokens_per_s"] for run in runs],
            "failed": sum(run["failed"] for run in runs),
            "errors": sorted(errors),
        }

    def texts(self) -> list[str]:
        return [result.text for result in self.runs[0]]


def compare(
    model: Path, requests: Sequence[Request], concurrency: int, rounds: int, kv_tokens: int
) -> dict[str, Any]:
    """Figures of every contender that could be run, and the ratios."""
    notice = None
    with ExitStack() as stack:
        ours = stack.enter_context(moe_serve(model))
        contenders = [
            Contender("moe serve, at once", ours, concurrency),
            Contender("moe serve, one by one", ours, 1),
        ]
        try:
            with ours.paused():
                peer = stack.enter_context(transformers_serve(model, 2048, kv_tokens))
            contenders.append(Contender("transformers serve, at once", peer, concurrency))
        except ServerError as error:
            notice = str(error)
        _take_turns(contenders, requests, rounds)
    figures = {contender.name: contender.figures() for contender in contenders}
    first = contenders[0]
    rate = figures[first.name]["new_tokens_per_s"]
    return {
        "contenders": figures,
        "speedup": {c.name: rate / figures[c.name]["new_tokens_per_s"] for c in contenders[1:]},
        "same_answers": {
            c.name: sum(a == b for a, b in zip(first.texts(), c.texts(), strict=True))
            for c in contenders[1:]
        },
        "notice": notice,
    }


def _take_turns(contenders: list[Contender], requests: Sequence[Request], rounds: int) -> None:
    """One short untimed request each, then rounds, every second one backwards."""
    servers = {id(c.server): c.server for c in contenders}
    for turn in range(rounds + 1):
        for contender in contenders if turn % 2 else contenders[::-1]:
            with ExitStack() as others:
                for server in servers.values():
                    if server is not contender.server:
                        others.enter_context(server.paused())
                contender.run(requests if turn else [Request(requests[0].prompt, 2)])
        if turn == 0:
            for contender in contenders:
                contender.forget()


def main() -> None:
    options = _parser().parse_args()
    model = _model("demo" if options.quick else options.model)
    if model is None:
        return
    answer = 24 if options.quick else options.answer
    words = PromptMaker(Tokenizer.from_file(str(model / "tokenizer.json")), seed=1)
    requests = [Request(words.make(options.prompt), answer) for _ in range(options.requests)]
    kv_tokens = 2 * options.concurrency * (options.prompt + answer)
    print_header(environment() | {"model": model.name, "prompt": options.prompt, "answer": answer})
    rounds = 1 if options.quick else options.rounds
    result = compare(model, requests, options.concurrency, rounds, kv_tokens)
    if result["notice"]:
        print(result["notice"])
    rows = []
    for name, figures in result["contenders"].items():
        times = [f"{figures[key] * 1e3:,.0f}" for key in ("ttft_p50_s", "tbt_p50_s", "e2e_p50_s")]
        speedup = result["speedup"].get(name)
        ratio = "" if speedup is None else f"{speedup:.2f} x"
        same = result["same_answers"].get(name, "")
        rates = (figures["new_tokens_per_s"], ratio, figures["new_tokens_per_cpu_s"])
        rows.append((name, *rates, *times, same, figures["failed"]))
    columns = ("", "tokens/s", "ratio", "per CPU s", "TTFT p50", "TBT p50", "answer p50")
    print_table(f"{options.requests} requests, ms", (*columns, "same", "failed"), rows)
    shape = {"prompt_tokens": options.prompt, "new_tokens": answer, "requests": options.requests}
    print_json({"model": model.name} | shape | {"environment": environment()} | result)


def _model(name: str) -> Path | None:
    if name in ("2b", "hybrid"):
        return random_2b() if name == "2b" else random_hybrid()
    return without_end(ROOT / "examples/demo-model" if name == "demo" else Path(name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Requests at once against one by one.")
    add = parser.add_argument
    add("--quick", action="store_true", help="the shipped model, one round, short answers")
    add("--model", default="2b", help="2b, hybrid (random), demo or a folder (%(default)s)")
    add("--prompt", type=int, default=64, help="tokens of each prompt (%(default)s)")
    add("--answer", type=int, default=64, help="tokens of each answer (%(default)s)")
    add("--requests", type=int, default=16)
    add("--concurrency", type=int, default=16)
    add("--rounds", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
