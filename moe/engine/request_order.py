"""`RequestOrder`: the order in which a scheduler takes waiting requests, where a method brings one.

Without one they go by their queue keys (`moe.engine.scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedConfig

from moe.engine.prefill_batch import SequenceGroup
from moe.hooks import Hook
from moe.sequence import RunningSequence
from moe.settings import Profile


class RequestOrder(Protocol):
    """Orders the queue of one scheduler."""

    def arrange(
        self, waiting: Sequence[SequenceGroup], running: Sequence[RunningSequence], room: int
    ) -> list[SequenceGroup]:
        """Return the queue in the order in which a prefill batch should take from it.

        Args:
            room: how many sequences may begin.
        """
        ...

    def count_overtaken(
        self, taken: Sequence[SequenceGroup], left: Sequence[SequenceGroup]
    ) -> None:
        """See which groups a batch took, and which it left in the queue."""
        ...


MakeOrder = Callable[[], RequestOrder]
ORDER = Hook[
    Callable[[Profile, Path, PreTrainedConfig, Sequence[int]], tuple[MakeOrder | None, str]]
]("request_order")
"""From a profile, the path of a model, its configuration and the number of experts of each MoE
layer: makes the order of each scheduler; or None, and a notice that says why not."""
