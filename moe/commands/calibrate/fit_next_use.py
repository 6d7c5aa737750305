"""From a trace to what the expert cache goes by: how soon each unit is asked for next.

A network is fitted by log loss to `DISCOUNT` to the power of the visits until the next use, on what
`offload.policies.base` knows behind one visit of each token. The text is cut into runs that start
from an empty cache; every fifth is kept aside, and there the fitted policy must hit more than the
one that only learns on the way, else it is not kept.
Legend: L layers, W experts of the widest, U = L * W, F memories, H hidden, N rows to learn from,
S scored tokens, C context, D hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from moe.calibration.gates import FoundGate
from moe.calibration.trace import Scored, Trace
from moe.commands.calibrate.record import affordable
from moe.commands.console import OnStep
from offload.policies import ForecastPolicy
from offload.policies.base import HALF_LIVES, Heard
from offload.policies.next_use import DISCOUNT, NextUse
from offload.replay import hit_ratio
from routing.predict.forecast import Floats, floats

ASIDE = 5
"""Every so many-th run is judged by."""
RUN_TOKENS = 4096
"""Of windows that follow each other, cached from an empty start."""
CAPACITIES = (0.25, 0.5)
"""Shares of the experts in memory, by which a fit is judged."""
UNITS = 512
"""D."""
EXAMPLE_BYTES = 1 << 30
"""Memory for rows to learn from."""
_JUDGED_VISITS = 100_000  # about so many: minutes for a deep model
_BATCH, _EPOCHS, _STEP, _DECAY, _DROPPED = 1024, 8, 2e-3, 1e-4, 0.1
_MOMENTS = 4096  # rows that means and deviations are of
_FIRST_SHARE, _DEFAULT_SHARE = 0.05, 0.7


@dataclass(frozen=True)
class Run:
    """Scored tokens that follow each other, from an empty cache.

    Attributes:
        asked: ``(n, L, W)`` bool.
        scores: of each layer ``(n, E)`` float16.
        read: ``(n, H)`` float16, by the last layer's experts.
    """

    asked: NDArray[np.bool_]
    scores: list[NDArray[np.float16]]
    read: NDArray[np.float16]

    @classmethod
    def of(cls, trace: Trace, scored: Scored) -> Run:
        """All scored tokens."""
        width = max(trace.num_experts)
        experts = torch.stack([ids[scored.tokens].long() for ids in trace.expert_ids], 1)
        asked = torch.zeros(*experts.shape[:2], width + 1, dtype=torch.bool)
        asked.scatter_(2, torch.where(experts < 0, width, experts), True)
        scores = [own.numpy() for own in scored.scores]
        return cls(asked[..., :-1].numpy(), scores, scored.read.numpy())

    def split(self, count: int) -> list[Run]:
        """So many runs of about the same length."""
        parts = (np.array_split(part, count) for part in (self.asked, *self.scores, self.read))
        return [Run(asked, scores, read) for asked, *scores, read in zip(*parts, strict=True)]

    def head(self, count: int) -> Run:
        """The first tokens."""
        return Run(self.asked[:count], [own[:count] for own in self.scores], self.read[:count])

    def given(self, token: int, layer: int) -> tuple[Floats, Floats]:
        """``(E,)`` scores and the row ``(H,)`` that the last layer's experts read."""
        scores, read = self.scores[layer][token], self.read[token]
        return scores.astype(np.float32), read.astype(np.float32)

    def experts(self, token: int, layer: int) -> list[int]:
        found: list[int] = self.asked[token, layer].nonzero()[0].tolist()
        return found

    def calls(self) -> list[list[int]]:
        """For `offload.replay`."""
        tokens, layers, width = self.asked.shape
        return [
            [layer * width + expert for expert in self.experts(token, layer)]
            for token in range(tokens)
            for layer in range(layers)
        ]

    def soon(self) -> Floats:
        """``(n + 1, L, W)``: before each token, how soon each unit is asked for."""
        found = np.concatenate([self.asked, self.asked.mean(0, keepdims=True)], dtype=np.float32)
        for token in range(len(self.asked) - 1, -1, -1):
            found[token] += (1 - found[token]) * DISCOUNT * found[token + 1]
        return found


