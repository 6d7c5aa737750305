"""What does a decode step cost beside the weights it reads?

    python -m benchmarks.step_overhead [--quick] [--seconds 4] [--batch 1,4,16]

A random Qwen3-MoE of 16 layers whose weights are next to nothing (hidden size 32, 64 experts of
width 8, top-8), decoded by `Engine.step`: through transformers' own layers and fused
(`engine.fused`), in turns; fused ones as one call, and as they run where somebody acts at the
layers: a call a layer, the experts through the seam. What is left is Python, dispatch and
synchronisation: everything from one token to the next, sampling and routing statistics included,
divided by the number of layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import environment, print_json, print_table, take_turns
from moe import MoE, SamplingParams

LAYERS = 16
CONTEXT = 5
ROOM = 16000
"""Tokens a sequence may get; more than any run makes."""


def tiny_width(folder: str) -> None:
    """Write the model."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        hidden_size=32, num_hidden_layers=LAYERS, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=256, max_position_embeddings=ROOM + 8, tie_word_embeddings=False,
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def decoding(model: MoE, batch: int) -> Callable[[int], object]:
    """A function that decodes one token for each of ``batch`` sequences."""
    engine = model.engine()
    params = SamplingParams(max_new_tokens=ROOM)
    for index in range(batch):
        engine.submit(model.request([1 + index % 7, 2, 3, 4], params))
    while len(engine.scheduler.running) < batch:
        engine.step()
    caches = [sequence.cache for sequence in engine.scheduler.running]

    def step(_call: int) -> None:
        engine.step()
        for cache in caches:
            if cache is not None:
                cache.length = CONTEXT  # so that attention costs the same throughout

    return step


def asking(model: MoE, step: Callable[[int], object]) -> Callable[[int], object]:
    """The same step for somebody who acts at the layers: here, who brings a kernel of his own."""
    own, kernel = model.experts.forward, partial(model.experts.forward)

    def asked(call: int) -> None:
        model.experts.forward = kernel
        step(call)
        model.experts.forward = own

    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one second of each batch size")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each batch size")
    parser.add_argument("--batch", default="1,4,16")
    options = parser.parse_args()
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        tiny_width(folder)
        plain = MoE.from_pretrained(folder, engine={"fused": "off"})
        fused = MoE.from_pretrained(folder)
    for batch in map(int, options.batch.split(",")):
        step = decoding(fused, batch)
        ways = {
            "transformers": decoding(plain, batch),
            "a call a layer": asking(fused, step),
            "one call": step,
        }
        seconds = take_turns(ways, 1.0 if options.quick else options.seconds)
        us = {name: value * 1e6 / LAYERS for name, value in seconds.items()}
        found[str(batch)] = {name: round(value, 1) for name, value in us.items()}
        ratios = [f"{us[name] / us['one call']:.1f}" for name in list(ways)[:2]]
        rows.append([batch, *(f"{value:.0f}" for value in us.values()), *ratios])
    print_table(
        "Microseconds a layer beside the weights",
        ["batch", *ways, "ratio to transformers", "to a call a layer"],
        rows,
    )
    print_json({"us_a_layer": found, "fused": fused.status()["fused"], **environment()})


if __name__ == "__main__":
    main()
