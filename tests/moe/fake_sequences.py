"""Sequences without a model, and the steps of an engine without one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from moe.engine.prefill_mode import PrefillMode, Prompts
from moe.engine.scheduler import Scheduler
from moe.sequence import RunningSequence
from moe.settings import EngineSettings, PrefillSettings

AGE = 5
"""Steps of waiting that outweigh a level of priority."""


@dataclass(eq=False)
class FakeSequence:
    """Stands for a sequence that wants ``max_new_tokens`` tokens."""

    prompt_token_ids: list[int]
    max_new_tokens: int
    priority: int = 0
    token_ids: list[int] = field(default_factory=list)
    queue_key: tuple[int, int] = (0, 0)
    cache: Any = None
    cancelled: bool = False
    rows: None = None
    salt: str = ""

    @property
    def capacity(self) -> int:
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    @property
    def prompt_keys(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def ends_next(self) -> bool:
        return len(self.token_ids) + 1 >= self.max_new_tokens

    def enqueue(self, step: int, number: int) -> None:
        self.queue_key = (step, number)

    def leave_queue(self) -> None: ...

    def reuse_prefix(self, num_tokens: int) -> None: ...

    def release(self) -> None:
        self.cache = None

    def cancel(self) -> None:
        self.cancelled = True


def scheduler(
    mode: PrefillMode, kv_tokens: int | None = None, batch: int = 4, age: int = AGE
) -> Scheduler:
    prefill = PrefillSettings(mode=mode, wave_tokens=12, chunk_tokens=6, group_tokens=4)
    engine = EngineSettings(max_batch_size=batch, priority_steps=age)

    def pauses(prompts: Prompts) -> tuple[int, ...]:
        return tuple(range(1, math.ceil(sum(map(len, prompts)) / prefill.group_tokens)))

    return Scheduler(prefill, engine, kv_tokens, pauses)


def is_done(sequence: RunningSequence) -> bool:
    return len(sequence.token_ids) >= sequence.max_new_tokens


def run_step(planner: Scheduler) -> Counter[RunningSequence]:
    """What the engine does in a step; tokens that each sequence got. Memory is counted anew."""
    step = planner.schedule()
    held = sum(len(s.prompt_token_ids) + len(s.token_ids) for s in step.decode)
    held += sum(group.num_read for group in planner.waiting)
    served = list(step.decode)
    for chunk in step.prefill.chunks if step.prefill is not None else ():
        held += chunk.group.num_kv()
        assert chunk.token_ids, "a chunk without tokens"
        assert step.prefill is not None
        if step.prefill.is_last_layer_group and chunk.is_last and not chunk.group.cancelled:
            served += [s for s in chunk.group.sequences if not s.token_ids]  # others have theirs
    assert held <= planner.kv_tokens
    for sequence in served:
        sequence.token_ids.append(0)
    planner.update([sequence for sequence in served if is_done(sequence)])
    return Counter(served)
