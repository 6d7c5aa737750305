"""What is a calibrated cache policy worth that also hears what the default learns on the way?

    python -m benchmarks.cache_mixed [--quick] [--tokens COUNT] [--hidden SIZE] [--held-out]

As `benchmarks.cache_calibrated`, with three differences: the default policy's own estimate of each
unit, which follows the text at hand, is among what the calibrated voice goes by; estimates are
log-odds and the fit is logistic, so that a favour and what the router says multiply; and beside the
linear map there is a small network (``--hidden``, 0 for none). It learns from texts that are
neither held out nor the 12 development texts (768 tokens each) by which choices are made. These are
judged, or with ``--held-out`` the held-out texts of `benchmarks.cache --quick`. The last line is
one JSON object.

Legend: N tokens, V visits, L layers, E experts of a layer, U = L * E units, F estimates, C context.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from benchmarks.cache import MODEL
from benchmarks.cache_calibrated import CAPACITIES, HALF_LIVES, Regressed, asked, show
from benchmarks.cache_heard import DEVELOPMENT, Heard, to_learn_from
from benchmarks.cache_traces import Recorded, other_recordings, recordings
from benchmarks.common import environment, print_header, print_json
from moe import MoE
from moe.selection import find_selectors
from offload.policies import LFU, LRU, ForecastPolicy
from offload.policies.rates import discounts
from offload.replay import belady, hit_ratio

BATCH, EPOCHS, STEP, DROPPED = 1024, 8, 2e-3, 0.1


class Mixed(nn.Module):
    """From ``(V, F, U)`` and ``(V, C)`` clues and ``(V,)`` layers to ``(V, U)`` log-odds."""

    def __init__(self, context: Tensor, layers: int, units: int, hidden: int) -> None:
        super().__init__()
        self._mean, self._deviation = context.mean(0), context.std(0).clamp_min(1e-3)
        self._width, size = units // layers, context.shape[1]
        # Of each estimate, the layer that has just been, and the unit's.
        self.shares = nn.Parameter(torch.full((len(HALF_LIVES) + 1, layers, layers), 0.05))
        self.linear, self.up = nn.Linear(size, units), nn.Linear(size, hidden)
        self.down, self.dropout = nn.Linear(hidden, units, bias=False), nn.Dropout(DROPPED)
        with torch.no_grad():
            self.shares[-1] = 0.7
            for weight in (self.linear.weight, self.linear.bias, self.down.weight):
                weight.zero_()

    def forward(self, estimates: Tensor, context: Tensor, layer: Tensor) -> Tensor:
        rows = self.dropout((context - self._mean) / self._deviation)
        shares = self.shares[:, layer].repeat_interleave(self._width, -1).transpose(0, 1)
        moved = self.linear(rows) + self.down(self.dropout(gelu(self.up(rows))))
        found: Tensor = (shares * estimates).sum(1) + moved
        return found


def fit(texts: Sequence[Heard], hidden: int) -> Mixed:
    """By one visit of each token."""
    torch.manual_seed(0)
    clues = [text.clues() for text in texts]
    estimates, contexts = (torch.cat(parts) for parts in zip(*clues, strict=True))
    soon = torch.cat([text.next_uses() for text in texts])
    layers = torch.cat([text.visits[:, 1] for text in texts])
    model = Mixed(contexts, int(layers.max()) + 1, soon.shape[1], hidden)
    optimiser = torch.optim.AdamW(model.parameters(), lr=STEP, weight_decay=1e-4)
    steps = EPOCHS * (len(soon) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, STEP, total_steps=steps, pct_start=0.1
    )
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(soon))[: len(soon) // BATCH * BATCH].split(BATCH):
            guess = model(estimates[rows], contexts[rows], layers[rows])
            optimiser.zero_grad()
            binary_cross_entropy_with_logits(guess, soon[rows]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def replay(recorded: Recorded, heard: Heard, model: Mixed) -> Iterator[dict[str, Any]]:
    """Of each capacity and policy."""
    layers, width, calls = recorded.num_layers, recorded.width, recorded.calls(1)
    layer = heard.visits[:, 1]
    distance = np.repeat(discounts(layers)[layer], width, 1)
    worth = torch.sigmoid(model(*heard.clues(), layer)).double().numpy() * distance
    for capacity in CAPACITIES:
        slots = int(capacity * layers * width)
        made = (LRU(layers, width), LFU(layers, width), ForecastPolicy(layers, width))
        found = {own.name: hit_ratio(calls, slots, own, width) for own in made}
        found["mixed"] = hit_ratio(calls, slots, Regressed(worth), width)
        best = found["belady"] = belady(calls, slots)
        for name, ratio in found.items():
            gap = round((ratio - found["lru"]) / (best - found["lru"]), 3)
            place = {"trace": recorded.name, "capacity": capacity, "policy": name}
            yield {**place, "hit_ratio": round(ratio, 4), "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little to learn from, short texts")
    parser.add_argument("--tokens", type=int, default=70_000, help="to learn from, of each domain")
    parser.add_argument("--hidden", type=int, default=256, help="units of the network")
    parser.add_argument("--held-out", action="store_true", help="judge held-out text")
    options = parser.parse_args()
    size, count = DEVELOPMENT
    length = 512
    if options.quick:
        options.tokens, options.hidden, length, size, count = 1500, 16, 256, 256, 1
    print_header(environment())
    model = MoE.from_pretrained(str(MODEL))
    with torch.inference_mode():
        learnt = list(to_learn_from(model, options.tokens))
        judged = (
            recordings(model, length) if options.held_out else other_recordings(model, size, count)
        )
        texts = list(judged)
    routers = find_selectors(model.trunk)
    usual = torch.from_numpy(np.concatenate([asked(own) for own in learnt]).mean(0))
    voice = fit([Heard(own, routers, usual, all_visits=False) for own in learnt], options.hidden)
    rows: list[dict[str, Any]] = []
    for own in texts:
        rows += replay(own, Heard(own, routers, usual, all_visits=True), voice)
    print_json({**environment(), "results": rows, "mean_gap_closed_at_batch_1": show(rows)})


if __name__ == "__main__":
    main()