class Overheard(ForecastPolicy):
    """The policy in a replay with so many slots, which hears what the run's routers gave."""

    def __init__(self, run: Run, next_use: NextUse, slots: int) -> None:
        _, layers, width = run.asked.shape
        super().__init__(layers, width)
        self.calibrate(next_use, lambda: slots)
        self._run = run

    def touch(self, layer: int, units: Sequence[int]) -> None:
        assert self.foresight is not None
        self.foresight.listen(layer, *self._run.given(self._calls // self._layers, layer))
        super().touch(layer, units)


@torch.inference_mode(False)
def fit_next_use(
    trace: Trace,
    found: Sequence[FoundGate],
    on_step: OnStep,
    *,
    example_bytes: int | None = None,
) -> tuple[NextUse | None, str]:
    """What was fitted, or None and why there is nothing.

    Args:
        trace: with what its routers gave, if all their gates are known.
        found: of each MoE layer.
        on_step: hears how far it is.
        example_bytes: memory for rows to learn from; None: `EXAMPLE_BYTES`, if affordable.
    """
    gates = [one.gate for one in found if one.gate is not None]
    if len(gates) < len(found):
        return None, next(one.reason for one in found if one.gate is None)
    if len({gate.weight.shape[1] for gate in gates}) > 1:
        return None, "its layers' routers read rows of different sizes"
    assert trace.scored is not None
    runs = Run.of(trace, trace.scored).split(
        max(ASIDE, round(len(trace.scored.tokens) / RUN_TOKENS))
    )
    learnt = [run for index, run in enumerate(runs) if index % ASIDE != ASIDE - 1]
    counts, total = sum(run.asked.sum(0) for run in learnt), sum(len(run.asked) for run in learnt)
    usual = (counts / total).astype(np.float32)
    most = affordable(EXAMPLE_BYTES) if example_bytes is None else example_bytes
    examples = _examples(learnt, usual, most, on_step)
    layers, width = usual.shape
    network = _fitted(examples, layers, on_step)
    weights = np.zeros((layers, width, len(gates[0].weight[0])), np.float32)
    biases = np.zeros_like(usual)
    for layer, gate in enumerate(gates):
        weights[layer, : len(gate.weight)] = floats(gate.weight)
        if gate.bias is not None:
            biases[layer, : len(gate.weight)] = floats(gate.bias)
    made = NextUse(tuple(trace.num_experts), weights, biases, usual, **network.numbers())
    try:  # what is judged is what comes back from the file
        made = NextUse.restore(made.tensors(), trace.num_experts)
    except ValueError as error:
        return None, f"what was fitted does not fit half precision: {error}"
    tokens, aside = max(_JUDGED_VISITS // layers, 1), runs[ASIDE - 1 :: ASIDE]
    stride = -(-len(aside) * RUN_TOKENS // max(tokens, RUN_TOKENS))
    fitted, learning = judge([run.head(tokens) for run in aside[::stride]], made)
    if fitted <= learning:
        return None, (
            f"on text kept aside the cache would hit {fitted:.3f} by it and hits {learning:.3f} "
            "without; calibrate on more text"
        )
    return made, ""


def judge(runs: Sequence[Run], next_use: NextUse) -> tuple[float, float]:
    """Mean hit ratios over `CAPACITIES` with what was fitted, and without."""
    fitted, learning = [], []
    for run in runs:
        calls, (_, layers, width) = run.calls(), run.asked.shape
        for capacity in CAPACITIES:
            slots = int(capacity * sum(next_use.num_experts))
            fitted.append(hit_ratio(calls, slots, Overheard(run, next_use, slots), width))
            learning.append(hit_ratio(calls, slots, ForecastPolicy(layers, width), width))
    return float(np.mean(fitted)), float(np.mean(learning))


@dataclass(frozen=True)
class _Examples:
    """N rows: log-odds ``(N, F + 1, U)`` and contexts ``(N, C)``, both float16, the layer that has
    been ``(N,)``, and how soon units are asked for ``(N, U)``, float16."""

    said: Tensor
    context: Tensor
    layer: Tensor
    soon: Tensor

    @classmethod
    def empty(cls, count: int, memories: int, units: int, context: int) -> _Examples:
        half = partial(torch.empty, dtype=torch.float16)
        said, contexts = half(count, memories, units), half(count, context)
        return cls(said, contexts, torch.empty(count, dtype=torch.int64), half(count, units))

    def put(self, number: int, heard: Heard, learning: ForecastPolicy, soon: Floats) -> None:
        """The row of a visit that has just been; ``soon`` is ``(2, L, W)``, before and behind."""
        odds = learning.learning_odds(learning.values())
        said = np.concatenate([heard.memories, odds[None]])
        been = np.arange(soon.shape[1])[:, None] <= heard.layer
        self.said[number] = torch.from_numpy(said).flatten(1)
        self.context[number] = torch.from_numpy(heard.context())
        self.layer[number] = heard.layer
        self.soon[number] = torch.from_numpy(np.where(been, soon[1], soon[0])).flatten()


def _examples(runs: Sequence[Run], usual: Floats, most_bytes: int, on_step: OnStep) -> _Examples:
    """One visit of each token, all layers in turn; of every so many-th where memory is short."""
    layers, hidden = len(usual), runs[0].read.shape[1]
    total, memories = sum(len(run.asked) for run in runs), len(HALF_LIVES) + 1
    context = 2 * usual.size + hidden + layers
    stride = -(-total * 2 * (memories * usual.size + context + usual.size) // most_bytes)
    examples = _Examples.empty(-(-total // stride), memories, usual.size, context)
    seen = 0
    for run in runs:
        heard, learning, soon = Heard(usual, hidden), ForecastPolicy(*usual.shape), run.soon()
        for token in range(len(run.asked)):
            number, rest = divmod(seen, stride)
            # All layers, in no order that a text could have.
            chosen = (number * 5 + number // 6) % layers if rest == 0 else -1
            for layer in range(layers):
                heard.listen(layer, *run.given(token, layer))
                experts = run.experts(token, layer)
                heard.visit(layer, experts)
                learning.touch(layer, [layer * usual.shape[1] + expert for expert in experts])
                if layer == chosen:
                    examples.put(number, heard, learning, soon[token : token + 2])
            seen += 1
        on_step("next uses", seen, 2 * total)
    return examples


class _Network(nn.Module):
    def __init__(self, examples: _Examples, layers: int) -> None:
        super().__init__()
        said, self.layers = examples.said, layers
        self.units = said.shape[2]
        context = examples.context[:: -(-len(said) // _MOMENTS)].float()
        self._mean, self._deviation = context.mean(0), context.std(0).clamp_min(1e-3)
        shares = torch.full((said.shape[1], self.layers, self.layers), _FIRST_SHARE)
        shares[-1] = _DEFAULT_SHARE
        self.shares = nn.Parameter(shares)
        self.up, self.down = nn.Linear(context.shape[1], UNITS), nn.Linear(UNITS, self.units)
        self._dropout = nn.Dropout(_DROPPED)
        nn.init.normal_(self.down.weight, std=0.01)
        nn.init.zeros_(self.down.bias)

    def forward(self, said: Tensor, context: Tensor, layer: Tensor) -> Tensor:
        """``(N, U)`` log-odds."""
        rows = self._dropout((context - self._mean) / self._deviation)
        width = self.units // self.layers
        shares = self.shares[:, layer].repeat_interleave(width, -1).transpose(0, 1)
        moved: Tensor = self.down(self._dropout(gelu(self.up(rows), approximate="tanh")))
        return moved + (shares * said).sum(1)

    @torch.no_grad()
    def numbers(self) -> dict[str, Floats]:
        """For `NextUse`, the scale of the context within them."""
        up = self.up.weight / self._deviation
        bias = self.up.bias - up @ self._mean
        shape = (self.layers, self.units // self.layers)
        return {
            "shares": floats(self.shares),
            "up": floats(up.T.contiguous()),
            "up_bias": floats(bias),
            "down": floats(self.down.weight).reshape(*shape, UNITS),
            "down_bias": floats(self.down.bias).reshape(shape),
        }


@torch.enable_grad()
def _fitted(examples: _Examples, layers: int, on_step: OnStep) -> _Network:
    """By log loss, on rows in random order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = _Network(examples, layers)
        _train(network, examples, on_step)
    return network.eval()


def _train(network: _Network, examples: _Examples, on_step: OnStep) -> None:
    count = len(examples.layer)
    batch = min(_BATCH, max(count // 8, 1))
    steps = _EPOCHS * (count // batch)
    optimiser = torch.optim.AdamW(network.parameters(), lr=_STEP, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, _STEP, total_steps=steps, pct_start=0.1
    )
    for step in range(steps):
        at = step % (count // batch)
        if at == 0:
            order = torch.randperm(count)
        rows = order[at * batch : (at + 1) * batch]
        said, context, soon = (
            part[rows].float() for part in (examples.said, examples.context, examples.soon)
        )
        guess = network(said, context, examples.layer[rows])
        optimiser.zero_grad()
        binary_cross_entropy_with_logits(guess, soon).backward()
        optimiser.step()
        schedule.step()
        on_step("next uses", steps + step + 1, 2 * steps)
