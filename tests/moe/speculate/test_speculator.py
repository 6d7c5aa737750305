"""What a step asks of whom: nobody is asked for a plan where there is no draft to choose."""

from __future__ import annotations

from math import inf
from statistics import fmean
from typing import Any, cast

import pytest

from moe.sequence import RunningSequence
from moe.speculate.account import SHARE
from moe.speculate.draft import Choice, FixedDepth, Plain
from moe.speculate.ngram import NGram
from moe.speculate.speculator import Speculator
from tests.moe.speculate.simulation import NGRAM, Simulation, World


class FakeSequence:
    def __init__(self, *new: int) -> None:
        self.prompt_token_ids, self.token_ids, self.max_new_tokens = [1, 2, 3], list(new), 20


def test_a_step_is_plain_where_nothing_is_offered() -> None:
    speculator = Speculator(FixedDepth(NGram.mode, 4), None, [NGram()], 4)
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
    speculator = Speculator(FixedDepth(NGram.mode, 4), None, [NGram()], 4)
    one: Any = FakeSequence(4, 2, 3)
    one.max_new_tokens = len(one.token_ids) + left
    drafts = speculator.propose([one], spare)
    assert sum(len(draft.tokens) for draft in drafts or []) == drafted


def test_a_step_is_plain_where_what_is_offered_is_not_worth_it() -> None:
    class Declines(FixedDepth):
        def plan(self, *step: Any) -> list[Choice]:
            return [Choice()]

    speculator = Speculator(Declines(NGram.mode, 4), None, [NGram()], 4)
    assert speculator.propose([cast(RunningSequence, FakeSequence(4, 2, 3))], inf) is None


def test_looks_that_find_nothing_are_charged() -> None:
    controller = Simulation(World({NGRAM: 0.9})).controller()
    controller.rested(Plain(1, [1.0] * 8, 0, 0.0))
    room = controller.account.room
    controller.rested(Plain(1, [1.0] * 8, 3, 1.5))
    assert controller.account.room == pytest.approx(room - 1.5 * (1 - SHARE))


def test_drafts_are_charged_with_what_a_step_takes_beside_its_passes() -> None:
    """They would pay by what their verification takes, and do not by what whole steps take: 0.976
    of plain decoding where that is not known."""
    gains = []
    for looking in (0.0, 0.3):
        world = World({NGRAM: 0.55}, offers=0.6, looking=looking, row=0.05, noise=0.0)
        runs = [Simulation(world, seed=seed) for seed in (3, 4, 5)]
        rates = [own.run(own.controller(), 1500).rate for own in runs]
        gains.append(fmean(rates) * world.verify(1, 1))
    assert gains[0] > 1.1
    assert gains[1] > 0.984
