"""What would a calibrated cache policy be worth? Next uses, regressed on all that the router says.

    python -m benchmarks.cache_calibrated [--quick] [--texts COUNT] [--tokens COUNT]

The shipped model reads other text of each domain than it is evaluated on (4,096 tokens, so many
times; with ``--quick`` too little to learn much from). For each layer a ridge regression learns how
soon its units are asked for next (`DISCOUNT` to the power of the visits until then) from what is
known behind a visit of any layer. Then the held-out text is replayed, and what is asked for last by
the regression is evicted. It goes by `frequencies` (how often each of the layer's experts was asked
for, over memories of five lengths), with the router's `scores` of all experts when each layer was
visited last, with `all` (also those of the visit before, the token, and the row that the last
layer's experts read, which is nearest to what the model says next). Hit ratios and the share of the
gap from LRU to Belady closed, at batch 1, beside the default policy. The last line is one JSON
object.

Legend: N tokens, L layers, E experts of a layer, U = L * E units, F features.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

from benchmarks.cache import MODEL
from benchmarks.cache_traces import Recorded, other_recordings, recordings
from benchmarks.common import environment, print_header, print_json, print_table
from moe import MoE
from moe.calibrate.calibrate import token_vectors
from moe.selection import FoundSelector, find_selectors
from offload.policies import LFU, LRU, ForecastPolicy
from offload.policies.rates import discounts
from offload.replay import belady, hit_ratio

CAPACITIES = (0.25, 0.5)
HALF_LIVES = (1.5, 5.0, 20.0, 80.0, 300.0)
DISCOUNT, RIDGE = 0.85, 30.0
VECTOR = 128
KINDS = ("frequencies", "+ scores", "+ all")

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Known:
    """What is known of a recorded text behind each visit of a layer, as features.

    Args:
        asked: ``(N, U)``, 1 for each unit that a token asked for.
        scores: ``(N, U)``, the router's.
        token, last: ``(N, anything)``, of each token its vector and the last layer's row.
        width: E.
        usual: ``(U,)``, how often each unit is asked for, where nothing has been seen yet.
    """

    def __init__(
        self, asked: Floats, scores: Floats, token: Floats, last: Floats, width: int, usual: Floats
    ) -> None:
        self.asked, self._token, self._width = asked, token, width
        self._layers = asked.shape[1] // width
        memories = np.stack([often(asked, each, usual) for each in HALF_LIVES], 1)
        # Rows of two tokens before the first: nothing was known then.
        first = np.broadcast_to(usual, (2, len(HALF_LIVES), len(usual)))
        self._often = np.concatenate([first, memories])
        self._scores, self._last = (np.pad(rows, ((2, 0), (0, 0))) for rows in (scores, last))

    def visits(self) -> tuple[Ints, Ints]:
        """``(N * L,)`` token and layer of each visit, in their order."""
        tokens, layers = np.divmod(np.arange(len(self.asked) * self._layers), self._layers)
        return tokens, layers

    def sample(self) -> tuple[Ints, Ints]:
        """One visit of each token, all layers in turn."""
        tokens = np.arange(len(self.asked))
        return tokens, tokens % self._layers

    def features(self, target: int, kinds: int, tokens: Ints, layers: Ints) -> Floats:
        """``(visits, F)`` for the units of a layer."""
        own = slice(target * self._width, (target + 1) * self._width)
        at = tokens + 2
        parts = [self._often[at - (target > layers), :, own].reshape(len(tokens), -1)]
        if kinds > 1:
            been = np.arange(self._scores.shape[1]) // self._width <= layers[:, None]
            now, before = self._scores[at], self._scores[at - 1]
            parts.append(np.where(been, now, before))
        if kinds > 2:
            parts.append(np.where(been, before, self._scores[at - 2]))
            parts += [self._token[tokens], self._last[at - (layers < self._layers - 1)]]
        return np.concatenate([*parts, np.ones((len(tokens), 1), np.float32)], 1)

    def next_uses(self, target: int, tokens: Ints, layers: Ints) -> Floats:
        """``(visits, E)``: how soon each unit of a layer is asked for."""
        own = self.asked[:, target * self._width : (target + 1) * self._width]
        soon = np.empty((len(own) + 1, self._width), np.float32)
        soon[-1] = own.mean(0)
        for token in range(len(own) - 1, -1, -1):
            soon[token] = own[token] + (1 - own[token]) * DISCOUNT * soon[token + 1]
        return soon[tokens + (target <= layers)]


def known(recorded: Recorded, model: MoE, vectors: torch.Tensor, usual: Floats) -> Known:
    """Of a text that the model has read."""
    trace = recorded.trace
    assert trace.rows is not None
    return Known(
        asked(recorded),
        scores(recorded, find_selectors(model.trunk)),
        vectors[trace.token_ids.long()].numpy(),
        trace.rows.read[-1].float().numpy(),
        recorded.width,
        usual,
    )


def scores(recorded: Recorded, routers: Sequence[FoundSelector]) -> Floats:
    """``(N, U)``: what each layer's router gave to its experts, less its mean."""
    assert recorded.trace.rows is not None
    found = []
    for router, rows in zip(routers, recorded.trace.rows.read, strict=True):
        assert router.selector is not None
        own = linear(rows.float(), router.selector.weight.float(), router.selector.bias)
        found.append(own - own.mean(-1, keepdim=True))
    return torch.cat(found, 1).numpy()


