"""The load that planned tokens bring to each expert, in the last steps and in those to come.

Rank 0 knows the prompts that are being read or wait, and the token table of `moe calibrate` says
which experts a token is likely to visit. The rebalancer asks about a layer before it moves experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from experts.placement.placement import Floats
from experts.placement.rebalance import LOAD_WINDOW, TokenLoads
from moe.calibration.predictors import load_token_table
from moe.engine.prefill_batch import ScheduledStep, SequenceGroup
from routing.predict import NO_TOKEN, contexts
from routing.predict.token_table import TokenTable

PlannedSteps = Iterable[tuple[ScheduledStep, Sequence[SequenceGroup]]]
"""For each rank its next step, and the prompts that wait behind it, in order."""

AHEAD = 48
"""Most steps to come that are predicted."""
SAMPLE = 1 << 13
"""Most tokens that are looked up at once; of more, an evenly spaced sample."""


@dataclass(frozen=True)
class _StepTokens:
    """The tokens that all ranks read in a step, as contexts ``(T, 2)``.

    Attributes:
        prompts: contexts of each rank's prompts, and the layers that they pass in the step.
        decoded: contexts of the last tokens of running sequences.
        visits: expected visits ``(E,)`` of the layers asked about so far.
    """

    prompts: list[tuple[range, Tensor]]
    decoded: Tensor
    visits: dict[int, Floats] = field(default_factory=dict)

    def reaches(self, layer: int) -> bool:
        return len(self.decoded) > 0 or any(layer in layers for layers, _ in self.prompts)

    def contexts_at(self, layer: int) -> Tensor:
        """Contexts of all tokens that reach a layer."""
        return torch.cat([self.decoded, *(own for layers, own in self.prompts if layer in layers)])


class ExpectedLoad:
    """The expected load of all ranks.

    Args:
        table: predicts the experts of a token from it and the one before it.
        num_layers: MoE layers.
    """

    def __init__(self, table: TokenTable, num_layers: int) -> None:
        self._table, self._num_layers = table, num_layers
        self.reset()

    def reset(self) -> None:
        """Forget the steps of the last group of ranks."""
        self._read: deque[_StepTokens] = deque(maxlen=LOAD_WINDOW + 1)
        self._behind: list[list[tuple[SequenceGroup, int]]] = []

    def see(self, planned: PlannedSteps) -> None:
        """Take note of the step that begins."""
        self._behind, prompts, decoded = [], [], []
        for step, waiting in planned:
            decoded += [[NO_TOKEN, *sequence.last_tokens(2)][-2:] for sequence in step.decode]
            chunks = step.prefill.chunks if step.prefill is not None else []
            if step.prefill is not None:
                layers = step.prefill.layers(self._num_layers)
                prompts.append((layers, _contexts([chunk.token_ids for chunk in chunks])))
            begun = [(chunk.group, chunk.span.stop) for chunk in chunks]
            self._behind.append([*begun, *((group, group.num_read) for group in waiting)])
        self._read.append(
            _StepTokens(prompts, torch.tensor(decoded, dtype=torch.int64).view(-1, 2))
        )

    def of_layer(self, layer: int, ahead: float) -> TokenLoads | None:
        """The load of a layer in ``ahead`` steps to come; None if no known prompt reaches it."""
        *before, now = self._read
        past = [read for read in before if read.reaches(layer)]
        coming = self._coming(int(min(ahead, AHEAD)))
        if not (past and coming):
            return None
        fresh = [read for read in past if layer not in read.visits]
        # The next tokens of running sequences are unknown: assume they are like the last ones.
        asked = [*coming, now.decoded, *(read.contexts_at(layer) for read in fresh)]
        found_SE = self._visits(asked, layer)
        for read, visits_E in zip(fresh, found_SE[len(coming) + 1 :], strict=True):
            read.visits[layer] = visits_E
        past_SE = np.stack([read.visits[layer] for read in past])
        return TokenLoads(past_SE, found_SE[: len(coming)] + found_SE[len(coming)])

    def _coming(self, ahead: int) -> list[Tensor]:
        """Contexts of prompts that ranks still have to read, a step at a time.

        Each rank is taken to read as many tokens a step as the largest recent one did.
        """
        most = max((len(own) for read in self._read for _, own in read.prompts), default=0)
        parts = []
        for groups in self._behind if most else ():
            runs, left = [], ahead * most
            for group, start in groups:
                if left <= 0:
                    break
                runs.append(group.token_ids[start : start + left])
                left -= len(runs[-1])
            parts.append(_contexts(runs).split(most))
        steps = zip_longest(*parts, fillvalue=_contexts([]))
        return [one for step in steps if len(one := torch.cat(step))]

    def _visits(self, steps: Sequence[Tensor], layer: int) -> Floats:
        """``(S, E)``: expected visits of each expert by the tokens of each step."""
        tokens = torch.cat(list(steps))
        step = torch.arange(len(steps)).repeat_interleave(torch.tensor([len(s) for s in steps]))
        each = -(-len(tokens) // SAMPLE)
        found = self._table.visits(tokens[::each], step[::each], len(steps), layer)
        return found.astype(np.float64) * each


def expected_load_of(
    path: Path, config: PreTrainedConfig, num_experts: Sequence[int]
) -> ExpectedLoad | None:
    """Read the token table of the calibration beside the model; None if there is none."""
    table = load_token_table(path, config, num_experts)
    return None if table is None else ExpectedLoad(table, len(num_experts))


def _contexts(runs: Sequence[Sequence[int]]) -> Tensor:
    """``(T, 2)``: for all tokens of these runs, the token before it and itself."""
    made = [contexts(torch.tensor(run, dtype=torch.int64), 2) for run in runs if len(run)]
    return torch.cat(made) if made else torch.zeros(0, 2, dtype=torch.int64)
