"""Early-residual adapters predict what a later layer's router will read (M2R2, arXiv 2502.02040).

    python -m lab.routers.early_residual MODEL [--rate N] [--rank N]

A reading of the abstract: a second stream runs ahead of the residual stream. At each layer a small
adapter, which sees that stream and what the layer's attention adds, is trained to make it what the
residual will be after ``rate`` times as many layers. That later layer's norm and gate then name its
experts early. The model is left as it is. Prints the recall of the experts that the layer chose,
beside that of the raw residual in the same gate. Legend: T tokens, H hidden, E experts, K top_k.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize, silu
from transformers import AutoModelForCausalLM

from lab.routers import LabForCausalLM
from lab.routers.train import LENGTH, load_corpus

LEARNT, ASKED = 24, 8
"""Windows a batch of training text and held-out text."""


class FastStream(nn.Module):
    """``p_i = h_i + v_i`` with ``v_0 = 0``, ``v_{i+1} = v_i + adapter_i(p_i, attention_i)``;
    ``p_i`` is to be ``h_{R i}``."""

    def __init__(self, size: int, layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(2 * size, rank) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, size) for _ in range(layers))
        for up in self.up:
            nn.init.zeros_(up.weight)  # type: ignore[arg-type]
            nn.init.zeros_(up.bias)  # type: ignore[arg-type]

    def forward(self, residual: Sequence[Tensor], attention: Sequence[Tensor]) -> list[Tensor]:
        """``p_0``, ``p_1``, ..., each ``(T, H)``.

        Args:
            residual, attention: by layer, ``(T, H)``: what enters it, and what its attention adds.
        """
        lead, states = torch.zeros_like(residual[0]), [residual[0]]
        for i, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            lead = lead + up(silu(down(torch.cat([states[i], attention[i]], -1))))
            states.append(residual[i + 1] + lead)
        return states


class Seen(NamedTuple):
    """What passed through a model, by layer."""

    residual: list[Tensor]  # (T, H), what enters it
    attention: list[Tensor]  # (T, H), what its attention adds
    chosen: list[Tensor]  # (T, K) ids


@torch.inference_mode()
def watch(model: LabForCausalLM, batch: Tensor) -> Seen:
    seen = Seen([], [], [])
    hooks = []
    for layer in model.model.layers:
        hooks += [
            layer.register_forward_pre_hook(lambda _, x: seen.residual.append(x[0].flatten(0, 1))),
            layer.self_attn.register_forward_hook(
                lambda _, x, y: seen.attention.append(y[0].flatten(0, 1))
            ),
            layer.mlp.gate.register_forward_hook(lambda _, x, y: seen.chosen.append(y[2])),
        ]
    model(batch)
    for hook in hooks:
        hook.remove()
    return seen


def gate(model: LabForCausalLM, layer: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``(T, E)`` and chosen ids ``(T, K)`` of a layer's router for a residual ``(T, H)``."""
    block = model.model.layers[layer]
    logits, _, ids = block.mlp.gate(block.post_attention_layernorm(state))
    return logits, ids


def fit(model: LabForCausalLM, batches: Sequence[Tensor], rate: int, rank: int) -> FastStream:
    """Adapters for the layers whose target is in the model."""
    layers = (len(model.model.layers) - 1) // rate
    stream = FastStream(model.config.hidden_size, layers, rank)
    optimizer = torch.optim.AdamW(stream.parameters(), lr=3e-3, weight_decay=0.0)
    for batch in batches:
        seen = watch(model, batch)
        states = stream(
            *([rows.clone() for rows in own] for own in (seen.residual, seen.attention))
        )
        loss = torch.zeros(())
        for i, state in enumerate(states[1:], 1):
            target = normalize(seen.residual[rate * i].clone(), dim=-1)
            loss = loss + (normalize(state, dim=-1) - target).square().sum(-1).mean()
            logits, _ = gate(model, rate * i, state)
            chosen = torch.zeros_like(logits).scatter(-1, seen.chosen[rate * i].clone(), 1.0)
            loss = loss + binary_cross_entropy_with_logits(logits, chosen)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return stream


@torch.inference_mode()
def recall(model: LabForCausalLM, stream: FastStream, batch: Tensor, rate: int) -> dict[str, float]:
    """Share of a later layer's experts among the K that its gate names for the state at layer i."""
    seen, found = watch(model, batch), {}
    states = stream(seen.residual, seen.attention)
    for i in range(1, len(states)):
        for name, state in (("raw", seen.residual[i]), ("adapted", states[i])):
            _, named = gate(model, rate * i, state)
            hits = (seen.chosen[rate * i][:, :, None] == named[:, None]).any(-1)
            found[f"{name}, layer {i} for {rate * i}"] = round(float(hits.float().mean()), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, help="a model of lab.routers.train with softmax routers"
    )
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-lab")
    parser.add_argument("--rate", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model).eval()
    corpus = load_corpus(options.work)
    text = torch.cat([tokens.long() for tokens in corpus.train.values()])
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (options.steps, LEARNT), generator=generator)
    batches = [torch.stack([text[s : s + LENGTH] for s in row.tolist()]) for row in starts]
    stream = fit(model, batches, options.rate, options.rank)
    held = [tokens.long()[: ASKED * LENGTH].view(-1, LENGTH) for tokens in corpus.heldout.values()]
    print(json.dumps(recall(model, stream, torch.cat(held), options.rate)))


if __name__ == "__main__":
    main()