def asked(recorded: Recorded) -> Floats:
    """``(N, U)``, 1 for each unit that a token asked for."""
    experts = torch.stack(recorded.trace.expert_ids, 1).long()
    found = torch.zeros(*experts.shape[:2], recorded.width + 1)
    found.scatter_(2, torch.where(experts < 0, recorded.width, experts), 1.0)
    return found[..., :-1].flatten(1).numpy()


def fit(texts: Sequence[Known], target: int, kinds: int) -> Floats:
    """``(F, E)`` weights of a ridge regression for the units of a layer."""
    moments: Any = 0.0
    products: Any = 0.0
    for heard in texts:
        visits = heard.sample()
        features = heard.features(target, kinds, *visits)
        moments = moments + features.T @ features
        products = products + features.T @ heard.next_uses(target, *visits)
    moments += RIDGE * np.eye(len(moments), dtype=np.float32)
    return np.linalg.solve(moments.astype(np.float64), products).astype(np.float32)


class Regressed:
    """A policy that was told what each unit is worth behind every call."""

    name = "regressed"

    def __init__(self, values: NDArray[np.float64]) -> None:
        self._values, self._call = values, -1

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._call += 1

    def values(self) -> NDArray[np.float64]:
        return self._values[self._call]

    def bid(self, unit: int, probability: float) -> float:
        return probability


def replay(
    recorded: Recorded, heard: Known, weights: Sequence[Sequence[Floats]]
) -> list[dict[str, Any]]:
    """Of every capacity and policy; weights by kinds and layer."""
    layers, width, calls = recorded.num_layers, recorded.width, recorded.calls(1)
    distance = np.tile(np.repeat(discounts(layers), width, 1), (len(heard.asked), 1))
    worths = []
    for kinds, by_layer in enumerate(weights, 1):
        soon = [
            heard.features(target, kinds, *heard.visits()) @ own
            for target, own in enumerate(by_layer)
        ]
        worths.append(np.maximum(np.concatenate(soon, 1), 1e-6) * distance)
    rows = []
    for capacity in CAPACITIES:
        slots = int(capacity * layers * width)
        found = {
            made.name: hit_ratio(calls, slots, made, width)
            for made in (LRU(layers, width), LFU(layers, width), ForecastPolicy(layers, width))
        }
        for kind, worth in zip(KINDS, worths, strict=True):
            found[kind] = hit_ratio(calls, slots, Regressed(worth), width)
        best = found["belady"] = belady(calls, slots)
        rows += [
            {
                **{"trace": recorded.name, "capacity": capacity, "policy": name},
                "hit_ratio": round(ratio, 4),
                "gap": round((ratio - found["lru"]) / (best - found["lru"]), 3),
            }
            for name, ratio in found.items()
        ]
    return rows


def often(values: Floats, half_life: float, first: Floats) -> Floats:
    """``(N, U)`` means over the past, evenly at first, then older ones counting less."""
    found, mean, most = np.empty_like(values), first, 0.5 ** (1 / half_life)
    for token, own in enumerate(values):
        keep = min(most, 1 - 1 / (token + 2))
        mean = keep * mean + (1 - keep) * own
        found[token] = mean
    return found


def show(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Prints a table; returns the mean gap by policy."""
    places = list(dict.fromkeys((row["trace"], row["capacity"]) for row in rows))
    lines, means = [], {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        means[policy] = round(sum(row["gap"] for row in own) / len(own), 3)
        cells = [f"{row['hit_ratio']:.3f} {row['gap']:+.2f}" for row in own]
        lines.append([policy, *cells, f"{means[policy]:+.3f}"])
    heads = [f"{trace} {capacity:.0%}" for trace, capacity in places]
    print_table("Hit ratio and gap closed, batch 1", ["evicts by", *heads, "mean"], lines)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short texts")
    parser.add_argument("--texts", type=int, default=4, help="to learn from, of each domain")
    parser.add_argument("--tokens", type=int, default=512, help="of each held-out text")
    options = parser.parse_args()
    length = 4096
    if options.quick:
        options.texts, options.tokens, length = 1, 256, 512
    print_header(environment())
    model = MoE.from_pretrained(str(MODEL))
    vectors = token_vectors(model.trunk.model.get_input_embeddings(), VECTOR)
    others = list(other_recordings(model, length, options.texts))
    usual = np.concatenate([asked(recorded) for recorded in others]).mean(0)
    learnt = [known(recorded, model, vectors, usual) for recorded in others]
    weights = [
        [fit(learnt, target, kinds) for target in range(others[0].num_layers)]
        for kinds in range(1, len(KINDS) + 1)
    ]
    rows = []
    for recorded in recordings(model, options.tokens):
        rows += replay(recorded, known(recorded, model, vectors, usual), weights)
    means = show(rows)
    print_json({**environment(), "results": rows, "mean_gap_closed_at_batch_1": means})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
