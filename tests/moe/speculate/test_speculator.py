"""What a step asks its controller, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, cast

import pytest

from moe.sequence import RunningSequence
from moe.speculate.draft import Choice, FixedDepth, Mode, Plain, Round, Trial
from moe.speculate.ngram import NGram
from moe.speculate.speculator import PlainSteps, Report, Speculator
from tests.moe.speculate.simulation import NGRAM, Always

ELASTIC = Mode("elastic", bits=4)


class FakeSequence:
    def __init__(self, *new: int) -> None:
        self.prompt_token_ids, self.token_ids, self.max_new_tokens = [1, 2, 3], list(new), 20


def test_a_step_is_plain_where_nothing_is_offered() -> None:
    speculator = Speculator(FixedDepth(NGram.mode, 4), {}, [NGram()], 4)
    one, other = (cast(RunningSequence, FakeSequence(new)) for new in (4, 5))
    assert speculator.propose([one, other], inf) is None
    speculator.finish(alone=True)
    one.token_ids += [2, 3]
    drafts = speculator.propose([one, other], inf)
    assert drafts is not None
    assert [draft.tokens for draft in drafts] == [(4, 2, 3, 4), ()]
    figures = speculator.figures()
    assert (figures["steps"], figures["tokens"], figures["rested_steps"]) == (1, 2, 0)


@pytest.mark.parametrize(("spare", "left", "drafted"), [(2, 20, 2), (inf, 3, 2), (inf, 1, 0)])
def test_drafts_are_no_longer_than_there_is_room(spare: float, left: int, drafted: int) -> None:
    speculator = Speculator(FixedDepth(NGram.mode, 4), {}, [NGram()], 4)
    one: Any = FakeSequence(4, 2, 3)
    one.max_new_tokens = len(one.token_ids) + left
    drafts = speculator.propose([one], spare)
    assert sum(len(draft.tokens) for draft in drafts or []) == drafted


def test_a_step_is_plain_where_what_is_offered_is_not_worth_it() -> None:
    class Declines(FixedDepth):
        def plan(self, *step: Any) -> list[Choice]:
            return [Choice()]

    speculator = Speculator(Declines(NGram.mode, 4), {}, [NGram()], 4)
    assert speculator.propose([cast(RunningSequence, FakeSequence(4, 2, 3))], inf) is None


@pytest.mark.parametrize("batches", [[1] * 200, [1, 4, 4, 2] * 9, [3] * 9 + [2] * 30])
def test_plain_steps_are_told_of_together_and_each_once(batches: list[int]) -> None:
    class Listens(Always):
        def rests(self, batch: int) -> int:
            return 3

        def rested(self, plain: Plain) -> None:
            assert {batches[int(at)] for at in plain.seconds} == {plain.batch}
            told.append(plain.seconds)

    told, steps = list[Sequence[float]](), PlainSteps()
    for at, batch in enumerate([*batches, 99]):
        assert steps.begin(Listens(NGRAM, 0), batch)
        steps.over(at, 0.0)
    assert [at for own in told for at in own] == list(range(len(batches)))
    if len(set(batches)) == 1:
        assert [len(own) for own in told] == [6, 9, 18, 33, 66, 68]


def test_a_report_counts_by_mode_and_position() -> None:
    report, one = Report(), cast(RunningSequence, object())
    trials = [Trial(one, ELASTIC, 3, 2), Trial(one, ELASTIC, 1, 1), Trial(one, None, 0, 0)]
    report.observe(Round(trials, 7, (2, 1, 1), 0.1, 0.2, 1000, True))
    report.plainly(3, resting=True)
    report.plainly(1, resting=False)
    figures = report.figures()
    assert figures["tokens"] == 3 + 2 + 1 + 3 + 1
    assert (figures["steps"], figures["rested_steps"]) == (3, 1)
    assert figures["tokens_per_verification"] == pytest.approx(10 / 7)
    assert figures["depths"] == {"0": 5, "1": 1, "3": 1}
    mode = figures["modes"][ELASTIC.name]
    assert mode["acceptance"] == pytest.approx(3 / 4)
    assert [p["acceptance"] for p in mode["by_position"]] == [1.0, 1.0, 0.0]
    assert mode["draft_bytes"] == 1000
    report.reset()
    assert report.figures()["tokens"] == 0
