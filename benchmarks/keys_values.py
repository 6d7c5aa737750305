"""Keys and values in 32, 16, 8 and 4 bits: what predictions lose, and what decode steps gain.

    python -m benchmarks.keys_values [--quick] [--parts quality,speed,memory,answers]

Quality: the shipped model reads windows of 2,048 held-out tokens with each precision (its weights
whole), and is compared with float32: bits per byte, and how often the likeliest token is the same.
Speed: decode steps of a random model with the attention of Qwen3-30B-A3B (32 heads, 4 of keys, 128
numbers each) and little else, behind a long context; the precisions take turns. Memory: by how much
the process grows with keys and values of one sequence and of four, beside what a plan counts, for
shapes with and without sliding windows, and with a window behind the prompt. Answers: whether
decode steps leave the bits that a prompt would. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    take_turns,
)
from benchmarks.scorer import ROOT, TEXTS
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.kv.visibility import RowVisibility, visibility
from moe.machine import keep_freed_memory
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from routing import Phase

BITS = (32, 16, 8, 4)
WINDOW = 2048


def pool_of(
    bits: int, windows: Windows | None = None, policy: RowVisibility | None = None
) -> BlockPool:
    kernel, why = choose_kernel()
    assert kernel is not None, why
    return BlockPool(HostBlocks(kernel.kv, KVFormat.of_bits(bits)), windows, policy)


def quality(text_bytes: int) -> list[dict[str, Any]]:
    """A row for each precision."""
    model = MoE.from_pretrained(ROOT / "examples/demo-model", memory={"kv_bits": 32})
    windows, num_bytes = [], 0
    for name in TEXTS:
        text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()[:text_bytes]
        ids = model.codec.encode(text)
        whole = range(0, len(ids) - WINDOW + 1, WINDOW - 1)
        windows += [ids[at : at + WINDOW] for at in whole]
        num_bytes += len(text.encode()) * (len(whole) * (WINDOW - 1)) // len(ids)
    scores: dict[int, list[torch.Tensor]] = {bits: [] for bits in BITS}
    likeliest: dict[int, list[torch.Tensor]] = {bits: [] for bits in BITS}
    pools = {bits: pool_of(bits) for bits in BITS}
    for window in windows:
        for bits, pool in pools.items():
            model.backbone.blocks = pool
            logprobs = model.logits(window)[:-1].log_softmax(-1)
            scores[bits].append(logprobs.gather(1, torch.tensor(window[1:])[:, None])[:, 0])
            likeliest[bits].append(logprobs.argmax(-1))
    base, first = torch.cat(scores[32]).double(), torch.cat(likeliest[32])
    rows = []
    for bits in BITS:
        own = torch.cat(scores[bits]).double()
        lost, same = base - own, torch.cat(likeliest[bits]) == first
        rows.append(
            {
                "bits": bits,
                "bits per byte": round(float(-own.sum()) / math.log(2) / num_bytes, 5),
                "worse %": round(100 * float(lost.sum() / -base.sum()), 4),
                "error %": round(100 * float(lost.std() * len(lost) ** 0.5 / -base.sum()), 4),
                "same top-1 %": round(100 * float(same.double().mean()), 3),
                "positions": len(own),
            }
        )  # fmt: skip
    model.close()
    return rows


def answers(tokens: int) -> list[dict[str, Any]]:
    """A row for each width of the trunk and precision: how far the keys and logits of decode steps
    are those of a prompt with the same tokens, which is what `memory.reuse_answers` trades."""
    text = (ROOT / f"tests/data/heldout_{TEXTS[0]}.txt").read_text()[: 20 * tokens]
    found = []
    for trunk in (None, 8, 4):
        for bits in (32, 16):
            settings: dict[str, Any] = {"memory.kv_bits": bits}
            if trunk:
                keys = ("model.trunk_bits", "model.head_bits", "model.expert_bits")
                settings |= dict.fromkeys(keys, trunk)
            with MoE.from_pretrained(ROOT / "examples/demo-model", settings) as model:
                ids = model.codec.encode(text)[:tokens]
                begin = len(ids) // 4 * 3
                whole, rows = read_parts(model, [ids], [])
                stepped, own = read_parts(model, [ids[:begin]], ids[begin:])
            equal = [
                (whole.read(layer, tokens)[0] == stepped.read(layer, tokens)[0])[0, :, begin:]
                for layer in whole.layers
                if isinstance(layer, int)
            ]
            same = [float(layer.all(-1).all(0).double().mean()) for layer in equal]
            wanted = torch.tensor(ids[begin + 1 :])[:, None]
            bits_of = [
                -part[begin:-1].log_softmax(-1).gather(1, wanted).mean() / math.log(2)
                for part in (rows, own)
            ]
            top = (rows[begin:].argmax(-1) == own[begin:].argmax(-1)).double().mean()
            found.append(
                {
                    "trunk and experts": f"{trunk} bits" if trunk else "whole",
                    "keys' bits": bits,
                    "equal keys of the first layer %": round(100 * same[0], 1),
                    "of the last %": round(100 * same[-1], 1),
                    "same top-1 %": round(100 * float(top), 1),
                    "bits a token, worse %": round(100 * float(bits_of[1] / bits_of[0] - 1), 3),
                }
            )
    return found


@torch.inference_mode()
def read_parts(
    model: MoE, prompt: list[list[int]], steps: list[int]
) -> tuple[BlockKVCache, torch.Tensor]:
    """The cache and ``(tokens, V)`` logits of prompt parts and decode steps."""
    work: list[tuple[list[int], Phase]] = [(ids, "prefill") for ids in prompt]
    work += [([token], "decode") for token in steps]
    cache, rows = model.backbone.new_cache(sum(len(ids) for ids, _ in work)), []
    assert isinstance(cache, BlockKVCache)
    for ids, phase in work:
        lanes = model.backbone.lanes([Work(ids, cache, all_logits=True)], phase)
        run_lanes(lanes, model.experts.run)
        rows.append(lanes[0].result()[0])
    return cache, torch.cat(rows)


def attention_bound(layers: int) -> Qwen3MoeForCausalLM:
    """A random model whose decode steps are attention above all."""
    of_any_size: Any = Qwen3MoeConfig
    config = of_any_size(
        hidden_size=256, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=64,
        vocab_size=512, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def speed(context: int, seconds: float, layers: int) -> list[dict[str, Any]]:
    """A row for each precision."""
    with tempfile.TemporaryDirectory() as folder:
        attention_bound(layers).save_pretrained(folder)
        settings = {"memory": {"kv_bits": 32}, "model": {"context_length": context + 64}}
        model = MoE.from_pretrained(folder, settings)
    rows = torch.randn(2, 1, 4, 512, 128)

    def filled(bits: int) -> BlockKVCache:
        cache = pool_of(bits).new_cache(context + 64)
        while cache.length < context:
            for layer in range(layers):
                cache.write(layer, *rows)
            cache.length += 512
        return cache

    caches = {f"{bits} bits": filled(bits) for bits in BITS}

    @torch.inference_mode()
    def step(cache: BlockKVCache) -> None:
        lanes = model.backbone.lanes([Work([7], cache)], "decode")
        run_lanes(lanes, model.experts.run)
        lanes[0].result()
        cache.cut(context)

    def contender(cache: BlockKVCache) -> Callable[[int], object]:
        return lambda _: step(cache)

    times = take_turns({name: contender(cache) for name, cache in caches.items()}, seconds)
    whole = times["32 bits"]
    return [
        {
            "keys and values": name,
            "ms a step": round(1e3 * times[name], 2),
            "times as fast": round(whole / times[name], 2),
            "bytes a token of the 30 B shape": 48 * cache.form.token_bytes(4, 128, 128),
        }
        for name, cache in caches.items()
    ]


class Attention(NamedTuple):
    """Layers of a model; every ``all_every``-th sees all tokens, the others a window. With a
    policy, a quarter of the tokens is left behind the prompt."""

    layers: int
    heads: int
    size: int
    all_every: int = 1
    window: int = 0
    policy: str = ""


SHAPES = {
    "Qwen3-30B-A3B": Attention(48, 4, 128),
    "gpt-oss-20b": Attention(24, 8, 64, 2, 128),
    "five of six with 1,024": Attention(30, 4, 128, 6, 1024),
    "Qwen3-30B-A3B, a window behind the prompt": Attention(48, 4, 128, policy="window"),
    "gpt-oss-20b, the same": Attention(24, 8, 64, 2, 128, "window"),
}


def memory(tokens: int) -> list[dict[str, Any]]:
    """A row for each shape, precision and number of sequences: bytes by the plan's count, and of
    resident memory."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a loaded model does
    found = []
    pool_of(4).new_cache(BLOCK).write(0, *torch.randn(2, 1, 4, BLOCK, 128))  # what is made once
    for (name, shape), sequences in product(SHAPES.items(), (1, 4)):
        length = tokens if sequences == 1 else tokens // 2
        rows = torch.randn(2, 1, shape.heads, BLOCK, shape.size)
        sliding = [layer for layer in range(shape.layers) if (layer + 1) % shape.all_every]
        for bits in reversed(BITS):
            size = KVFormat.of_bits(bits).token_bytes(shape.heads, shape.size, shape.size)
            every = dict.fromkeys(range(shape.layers), size)
            windows = Windows.of(dict.fromkeys(sliding, shape.window), every)
            policy = visibility(f"{shape.policy}:{length // 4}") if shape.policy else None
            end = length + BLOCK
            given_up = (0 if policy is None else end - policy.held(end)) * size
            given_up *= shape.layers - len(sliding)
            pool = pool_of(bits, windows, policy)
            grown = grown_by(pool, sequences, length, shape.layers, rows)
            held = windows.held_tokens(end) * shape.layers * size - given_up
            counted = sequences * held
            found.append(
                {
                    "attention of": name,
                    "sequences": f"{sequences} of {end}",
                    "bits": bits,
                    "all tokens in all layers MB": round(
                        sequences * end * shape.layers * size / 1e6, 2
                    ),
                    "planned MB": round(counted / 1e6, 2),
                    "resident MB": round(grown / 1e6, 2),
                    "more %": round(100 * (grown / counted - 1), 2),
                }
            )
    return found


