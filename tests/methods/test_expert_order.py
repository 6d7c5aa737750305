"""Requests grouped by their experts: where it saves, never for too long, and never the output."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe import MoE, SamplingParams
from moe.calibration.files import CALIBRATION_FOLDER
from moe.cli import main
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.scheduler import Scheduler
from moe.methods.expert_order.order import ExpertAwareOrder, choose_batch, expected_units
from moe.settings import EngineSettings, PrefillSettings
from routing.predict.forecast import Floats
from tests.moe.fake_sequences import FakeSequence, is_done, run_step

ROOT = Path(__file__).parents[2]
UNITS = 12


def expect(token_ids: list[int]) -> Floats:
    """Prompts that begin with the same token need the same two units."""
    needs = np.zeros(UNITS, np.float32)
    needs[[2 * token_ids[0], 2 * token_ids[0] + 1]] = 0.9
    return needs


def planner(patience: int, batch: int = 2) -> Scheduler:
    return Scheduler(
        PrefillSettings(mode="whole"),
        EngineSettings(max_batch_size=batch),
        None,
        lambda prompts: (),
        order=ExpertAwareOrder(expect, patience),  # type: ignore[arg-type]
    )


def submit(scheduler: Scheduler, kinds: list[int]) -> list[FakeSequence]:
    sequences = [FakeSequence([kind, 7], 2) for kind in kinds]
    for sequence in sequences:
        scheduler.submit(SequenceGroup([sequence]))  # type: ignore[list-item]
    return sequences


def finish_order(scheduler: Scheduler, sequences: list[FakeSequence]) -> list[int]:
    order: list[int] = []
    for _ in range(200):
        if scheduler.idle:
            break
        run_step(scheduler)
        order += [i for i, s in enumerate(sequences) if is_done(s) and i not in order]  # type: ignore[arg-type]
    assert scheduler.idle
    return order


def test_requests_of_a_kind_run_together() -> None:
    scheduler = planner(patience=5)
    sequences = submit(scheduler, [0, 1, 2, 0, 1, 2])
    assert finish_order(scheduler, sequences) == [0, 3, 1, 4, 2, 5]


def test_without_a_saving_the_order_stays() -> None:
    scheduler = planner(patience=5)
    sequences = submit(scheduler, [0, 1, 2, 3, 4, 5])
    assert finish_order(scheduler, sequences) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 3), st.integers(1, 4))
def test_nobody_is_overtaken_more_often_than_patience_allows(
    kinds: list[int], patience: int, batch: int
) -> None:
    scheduler = planner(patience, batch)
    sequences = submit(scheduler, kinds)
    overtaken: Counter[int] = Counter()
    started: set[int] = set()
    for _ in range(300):
        if scheduler.idle:
            break
        step_before = set(started)
        run_step(scheduler)
        waiting = {group.sequences[0] for group in scheduler.waiting}
        started |= {i for i, s in enumerate(sequences) if s not in waiting}
        new = started - step_before
        for index in range(max(new, default=0)):
            overtaken[index] += index not in started
    assert all(is_done(sequence) for sequence in sequences)  # type: ignore[arg-type]
    assert max(overtaken.values(), default=0) <= patience


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a calibration beside it."""
    path = tmp_path_factory.mktemp("model") / "demo"
    copytree(ROOT / "examples/demo-model", path)
    text = ROOT / "moe/model.py"
    assert main(["calibrate", str(path), "--text", str(text), "--tokens", "3000"]) == 0
    assert (path / CALIBRATION_FOLDER).is_dir()
    return path


def test_tokens_do_not_depend_on_who_runs_with_whom(calibrated: Path) -> None:
    prompts = ["def f(x):", "#include <", "The module", "class A:", "namespace at {", ".. note::"]
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    texts = []
    for patience in (0, 3):
        order = {"methods.expert_order.patience": patience}
        model = MoE.from_pretrained(calibrated, order, engine={"max_batch_size": 2})
        assert not [notice for notice in model.notices if "grouped" in notice]
        texts.append([completion.token_ids for completion in model.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_without_a_calibration_requests_keep_their_order_and_it_says_so() -> None:
    model = MoE.from_pretrained(ROOT / "examples/demo-model", {"methods.expert_order.patience": 2})
    (notice,) = [notice for notice in model.notices if "grouped" in notice]
    assert "run moe calibrate MODEL --text FILE" in notice


def needs_of(groups: list[int], units: int = 8) -> np.ndarray:
    """Sequences of a group need the same two units."""
    needs = np.zeros((len(groups), units), np.float32)
    for row, group in enumerate(groups):
        needs[row, [2 * group, 2 * group + 1]] = 1
    return needs


def test_sequences_with_the_same_experts_run_together() -> None:
    needs = needs_of([0, 1, 2, 0, 1, 0])
    assert choose_batch(needs, 3, [0] * 6, 4) == [0, 3, 5]
    assert choose_batch(needs, 4, [0] * 6, 4) == [0, 3, 5, 1], "then in the order of the queue"
    running = needs_of([2])[0]
    assert choose_batch(needs, 2, [0] * 6, 4, running) == [2, 0], "nothing new is read for it"


def test_who_has_waited_goes_first() -> None:
    needs = needs_of([0, 1, 2, 0])
    assert choose_batch(needs, 2, [0, 0, 4, 0], 4) == [2, 0]
    assert choose_batch(needs, 2, [0, 0, 3, 0], 4) == [0, 3]
    assert choose_batch(needs, 0, [0] * 4, 4) == []
    assert choose_batch(needs[:0], 3, [], 4) == []


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4))
def test_nobody_is_passed_over_more_often_than_patience_allows(
    seed: int, room: int, patience: int, arrivals: int
) -> None:
    generator = np.random.default_rng(seed)
    queue: list[tuple[int, np.ndarray]] = []
    passed: dict[int, int] = {}
    arrived = 0
    for _ in range(40):
        for _ in range(arrivals):
            queue.append((arrived, generator.random(6).astype(np.float32) ** 4))
            arrived += 1
        needs = np.stack([need for _, need in queue])
        chosen = choose_batch(needs, room, [passed.get(name, 0) for name, _ in queue], patience)
        assert len(set(chosen)) == len(chosen) == min(room, len(queue))
        last = max(chosen)
        for index, (name, _) in enumerate(queue[:last]):
            if index not in chosen:
                passed[name] = passed.get(name, 0) + 1
        assert max(passed.values(), default=0) <= patience
        queue = [entry for index, entry in enumerate(queue) if index not in chosen]


@given(st.integers(0, 1 << 30))
def test_the_chosen_batch_expects_no_more_units_than_the_first_in_line(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 4, 24).tolist()
    needs = needs_of(groups)
    chosen = choose_batch(needs, 6, [0] * 24, 9)
    assert expected_units(needs[chosen]) <= expected_units(needs[:6])
