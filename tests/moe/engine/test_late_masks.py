"""A structure whose next tokens take long to find holds up its own sequence, and nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from moe import MoE, Structure
from moe.errors import BusyError, RequestError, StructureError
from moe.fair_pool import FairPool
from moe.sampling.constraint import MaskThreads
from moe.sampling.params import SamplingParams
from moe.sequence import RunningSequence
from tests.amounts import deep_except

DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
# Slow behind the text that the check writes.
LATER = Structure.grammar("start: A B\nA: /[b-z]{60}/\nB: /(ab){300000}/")


@pytest.fixture(scope="module")
def demo() -> Iterator[MoE]:
    with MoE.from_pretrained(DEMO) as model:
        yield model


class Run:
    """Requests that one loop steps."""

    def __init__(self, model: MoE) -> None:
        self.loop = model.loop()
        self._model = model
        self.tokens: dict[RunningSequence, list[int]] = {}
        self.ended: dict[RunningSequence, Exception | str] = {}

    def add(self, **params: Any) -> list[RunningSequence]:
        group = self._model.request("Once", SamplingParams(seed=1, ignore_eos=True, **params))
        self.loop.submit(group)
        self.tokens |= {sequence: [] for sequence in group.sequences}
        return list(group.sequences)

    def step(self) -> float:
        """Seconds that a step took."""
        start = time.monotonic()
        for sequence, event in self.loop.step():
            if isinstance(event, Exception):
                self.ended[sequence] = event
                continue
            self.tokens[sequence].append(event.token.id)
            if event.finish_reason is not None:
                self.ended[sequence] = event.finish_reason
        return time.monotonic() - start

    def finish(self) -> None:
        while not self.loop.idle:
            self.step()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, every mask that is begun waits."""
    go_on = threading.Event()
    go_on.set()
    submit = MaskThreads.submit

    def waiting(threads: MaskThreads, work: Callable[[], bytes]) -> Future[bytes]:
        def wait() -> bytes:
            assert go_on.wait(60)
            return work()

        return submit(threads, wait)

    monkeypatch.setattr(MaskThreads, "submit", waiting)
    yield go_on
    go_on.set()


def test_others_go_on_and_no_token_changes(demo: MoE, hold: threading.Event) -> None:
    def run(*, late: bool) -> tuple[list[int], list[int]]:
        run = Run(demo)
        wish = Structure.json_schema({"type": "array", "items": {"type": "integer"}})
        (slow,) = run.add(structure=wish, max_new_tokens=12)
        (plain,) = run.add(max_new_tokens=40)
        if late:
            hold.clear()
        while late and len(run.tokens[plain]) < 30:
            run.step()
            assert len(run.tokens[slow]) <= 1
        hold.set()
        run.finish()
        return run.tokens[slow], run.tokens[plain]

    assert run(late=True) == run(late=False)


def test_what_becomes_slow_ends_its_request_and_delays_nobody(demo: MoE) -> None:
    run = Run(demo)
    (plain,) = run.add(max_new_tokens=200)
    for _ in range(10):
        run.step()
    slow = run.add(structure=LATER, max_new_tokens=100, n=4)
    longest = 0.0
    while not all(sequence in run.ended for sequence in slow):
        longest = max(longest, run.step())
    assert all(isinstance(run.ended[sequence], StructureError) for sequence in slow)
    assert longest < 0.8  # its masks take more than that together
    run.finish()
    assert run.ended[plain] == "length"


def test_b14_a_shortage_of_threads_delays_a_structure_and_ends_nothing(
    demo: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Structure.regex("[abc]{20}")

    def answer(run: Run) -> list[int]:
        (sequence,) = run.add(structure=wish, max_new_tokens=12)
        run.finish()
        assert run.ended[sequence] in ("length", "stop")
        return run.tokens[sequence]

    expected, refused = answer(Run(demo)), list[bool]()
    submit = FairPool.submit

    def short(pool: FairPool, *work: Any, **options: Any) -> Any:
        refused.append(len(refused) % 3 != 2)
        if refused[-1]:
            raise BusyError("no thread")
        return submit(pool, *work, **options)

    monkeypatch.setattr(FairPool, "submit", short)
    assert answer(Run(demo)) == expected
    assert refused.count(True) > 12


def test_a_mask_that_costs_too_much_is_remembered(
    demo: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Structure.regex("[abc]{3,30}")
    with monkeypatch.context() as patch:
        patch.setattr("moe.sampling.constraint.MASK_SECONDS", 0.0)
        run = Run(demo)
        (slow,) = run.add(structure=wish, max_new_tokens=100)
        run.finish()
        assert isinstance(run.ended[slow], StructureError)
    with pytest.raises(RequestError, match="a token takes more than"):
        run.add(structure=wish, max_new_tokens=1)


@pytest.mark.parametrize(
    "pattern", deep_except(["(ab){300000}"], ["a{900000}", "(ab){300000}", "(a{1000}b){1000}"])
)
def test_structures_that_are_slow_from_the_beginning_are_refused(demo: MoE, pattern: str) -> None:
    with pytest.raises(RequestError, match="takes more than"):
        Run(demo).add(structure=Structure.regex(pattern), max_new_tokens=1)