def grown_by(pool: BlockPool, sequences: int, length: int, layers: int, rows: torch.Tensor) -> int:
    """Resident bytes of sequences of prompts of this length and a block behind them."""
    before = resident_bytes()
    caches = [pool.new_cache(length + BLOCK) for _ in range(sequences)]
    for cache in caches:
        while cache.length < length + BLOCK:
            if cache.length == length:
                cache.prompt_read()
            for layer in range(layers):
                cache.write(layer, *rows)
            cache.length += BLOCK
    return resident_bytes() - before


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text, a short context")
    parser.add_argument("--parts", default="quality,speed,memory,answers")
    parser.add_argument("--bytes", type=int, default=200_000, help="of each of three texts")
    parser.add_argument("--context", type=int, default=8192, help="tokens behind which steps run")
    options = parser.parse_args()
    print_header(environment())
    result: dict[str, Any] = {"environment": environment()}
    if "quality" in options.parts:
        result["quality"] = quality(9_000 if options.quick else options.bytes)
    if "speed" in options.parts:
        context = 1024 if options.quick else options.context
        result["speed"] = speed(context, 2 if options.quick else 20, 2 if options.quick else 4)
    if "memory" in options.parts:
        result["memory"] = memory(1024 if options.quick else 8192)
    if "answers" in options.parts:
        result["answers"] = answers(256 if options.quick else 2048)
    for part in ("quality", "speed", "memory", "answers"):
        if rows := result.get(part):
            print_table(part, list(rows[0]), [list(row.values()) for row in rows])
    print_json(result)


if __name__ == "__main__":
    main()
