"""Train one router of the laboratory: the same text in the same order for all.

    python -m lab.routers.train ROUTER --out DIR [--seed N] [--steps N] [--layers N]

About half a million parameters a layer and a few hundred steps: minutes on one core. The directory
is a checkpoint (`lab.routers` says how to load it), and ``DIR/earlier`` the same model at three
quarters of its training. The text is that of ``examples/train_demo.py``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples import demo_data as data
from examples.train_demo import build_optimizer
from lab.routers import LabConfig, LabForCausalLM
from lab.routers.objectives import (
    Routed,
    budget_loss,
    chunk_loss,
    locality_loss,
    switch_loss,
    watched_routers,
)
from lab.routers.routers import Step, bias_step, dual_rate
from lab.routers.variants import BASE, VARIANTS, Variant

REPO = Path(__file__).resolve().parents[2]
LENGTH, BATCH, VOCABULARY = 128, 8, 1024
WARMUP, DECAY_SHARE = 40, 0.45
EARLIER = 0.75
"""Of the steps, at which the earlier model is kept."""


def load_corpus(work: Path, quick: bool = False) -> data.Corpus:
    """Text with a small vocabulary; built once in ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    return data.load_corpus(work, REPO / "tests/data", VOCABULARY, quick)


def build_model(
    variant: Variant, vocabulary: int, end: int, seed: int, layers: int | None = None
) -> LabForCausalLM:
    """An untrained model; ``layers``: how many instead of those of `BASE`."""
    torch.manual_seed(seed)
    ids: dict[str, Any] = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    deep = {} if layers is None else {"num_hidden_layers": layers}
    settings = {**ids, **BASE, **variant.config, **deep}
    return LabForCausalLM(LabConfig(vocab_size=vocabulary, **settings))


def losses(variant: Variant, calls: list[Routed]) -> Tensor:
    """The auxiliary losses of the variant."""
    total = torch.zeros(())
    for call in calls:
        if variant.switch:
            total = total + variant.switch * switch_loss(call)
        if variant.locality:
            total = total + variant.locality * locality_loss(call.logits, BATCH)
        if variant.chunk:
            total = total + variant.chunk * chunk_loss(call.logits)
    if variant.big_share is not None:
        total = total + budget_loss(torch.cat([call.logits for call in calls]), variant.big_share)
    return total


@torch.no_grad()
def balance(variant: Variant, calls: list[Routed], step: int) -> None:
    """Move the selection biases by the tokens that each expert got in this step."""
    if variant.bias is None:
        return
    rate = dual_rate(step, variant.bias_rate) if variant.bias == "dual" else variant.bias_rate
    how: Step = "sign" if variant.bias == "sign" else "error"
    for call in calls:
        tokens = call.routing.tokens_per_expert(call.router.num_experts)
        call.router.bias.copy_(bias_step(call.router.bias, tokens, rate, how))


def learning_rate(step: int, steps: int) -> float:
    """Share of the full rate: a warm-up, constant, then linearly to zero."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY_SHARE * steps))


def training_step(
    model: LabForCausalLM, variant: Variant, calls: list[Routed], batch: Tensor,
    optimizer: torch.optim.Optimizer, step: int,
) -> float:  # fmt: skip
    """Nats of a token of the text, before the step.

    Args:
        calls: of the model's routers (`watched_routers`), none so far.
        batch: ``(B, S)`` token ids.
    """
    logits = model(batch).logits[:, :-1].flatten(0, 1)
    nats = cross_entropy(logits, batch[:, 1:].flatten())
    (nats + losses(variant, calls)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    balance(variant, calls, step + 1)
    return nats.item()


def train(
    name: str, corpus: data.Corpus, out: Path, *,
    seed: int = 0, steps: int = 300, lr: float = 6e-3, layers: int | None = None,
) -> None:  # fmt: skip
    """Train a variant and save it, and its earlier self, to ``out``."""
    variant, end = VARIANTS[name], corpus.tokenizer.eos_token_id
    model = build_model(variant, len(corpus.tokenizer), end, seed, layers)
    optimizer = build_optimizer(model, lr)
    streams, started = list(corpus.train.values()), time.time()
    model.train()
    with watched_routers(model) as calls:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate(step, steps)
            batch = data.training_batch(streams, LENGTH, BATCH, step, seed)
            nats = training_step(model, variant, calls, batch, optimizer, step)
            if (step + 1) % 50 == 0 or step + 1 == steps:
                used = sum(int((c.routing.weights != 0).sum()) for c in calls) / len(calls)
                print(
                    f"{name} seed {seed} step {step + 1}/{steps} loss {nats:.3f} experts a "
                    f"token {used / batch.numel():.2f} {time.time() - started:.0f} s",
                    flush=True,
                )
            calls.clear()
            if step + 1 == int(EARLIER * steps):
                model.save_pretrained(out / "earlier")
    model.save_pretrained(out)
    corpus.tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("router", choices=VARIANTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-lab")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, help="8: 3.7 M parameters (default), 4: 1.9 M")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(
        options.router, load_corpus(options.work), options.out,
        seed=options.seed, steps=options.steps, layers=options.layers,
    )  # fmt: skip


if __name__ == "__main__":
    main()
