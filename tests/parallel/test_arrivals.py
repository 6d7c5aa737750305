"""What tokens let expect: of steps as they were read, and of those that prompts still hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experts.placement.placement import Floats
from moe import MoE, SamplingParams
from moe.engine.prefill_batch import PrefillBatch, PromptChunk, ScheduledStep, SequenceGroup
from moe.parallel.engine import ParallelEngine
from moe.parallel.expected_load import AHEAD, SAMPLE, ExpectedLoad, expected_load_of
from moe.settings.profile import load_profile
from routing.predict import contexts
from routing.predict.token_table import TokenTable, fit_token_table
from tests.parallel.generation import MODES, PROMPTS
from tests.parallel.test_parallel_engine import PARAMS, Loopback, tokens_of

LAYERS, EXPERTS = 2, 4
NewGroup = Callable[[Sequence[int]], SequenceGroup]


@pytest.fixture(scope="module")
def table() -> TokenTable:
    """Token n visits expert n of the first layer, and experts 0 and 1 of the second."""
    tokens = torch.arange(EXPERTS).repeat(4000)
    ids = [tokens[:, None], torch.tensor([[0, 1]]).expand(len(tokens), 2)]
    return fit_token_table(contexts(tokens, 2), ids, [EXPERTS] * LAYERS, 100)


@pytest.fixture
def group(tiny_moe: Callable[[str], MoE]) -> NewGroup:
    model = tiny_moe("qwen3_moe")
    return lambda ids: model.request(list(ids), SamplingParams(max_new_tokens=1))


def counts(token_ids: Sequence[int]) -> list[int]:
    return np.bincount(np.array(token_ids, np.int64), minlength=EXPERTS).tolist()


def near(found: Floats, wanted: Sequence[Sequence[float]]) -> bool:
    return found.shape == np.shape(wanted) and bool(np.allclose(found, wanted, rtol=0.02, atol=0.1))


def read(group: SequenceGroup, size: int) -> tuple[ScheduledStep, list[SequenceGroup]]:
    ids = group.token_ids[group.num_read :]
    return ScheduledStep(
        [], PrefillBatch([PromptChunk(group, ids[:size], is_last=size >= len(ids))])
    ), []


@given(st.lists(st.integers(0, EXPERTS - 1), min_size=3, max_size=40), st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_is_foreseen_as_it_is_read(
    group: NewGroup, table: TokenTable, token_ids: list[int], size: int
) -> None:
    one, arrivals = group(token_ids), ExpectedLoad(table, LAYERS)
    steps = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
    for number in range(len(steps)):
        arrivals.see([read(one, size)])
        found = arrivals.of_layer(0, AHEAD)
        if number == 0 or number == len(steps) - 1:
            assert found is None  # nothing to hold it against, or nothing to come
        else:
            assert found is not None
            assert near(found.past_SE, [counts(own) for own in steps[:number]])
            assert near(found.coming_SE, [counts(own) for own in steps[number + 1 :]])
            second = arrivals.of_layer(1, AHEAD)
            assert second is not None
            assert near(second.past_SE, [[len(own)] * 2 + [0] * 2 for own in steps[:number]])
        one.num_read += size


def test_prompts_of_all_ranks_come_in_their_order_and_who_runs_goes_on(
    group: NewGroup, table: TokenTable
) -> None:
    arrivals = ExpectedLoad(table, LAYERS)
    first, second, running = group([0] * 8), group([1] * 2 + [2] * 4), group([3, 3])
    for _ in range(2):
        step = ScheduledStep(running.sequences, read(first, 3)[0].prefill)
        arrivals.see([(step, [second]), (ScheduledStep([], None), [group([3])])])
        first.num_read += 3
    found = arrivals.of_layer(0, AHEAD)
    assert found is not None
    assert near(found.past_SE, [[3, 0, 0, 1]])
    assert near(found.coming_SE, [[2, 1, 0, 2], [0, 1, 2, 1], [0, 0, 2, 1]])
    arrivals.reset()
    arrivals.see([(ScheduledStep([], None), [second])])
    assert arrivals.of_layer(0, AHEAD) is None


def test_a_layer_that_a_wave_has_not_reached_has_seen_nothing_of_it(
    group: NewGroup, table: TokenTable
) -> None:
    arrivals, one = ExpectedLoad(table, LAYERS), group([2] * 5)
    batch = PrefillBatch([PromptChunk(one, one.token_ids, is_last=True)], pauses=(1,))
    for stage in range(2):
        batch.layer_group = stage
        arrivals.see([(ScheduledStep([], batch), [])])
    other = group([1] * 3)
    arrivals.see([(read(other, 3)[0], [group([0] * 4)])])
    founds = [arrivals.of_layer(layer, AHEAD) for layer in range(2)]
    past = [len(found.past_SE) for found in founds if found is not None]
    assert past == [1, 1]


def test_long_prompts_are_sampled_and_not_followed_to_their_end(
    group: NewGroup, table: TokenTable
) -> None:
    arrivals, size = ExpectedLoad(table, LAYERS), SAMPLE // 16
    one = group([0])
    one.sequences[0].prompt_token_ids = [0, 0, 0, 1] * (size * (AHEAD + 9) // 4)
    for _ in range(2):
        arrivals.see([read(one, size)])
        one.num_read += size
    found = arrivals.of_layer(0, AHEAD)
    assert found is not None
    assert found.coming_SE.shape == (AHEAD, EXPERTS)
    assert found.coming_SE.sum() == pytest.approx(AHEAD * size, rel=0.1)


def test_without_a_calibration_nothing_is_expected(tmp_path: Path) -> None:
    assert expected_load_of(tmp_path, None, [EXPERTS]) is None  # type: ignore[arg-type]


class Seen(Loopback):
    """Ranks of one process; what is seen of arrivals is held against what each rank is told."""

    read = most_behind = 0

    def step(self, message: Any, orders: Mapping[int, Any], planned: Any) -> dict[int, Any]:
        planned = list(planned)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        arrivals = ExpectedLoad(fit_token_table(tokens, [tokens[:, :1]], [8], 9), LAYERS)
        arrivals.see(planned)
        (seen,) = arrivals._read
        assert len(seen.decoded) == sum(len(order["decode"]) for order in orders.values())
        batches = [order["prefill"] for order in orders.values() if order["prefill"] is not None]
        size = sum(chunk["size"] for batch in batches for chunk in batch["chunks"])
        assert sum(len(own) for _, own in seen.prompts) == size
        self.read += size
        self.most_behind = max(self.most_behind, sum(map(len, arrivals._coming(1000))))
        return super().step(message, orders, planned)


def test_arrivals_are_what_ranks_are_told_to_read(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    loopback, whole = Seen(model, 2), model.profile
    model.profile = load_profile(whole, MODES["chunked"])
    engine = ParallelEngine(loopback, model._planning_engine, continue_on_loss=True)  # type: ignore[arg-type]
    model.profile = whole
    tokens_of(engine, model, PARAMS)
    assert loopback.read == sum(map(len, PROMPTS))
    assert loopback.most_behind == loopback.read - 2 * 16  # all but the first two chunks
