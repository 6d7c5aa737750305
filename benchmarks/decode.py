"""How fast are decoding and prompts at 8, 4 and 2 bits, against transformers and llama.cpp?

    python -m benchmarks.decode [--quick] [--model 2b|demo|PATH] [--peer transformers,llama.cpp]

Contenders hold the same random weights, all matrices at one width (ours at 2 bits: the experts, the
rest at 4), and take turns in one process: tokens a second at batch 1, 4 and 16, and for prompts of
512 and 2048 tokens. Every sequence reads different random tokens (the same token everywhere would
choose the same experts and flatter everybody). Ours is the whole engine with scheduling, statistics
and the choice of tokens; the peers run their forward pass only.

``bandwidth_fraction`` is bytes read a step (weights of the trunk, distinct experts, keys and
values) over the step's time and the read bandwidth measured in the same run. llama.cpp is measured
where the packages ``llama-cpp-python`` and ``gguf`` are installed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    read_bandwidth,
)
from benchmarks.decode_peers import Contender, LlamaCpp, Tokens, Transformers, write_gguf
from benchmarks.random_models import bench_dir, random_2b
from moe import MoE, SamplingParams
from moe.sampling import Token

ROOT = Path(__file__).parents[1]
BATCHES = (1, 4, 16)
PROMPTS = (512, 2048)
PROMPT = 32  # tokens before decoding starts


class _Given:
    """In a sampler's place: takes the likeliest token's time, gives a token from a list."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = iter(token_ids)

    def sample(self, logits_V: Tensor) -> Token:
        logits_V.argmax().item()
        return Token(next(self._token_ids))


class Ours:
    """This engine at a number of bits; `bytes_a_step` of the last decoding."""

    def __init__(self, path: Path, bits: int | None) -> None:
        self.name = f"moe {bits} bits" if bits else "moe as it is"
        trunk = max(bits or 16, 4)  # the trunk has no 2 bits
        settings = {"expert_bits": bits or 16, "trunk_bits": trunk, "head_bits": trunk}
        self.model = MoE.from_pretrained(path, model=settings, prefill={"mode": "whole"})
        self.bytes_a_step = 0.0

    def prefill(self, prompt: list[int]) -> float:
        engine, start = self.model.engine(), time.perf_counter()
        engine.submit(self.model.request(prompt, SamplingParams(max_new_tokens=1)))
        while not engine.idle:
            engine.step()
        return time.perf_counter() - start

    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        engine = self.model.engine()
        params = SamplingParams(max_new_tokens=len(following[0]) + 1, ignore_eos=True)
        for prompt, tokens in zip(prompts, following, strict=True):
            group = self.model.request(prompt, params)
            group.sequences[0]._sampler = _Given([*tokens, 0])  # type: ignore[assignment]
            engine.submit(group)
        while len(engine.scheduler.running) < len(prompts):
            engine.step()
        before = self.model.stats()["expert_bytes_read"]
        times = []
        while not engine.idle:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        stats = self.model.stats()
        trunk = stats["weight_bytes"] - stats["expert_bytes"] - _embedding_bytes(self.model)
        self.bytes_a_step = trunk + (stats["expert_bytes_read"] - before) / len(times)
        return times


def _embedding_bytes(model: MoE) -> int:
    """Bytes of an input embedding, of which a step reads a few rows; 0 where it is the head's."""
    trunk: Any = model._trunk.model
    table = trunk.get_input_embeddings().weight
    tied = trunk.get_output_embeddings() is not None and trunk.config.tie_word_embeddings
    return 0 if tied else table.numel() * table.element_size()


def contenders(path: Path, options: argparse.Namespace) -> list[Contender]:
    found: list[Contender] = [Ours(path, bits or None) for bits in options.bits]
    if "transformers" in options.peer:
        found += [
            Transformers(path, dtype, "grouped_mm")
            for dtype in (torch.float32, torch.bfloat16)[: 1 if options.quick else 2]
        ]
    if "llama.cpp" in options.peer:
        if not (find_spec("llama_cpp") and find_spec("gguf")):
            print("llama.cpp is left out: pip install llama-cpp-python gguf")
            return found
        for kind in ("Q8_0", "Q4_0"):
            file = bench_dir() / f"{path.name}-{kind}.gguf"
            if not file.exists():
                write_gguf(path, kind, file)
            found.append(LlamaCpp(file, kind, torch.get_num_threads()))
    return found


