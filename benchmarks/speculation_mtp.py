"""Does the shipped model's multi-token-prediction layer pay with all experts in memory?

On each of the three held-out domains, greedily and at temperature 0.8: the share of drafted tokens
accepted, by position, and tokens a second against no drafts, contenders alternating in drawn order.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation_mtp --rounds 5 --batches 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import environment, print_json
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.runner import ModelRunner
from moe.network.mtp import MtpHead
from moe.settings import SpeculationSettings
from moe.speculate import Speculator, enable_speculation
from moe.speculate.draft import FixedDepth, Mode
from moe.speculate.mtp import MtpDrafts

ROOT = Path(__file__).parents[1]
DOMAINS = ("prose", "python", "cpp")
PROMPT = 96


def prompts_of(model: MoE, domain: str, count: int, draw: random.Random) -> list[list[int]]:
    """Parts of a domain's held-out text."""
    text = (ROOT / f"tests/data/heldout_{domain}.txt").read_text("utf-8")
    ids = model.codec.encode(text)
    starts = [draw.randrange(len(ids) - PROMPT) for _ in range(count)]
    return [ids[start : start + PROMPT] for start in starts]


def run(
    model: MoE, speculator: Speculator | None, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    """Tokens a second of the steps in which all sequences decode, and the tokens."""
    engine = model.engine(drafts=False)
    assert isinstance(engine, Engine)
    loaded = model._loaded
    engine.runner = ModelRunner(loaded.backbone, loaded.experts, speculator)
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    while len(engine.scheduler.running) < len(prompts):
        engine.step()
    start, count = time.perf_counter(), 0
    while len(engine.scheduler.running) == len(prompts):
        count += len(engine.step())
    rate = count / (time.perf_counter() - start)
    while not engine.idle:
        engine.step()
    return rate, [group.sequences[0].token_ids for group in groups]


def contenders(model: MoE, head: MtpHead, depths: Sequence[int]) -> dict[str, Speculator]:
    """The layer at fixed depths, and the controller."""
    loaded, made = model._loaded, dict[str, Speculator]()
    for depth in depths:
        control = FixedDepth(Mode("mtp"), depth)
        made[f"mtp {depth}"] = Speculator(control, {"mtp": MtpDrafts(head)}, [], depth)
    auto = enable_speculation(
        SpeculationSettings(mode="auto"), loaded.backbone, loaded.experts, loaded.backend.forward,
        head,
    )  # fmt: skip
    assert auto.speculator is not None
    return made | {"auto": auto.speculator}


def measure(
    plain: MoE, model: MoE, domain: str, temperature: float, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Rates of all contenders relative to none's of the same round; medians of rounds."""
    head = model._loaded.mtp
    assert isinstance(head, MtpHead), head
    made = contenders(model, head, args.depths)
    params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, ignore_eos=True)
    draw = random.Random(f"{domain} {batch}")
    ratios: dict[str, list[float]] = {name: [] for name in made}
    rates, equal = [], True
    for round in range(args.rounds + 1):  # the first is a warm-up
        prompts = prompts_of(model, domain, batch, draw)
        order: list[str] = ["none", *made]
        draw.shuffle(order)
        found: dict[str, tuple[float, list[list[int]]]] = {}
        for name in order:
            speculator = made.get(name)
            found[name] = run(model if speculator else plain, speculator, prompts, params)
        if round:
            rates.append(found["none"][0])
            for name in made:
                ratios[name].append(found[name][0] / found["none"][0])
        if not temperature:
            equal &= all(found[name][1] == found["none"][1] for name in made)
    return {
        "domain": domain, "temperature": temperature, "batch": batch, "equal": equal,
        "none": median(rates), "gain": {name: median(each) for name, each in ratios.items()},
        "least": {name: min(each) for name, each in ratios.items()},
        "accepted": {name: by_position(one, name) for name, one in made.items()},
    }  # fmt: skip


def by_position(speculator: Speculator, name: str) -> Mapping[str, list[float]]:
    """Of each mode the acceptance at each position, among drafts accepted up to it."""
    return {
        mode: [round(position["acceptance"], 3) for position in record["by_position"]]
        for mode, record in speculator.figures()["modes"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The multi-token-prediction layer, measured.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--expert-bits", type=int, default=None, help="default: as stored")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    args = parser.parse_args()
    bits = {"model": {"expert_bits": args.expert_bits}}
    plain = MoE.from_pretrained(args.model, bits, speculation={"mode": "off"})
    model = MoE.from_pretrained(args.model, bits, speculation={"mode": "auto"})
    results = []
    for batch in args.batches:
        for temperature in args.temperatures:
            for domain in args.domains:
                found = measure(plain, model, domain, temperature, batch, args)
                gains = ", ".join(f"{name} {gain:.2f}" for name, gain in found["gain"].items())
                print(
                    f"{domain}, T {temperature:g}, batch {batch}: none {found['none']:.0f} "
                    f"tokens/s; of it {gains}; accepted {found['accepted']}"
                    f"{'' if found['equal'] else '; TOKENS DIFFER'}",
                    flush=True,
                )
                results.append(found)
    print_json({"environment": environment(), "results": results})


if __name__ == "__main__":
    main()
