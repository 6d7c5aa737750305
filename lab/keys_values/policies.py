"""What do lossy policies on keys and values cost in bits per byte, and how much faster are steps?

    python -m lab.keys_values.policies [--quick] [--parts quality,speed] [--model MODEL]

Quality: the shipped model reads all but the last quarter of 2,048 held-out tokens as a prompt, and
the last quarter by decode steps, whose predictions count; then the same with the first quarter
once more in place of the last, which only those can predict that still find it. Speed: decode
steps of a random model with the attention of Qwen3-30B-A3B, or of a whole one, behind a long
context; the policies take turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    several,
    take_turns,
)
from benchmarks.keys_values import attention_bound
from benchmarks.scorer import ROOT, TEXTS
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import Shape
from moe.kv.visibility import HeadScores, visibility
from moe.memory.kv_precision import KVPrecision
from moe.methods.kv_window.induction import measure_induction
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work

WINDOW = 2048
NAMES = ("window", "select")
HEADS = ("heads:512:2", "heads:256:2")
"""Of the shipped model, which has 12 key heads."""


def policy_pool(
    bits: int,
    spec: str | None,
    shapes: Mapping[int, Shape] | None = None,
    scores: HeadScores | None = None,
) -> BlockPool:
    """
    Args:
        shapes, scores: of the model, for a policy by heads.
    """
    kernel, why = choose_kernel()
    assert kernel is not None, why
    policy = visibility(spec)
    if policy is not None and scores is not None:
        policy = policy.scored(scores)
    kv = KVPrecision(bits, "a contender", True, policy).for_layers(shapes or {})
    return BlockPool(HostBlocks(kernel.kv, kv.form), None, kv.policy, shapes)


class Score(NamedTuple):
    """What decode steps behind some prompts said.

    Attributes:
        bits: per byte.
        held: bytes of keys and values at the end, of a sequence.
        positions: tokens that were predicted.
    """

    bits: float
    held: float
    positions: int


class Steps:
    """The last quarter of windows of held-out text, read by decode steps of the shipped model.

    Args:
        per_text: windows of each text.
    """

    def __init__(self, per_text: int) -> None:
        self.model = MoE.from_pretrained(ROOT / "examples/demo-model", {"memory.kv_bits": 16})
        self.shapes, self.windows = shapes_of(self.model), list[list[int]]()
        for name in TEXTS:
            text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()
            ids = self.model.codec.encode(text)
            cuts = [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(per_text)]
            self.windows += [cut for cut in cuts if len(cut) == WINDOW]

    @torch.inference_mode()
    def score(self, pool: BlockPool, alter: Callable[[BlockKVCache], None] | None = None) -> Score:
        """
        Args:
            alter: changes the keys and values of a prompt that has been read.
        """
        model, begin = self.model, WINDOW * 3 // 4
        model.backbone.blocks = pool
        caches = [self._read(window[: begin - 1]) for window in self.windows]
        for cache in caches:
            cache.prompt_read() if alter is None else alter(cache)
        lost, ends = 0.0, [torch.tensor(window[begin:]) for window in self.windows]
        for at in range(WINDOW - begin):
            work = [
                Work([window[begin - 1 + at]], cache)
                for window, cache in zip(self.windows, caches, strict=True)
            ]
            logits = torch.cat(run(model, work, "decode")).log_softmax(-1)
            wanted = torch.stack([end[at] for end in ends])[:, None]
            lost -= float(logits.gather(1, wanted).double().sum()) / math.log(2)
        held = pool.held_tokens * caches[0].token_bytes / len(caches)
        num_bytes = sum(len(model.codec.decode(end.tolist()).encode()) for end in ends)
        return Score(lost / num_bytes, held, sum(map(len, ends)))

    def _read(self, ids: list[int]) -> BlockKVCache:
        cache = self.model.backbone.new_cache(WINDOW)
        assert isinstance(cache, BlockKVCache)
        run(self.model, [Work(ids, cache)], "prefill")
        return cache


def policy_quality(per_text: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each policy; see `Steps`.

    Args:
        sizes: tokens that policies leave; where text comes again, 512.
    """
    steps, rows = Steps(per_text), []
    induction = measure_induction(steps.model.backbone, steps.model.experts.run, WINDOW)
    ways: list[tuple[int, str | None]] = [(16, None), (8, None)]
    ways += [(16, f"{name}:{size}") for size in sizes for name in NAMES]
    ways += [(8, f"select:{sizes[-1]}"), *((bits, spec) for spec in HEADS for bits in (16, 8))]

    def scored(way: tuple[int, str | None]) -> Score:
        return steps.score(policy_pool(*way, steps.shapes, induction))

    scores = {way: scored(way) for way in ways}
    steps.windows = [[*w[: -WINDOW // 4], *w[: WINDOW // 4]] for w in steps.windows]
    again = {
        way: scored(way) for way in ways if way[1] is None or "512" in way[1] or way[1] in HEADS
    }
    base = scores[ways[0]]
    for (bits, spec), score in scores.items():
        rows.append(
            {
                "policy": spec or "none",
                "bits": bits,
                "bits per byte": round(score.bits, 5),
                "worse %": round(100 * (score.bits / base.bits - 1), 3),
                "of text again": round(again[bits, spec].bits, 5) if (bits, spec) in again else "",
                "KB held": round(score.held / 1e3),
                "positions": score.positions,
            }
        )  # fmt: skip
    steps.model.close()
    return rows


def run(model: MoE, work: list[Work], phase: Any) -> list[torch.Tensor]:
    lanes = model.backbone.lanes(work, phase)
    run_lanes(lanes, model.experts.run)
    return lanes[0].result()


def shapes_of(model: MoE) -> dict[int, Shape]:
    """Of the layers of attention, each of which must see all tokens."""
    cache = model.backbone.new_cache(BLOCK)
    assert isinstance(cache, BlockKVCache)
    assert model.backbone.pool is None or not model.backbone.pool.windows.of_layer
    with torch.inference_mode():
        run(model, [Work([7], cache)], "prefill")
    return {layer: shape for layer, shape in cache.shapes.items() if isinstance(layer, int)}


def policy_speed(
    contexts: list[int], seconds: float, layers: int, path: str | None = None
) -> list[dict[str, Any]]:
    """A row for each context, precision and policy.

    Args:
        path: of a whole model, whose keys and values are made up; None: `attention_bound`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            attention_bound(layers).save_pretrained(folder)
        settings = {"memory.kv_bits": 16, "model.context_length": max(contexts) + 64}
        model = MoE.from_pretrained(path or folder, settings)
    shapes = shapes_of(model)
    rows = {
        shape: [torch.randn(1, shape[0], 512, n) for n in shape[1:]] for shape in shapes.values()
    }
    # Which heads keep all changes no time; as many of ten are kept as the papers keep.
    induction = {layer: tuple(map(float, range(shape.heads))) for layer, shape in shapes.items()}
    kept = max(sum(map(len, induction.values())) // 10, 1)

    def filled(context: int, bits: int, spec: str | None) -> BlockKVCache:
        cache = policy_pool(bits, spec, shapes, induction).new_cache(context + 64)
        while cache.length < context:
            for layer, shape in shapes.items():
                keys, values = rows[shape]
                cache.write(layer, keys, values)
            cache.length += 512
        cache.prompt_read()
        return cache

    def contender(cache: BlockKVCache, context: int) -> Callable[[int], object]:
        @torch.inference_mode()
        def step(_: int) -> None:
            run(model, [Work([7], cache)], "decode")
            cache.cut(context)

        return step

    found = []
    for context in contexts:
        specs = None, "window:2048", "select:2048", f"heads:2048:{kept}"
        names = [(b, spec) for b in (16, 8) for spec in specs]
        caches = {f"{b} bits, {spec or 'all'}": filled(context, b, spec) for b, spec in names}
        times = take_turns({n: contender(cache, context) for n, cache in caches.items()}, seconds)
        for name, cache in caches.items():
            whole = times[f"{name.split(',')[0]}, all"]
            found.append(
                {
                    "context": context,
                    "keys and values": name,
                    "ms a step": round(1e3 * times[name], 2),
                    "times as fast": round(whole / times[name], 2),
                    "MB held": round(cache.held_tokens * cache.token_bytes / 1e6, 1),
                }
            )
        del caches
    model.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text, a short context")
    parser.add_argument("--parts", default="quality,speed")
    parser.add_argument("--contexts", **several(int), default=[8192, 32768])
    parser.add_argument("--model", help="a whole model whose steps are timed")
    options = parser.parse_args()
    print_header(environment())
    result: dict[str, Any] = {"environment": environment()}
    if "quality" in options.parts:
        sizes = (1, [512]) if options.quick else (8, [1024, 256, 512])
        result["policies"] = policy_quality(*sizes)
    if "speed" in options.parts:
        contexts = [2048] if options.quick else options.contexts
        seconds = 1 if options.quick else 20
        result["policy speed"] = policy_speed(contexts, seconds, 2, options.model)
    for part in ("policies", "policy speed"):
        if rows := result.get(part):
            print_table(part, list(rows[0]), [list(row.values()) for row in rows])
    print_json(result)


if __name__ == "__main__":
    main()