def measure(
    found: list[Contender], vocab_size: int, rounds: int, steps: int, prompts: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    """Median tokens a second of every contender, by point; in turns, alternating the order."""
    times: dict[str, dict[str, list[float]]] = {}
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    order = list(found)
    for _ in range(rounds):
        for batch in BATCHES:
            rows = [tokens(PROMPT) for _ in range(batch)]
            following = [tokens(steps) for _ in range(batch)]
            for each in order:
                point = times.setdefault(f"decode {batch}", {}).setdefault(each.name, [])
                point += [batch / s for s in each.decode(rows, following)[2:]]
        for length in prompts:
            prompt = tokens(length)
            for each in order:
                point = times.setdefault(f"prompt {length}", {}).setdefault(each.name, [])
                point.append(length / each.prefill(prompt))
        order.reverse()
    return {point: {n: median(v) for n, v in by.items()} for point, by in times.items()}


def fractions(
    ours: list[Ours], rates: dict[str, dict[str, float]], bandwidth: float
) -> dict[str, dict[int, float]]:
    """Share of the read bandwidth while decoding, by contender and batch."""
    draw = random.Random(1)
    shares: dict[str, dict[int, float]] = {}
    for each in ours:
        for batch in BATCHES:
            rows = [[draw.randrange(1, 1000) for _ in range(PROMPT)] for _ in range(batch)]
            each.decode(rows, [row[:8] for row in rows])
            steps = rates[f"decode {batch}"][each.name] / batch
            shares.setdefault(each.name, {})[batch] = each.bytes_a_step * steps / bandwidth / 1e9
    return shares


def by_batch(
    rates: dict[str, dict[str, float]], shares: dict[str, dict[int, float]]
) -> dict[str, Any]:
    """The figures of decoding in the shape of the report."""

    def point(batch: int) -> dict[str, Any]:
        found = {name: round(rate, 2) for name, rate in rates[f"decode {batch}"].items()}
        return {
            "tokens_per_second": {n: found[n] for n in shares},
            "bandwidth_fraction": {n: round(share[batch], 3) for n, share in shares.items()},
            "peers": {n: rate for n, rate in found.items() if n not in shares},
        }

    return {str(batch): point(batch) for batch in BATCHES}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the demo model, few steps")
    parser.add_argument("--model", default=None, help="2b, demo or a folder (default 2b)")
    parser.add_argument("--peer", default="transformers,llama.cpp")
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 2], help="0: as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    if options.quick:
        options.model, options.rounds = options.model or "demo", 1
        options.peer = options.peer.replace("llama.cpp", "")  # the demo model is not its kind
    return options


def model_folder(name: str | None) -> Path | None:
    if name in (None, "2b"):
        return random_2b()
    return ROOT / "examples/demo-model" if name == "demo" else Path(str(name))


def main() -> None:
    options = parse()
    facts = environment()
    print_header(facts)
    path = model_folder(options.model)
    if path is None:
        print_json({**facts, "model": options.model, "skipped": True})
        return
    found = contenders(path, options)
    ours = [each for each in found if isinstance(each, Ours)]
    prompts = (512,) if options.quick else PROMPTS
    rates = measure(found, ours[0].model.codec.vocab_size, options.rounds, options.steps, prompts)
    bandwidth = read_bandwidth()
    shares = fractions(ours, rates, bandwidth)
    print_table(
        f"Tokens a second, {path.name}; memory reads {bandwidth:.1f} GB/s",
        ("", *rates),
        [[each.name, *(f"{by[each.name]:,.1f}" for by in rates.values())] for each in found],
    )
    print_table(
        "Share of the read bandwidth while decoding",
        ("", *(f"batch {batch}" for batch in BATCHES)),
        [[name, *(f"{share:.2f}" for share in by.values())] for name, by in shares.items()],
    )
    print_json(
        {
            **facts,
            "model": path.name,
            "bandwidth_gbps": round(bandwidth, 2),
            "bits": list(options.bits),
            "batch": by_batch(rates, shares),
            "prompt": {str(length): rates[f"prompt {length}"] for length in prompts},
        }
    )


if __name__ == "__main__":
    main()
