"""`ExpertAwareOrder`: waiting requests that share experts with the running ones go first.

Legend: S waiting sequences, U units (experts of all layers, those of the first MoE layer first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedConfig

from moe.calibration.files import CALIBRATION_FOLDER, load_calibration
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.request_order import MakeOrder
from moe.errors import CalibrationError
from moe.sequence import RunningSequence
from moe.settings import Profile
from routing import RoutingError
from routing.predict import contexts
from routing.predict.forecast import Floats

_LEAST_SAVING = 0.02
"""Share of the expected expert reads that another order must save."""


PromptEstimator = Callable[[Sequence[int]], Floats]
"""From the tokens of a prompt to ``(U,)``: how often a token of it needs each unit."""
_PROMPT_TOKENS = 256  # only the last ones: the answer resembles them most


def make_order(
    profile: Profile, path: Path, config: PreTrainedConfig, num_experts: Sequence[int]
) -> tuple[MakeOrder | None, str]:
    """Make the hook ``request_order`` from the model's token table; see `ORDER`."""
    try:
        calibrated = load_calibration(
            path / CALIBRATION_FOLDER, config, num_experts, ["token_table"]
        )
        predictor = calibrated.predictor("token_table")
    except (CalibrationError, RoutingError) as error:
        return None, f"requests are not grouped by their experts: {error}"

    def estimate(token_ids: Sequence[int]) -> Floats:
        recent = torch.tensor(token_ids[-_PROMPT_TOKENS:])
        predictor.start(contexts(recent, predictor.context))
        layers = [predictor.rows(-1, layer) for layer in range(len(num_experts))]
        return np.concatenate([rows.mean(0) for rows in layers if rows is not None])

    return partial(ExpertAwareOrder, estimate, profile.methods.expert_order.patience), ""


class ExpertAwareOrder:
    """Orders a queue.

    Args:
        expect: which experts a prompt needs.
        patience: how often later requests may overtake a request.
    """

    def __init__(self, expect: PromptEstimator, patience: int) -> None:
        self._expect, self._patience = expect, patience
        self._needs: WeakKeyDictionary[RunningSequence, Floats] = WeakKeyDictionary()
        self._overtaken: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()

    def arrange(
        self, waiting: Sequence[SequenceGroup], running: Sequence[RunningSequence], room: int
    ) -> list[SequenceGroup]:
        """The queue in the order in which a prefill batch should take from it.

        Half-read prompts stay in front, as they hold memory.
        """
        begun = [group for group in waiting if group.num_read]
        fresh = [group for group in waiting if not group.num_read]
        room -= len(begun)
        if not 0 < room < len(fresh):
            return list(waiting)
        needs = np.stack([self._need(group.sequences[0]) for group in fresh])
        there = np.zeros((1, needs.shape[1]), np.float32)
        if running:
            there = np.stack([self._need(sequence) for sequence in running])
        needed = 1 - np.prod(1 - there, 0) if running else None
        overtaken = [self._overtaken.get(group.sequences[0], 0) for group in fresh]
        chosen = choose_batch(needs, room, overtaken, self._patience, needed)
        usual, other = (
            expected_units(np.concatenate([there, needs[rows]])) for rows in (range(room), chosen)
        )
        if other > (1 - _LEAST_SAVING) * usual:
            return list(waiting)
        left = [index for index in range(len(fresh)) if index not in chosen]
        return [*begun, *(fresh[index] for index in (*chosen, *left))]

    def count_overtaken(
        self, taken: Sequence[SequenceGroup], left: Sequence[SequenceGroup]
    ) -> None:
        """After a batch took some groups: groups left with a sooner key were overtaken."""
        last = max((group.queue_key for group in taken), default=None)
        for group in left:
            if last is not None and group.queue_key < last:
                first = group.sequences[0]
                self._overtaken[first] = self._overtaken.get(first, 0) + 1

    def _need(self, sequence: RunningSequence) -> Floats:
        found = self._needs.get(sequence)
        if found is None:
            found = self._needs[sequence] = self._expect(sequence.prompt_token_ids)
        return found


def choose_batch(
    needs: Floats, room: int, waited: Sequence[int], patience: int, running: Floats | None = None
) -> list[int]:
    """Sequences to take now, in the order in which they are chosen.

    Sequences overtaken ``patience`` times come first, in queue order. Then, one by one, comes the
    sequence that adds the fewest expected units to those already needed; if there are none yet,
    the first in the queue.

    Args:
        needs: ``(S, U)`` probability that a sequence needs a unit, in order of the queue.
        room: how many may be taken.
        waited: how often each sequence has been overtaken.
        patience: how often a sequence may be overtaken at most.
        running: ``(U,)`` probability that running sequences need a unit.
    """
    count = min(room, len(needs))
    if count == 0:
        return []
    chosen = [index for index in range(len(needs)) if waited[index] >= patience][:count]
    if not chosen and running is None:
        chosen = [0]
    absent = np.ones(needs.shape[1], np.float32) if running is None else 1 - running
    for index in chosen:
        absent = absent * (1 - needs[index])
    left = [index for index in range(len(needs)) if index not in chosen]
    while len(chosen) < count:
        added = needs[left] @ absent
        best = left.pop(int(np.argmin(added)))  # argmin takes the first of equals: order stays
        chosen.append(best)
        absent = absent * (1 - needs[best])
    return chosen


def expected_units(needs: Floats) -> float:
    """Distinct units that sequences ``(S, U)`` are expected to need in one step."""
    return float((1 - np.prod(1 - needs, 0)).sum())
