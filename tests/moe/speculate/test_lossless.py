"""Speculation changes no token, whatever the mode and depth, and the experts in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from moe import SamplingParams, Structure
from moe.engine.engine import Engine
from moe.engine.runner import ModelRunner
from moe.kv.prefix_cache import PrefixCache
from moe.sampling.batch import Row
from moe.sampling.sampler import Guesses
from moe.speculate.draft import PLAIN, Draft, FixedDepth, Mode
from moe.speculate.ngram import ModelFree
from moe.speculate.speculator import Speculator
from tests.amounts import deep_except
from tests.moe.speculate.demo_models import (
    MODES,
    PROMPTS,
    Models,
    greedy,
    speculating,
    tokens_of,
)

DEPTHS = (1, 4, 15)
FEW = [name for name in ("4 bits", "voted, 4 bits", "ngram") if name in MODES]


@pytest.mark.parametrize("residency", deep_except([0.25], [1.0, 0.5, 0.25]))
@pytest.mark.parametrize("name", deep_except(["4 bits", "ngram", "auto"], MODES))
def test_greedy_tokens_are_those_of_no_speculation(
    models: Models, residency: float, name: str
) -> None:
    """All prompts in the end, by few for each way to speculate."""
    model = models.at(residency)
    for depth, (batch, count) in product(DEPTHS, ((1, 1), (8, 9))):
        number = list(MODES).index(name) * len(DEPTHS) + DEPTHS.index(depth)
        places = [(number * 9 + index) % PROMPTS for index in range(count)]
        engine, watched = speculating(model, max_depth=depth, **MODES[name])
        settings = engine.scheduler.engine
        engine.scheduler.engine = settings.model_copy(update={"max_batch_size": batch})
        groups = [model.request(models.prompts[place], greedy()) for place in places]
        assert tokens_of(engine, groups) == [models.expected[place] for place in places]
        if MODES[name]["mode"] == "elastic":
            assert watched.drafted > 0


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("residency", deep_except([0.25], [1.0, 0.25]))
def test_also_when_memory_is_short_and_requests_are_cancelled(
    models: Models, residency: float, name: str
) -> None:
    model, draw = models.at(residency), random.Random(1)
    engine, _ = speculating(model, max_depth=5, **MODES[name])
    engine.scheduler.kv_tokens = 70  # a few sequences: they give way to each other all the time
    groups = [model.request(prompt, greedy()) for prompt in models.prompts[:30]]
    for group in groups:
        engine.submit(group)
    cancelled = set()
    while not engine.idle:
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
        assert engine.scheduler.num_used_tokens() <= 70
        if draw.random() < 0.15:
            victim = draw.randrange(len(groups))
            engine.cancel(groups[victim])
            cancelled.add(victim)
    assert 3 < len(cancelled) < 25
    for index, group in enumerate(groups):
        expected = models.expected[index]
        tokens = group.sequences[0].token_ids
        assert tokens == (expected[: len(tokens)] if index in cancelled else expected)


STRUCTURES = [
    Structure.json_object(),
    Structure.json_schema({"type": "array", "items": {"enum": ["def main", 12]}, "maxItems": 6}),
    Structure.regex(r"[a-z]{2,5}( self\.[a-z]+,){1,3}"),
    None,
]


@pytest.mark.parametrize("name", FEW)
def test_structured_tokens_are_those_of_a_sequence_alone(models: Models, name: str) -> None:
    """In company, with drafts, and read again where memory is short."""
    model = models.at(1.0)
    prompts = models.prompts[:8]
    params = [
        SamplingParams(max_new_tokens=30, temperature=index % 3 * 0.5, seed=index, structure=one)
        for index, one in enumerate(STRUCTURES * 2)
    ]
    alone = [model.generate(*pair)[0] for pair in zip(prompts, params, strict=True)]
    engine, watched = speculating(model, max_depth=5, **MODES[name])
    engine.scheduler.kv_tokens = 120
    groups = [model.request(*pair) for pair in zip(prompts, params, strict=True)]
    assert tokens_of(engine, groups) == [completion.token_ids for completion in alone]
    assert watched.accepted > 0
    assert [c.finish_reason for c in alone].count("stop") >= 4
    for completion, one in zip(alone, STRUCTURES * 2, strict=True):
        if one is not None and one.kind == "json_schema" and completion.finish_reason == "stop":
            json.loads(completion.text)


def test_known_prefixes_and_forks_hold_no_drafts(models: Models) -> None:
    """What drafts wrote into keys and values is neither kept for others nor shared."""
    model = models.at(1.0)
    engine, watched = speculating(model, max_depth=6, **MODES["4 bits"])
    prefixes = engine.scheduler.prefixes = PrefixCache(800)
    prompt = [*models.prompts[0], *models.prompts[1]]
    for length in (3, 20, 40):
        params = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True, n=2)
        group = model.request(prompt, params)
        tokens_of(engine, [group])
        both = [sequence.token_ids for sequence in group.sequences]
        expected = model.generate([prompt], params)[0].token_ids
        assert both == [expected, expected]
        prompt = prompt + expected[:-2]
    assert prefixes.hit_tokens > 0
    assert watched.accepted > 0


class Oracle(ModelFree[list[int]]):
    """Drafts what the model will say; of a sequence it knows the prompt and what has been said."""

    mode, new_state = Mode("ngram"), list[int]

    def __init__(self) -> None:
        self.right: list[list[int]] = []
        self.most: list[int] = []

    def take(self, own: list[int], tokens: Sequence[int]) -> None:
        own += tokens

    def following(self, own: list[int], limit: int) -> Draft:
        whole = next(known for known in self.right if known[: len(own)] == own)
        rest = whole[len(own) : len(own) + limit]
        if whole is self.right[0]:
            self.most.append(len(rest))
        return Draft.sure(self.mode, rest, [1.0] * len(rest)) if rest else PLAIN


def test_all_of_a_draft_may_stand(models: Models) -> None:
    """The last drafted token's keys and values come from the verification like all others."""
    model, oracle = models.at(1.0), Oracle()
    engine, loaded = model.engine(), model._loaded
    assert isinstance(engine, Engine)
    speculator = Speculator(FixedDepth(oracle.mode, 3), {}, [oracle], 3)
    engine.runner = ModelRunner(loaded.backbone, loaded.experts, speculator)
    groups = [model.request(prompt, greedy()) for prompt in models.prompts[:6]]
    for group, expected in zip(groups, models.expected, strict=False):
        oracle.right.append([*group.sequences[0].prompt_token_ids, *expected])
    assert tokens_of(engine, groups) == models.expected[:6]
    assert all(group.sequences[0].cache is None for group in groups)
    assert oracle.most == [3, 2]  # after the token of the prompt: 4 tokens, then 3


def test_seeds_and_penalties_give_what_they_give_without_drafts(models: Models) -> None:
    model = models.at(1.0)
    params = SamplingParams(
        max_new_tokens=24, temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=7, logprobs=1,
        repetition_penalty=1.1, logit_bias={5: 1.0}, n=3,
    )  # fmt: skip
    prompts = models.prompts[:4]
    expected = [c.token_ids for c in model.generate(prompts, params)]
    for name in ("4 bits", "ngram"):
        engine, _ = speculating(model, max_depth=5, **MODES[name])
        groups = [model.request(prompt, params) for prompt in prompts]
        tokens_of(engine, groups)
        assert [s.token_ids for group in groups for s in group.sequences] == expected


def test_chance_without_a_seed_is_drafted_and_judged(models: Models) -> None:
    """By chances that differ a little (test_verify.py has that nothing is lost by it)."""
    model = models.at(1.0)
    params = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, logprobs=0)
    engine, watched = speculating(model, max_depth=4, **MODES["4 bits"])
    groups = [model.request(prompt, params) for prompt in models.prompts[:6]]
    tokens_of(engine, groups)
    assert watched.accepted > 0.6 * watched.drafted > 30


def test_tokens_behind_a_stop_are_not_given(models: Models) -> None:
    model = models.at(1.0)
    prompt = models.prompts[0]
    plain = model.generate([prompt], SamplingParams(max_new_tokens=40, temperature=0.0))[0]
    stop = plain.token_ids[10]
    params = SamplingParams(max_new_tokens=40, temperature=0.0, stop_token_ids=(stop,))
    expected = model.generate([prompt], params)[0]
    engine, _ = speculating(model, max_depth=12, mode="ngram")
    group = model.request(prompt, params)
    assert tokens_of(engine, [group]) == [expected.token_ids]
    assert group.sequences[0].finish_reason == expected.finish_reason == "stop"


def test_drafts_end_where_a_sequence_must(models: Models) -> None:
    model = models.at(1.0)
    engine, watched = speculating(model, max_depth=15, **MODES["4 bits"])
    for left in (1, 2, 3):
        params = SamplingParams(max_new_tokens=left, temperature=0.0, ignore_eos=True)
        tokens_of(engine, [model.request(models.prompts[3], params)])
    assert max(trial.drafted for round in watched.rounds for trial in round.trials) == 1


def test_what_breaks_in_a_draft_is_met_by_the_verification(models: Models) -> None:
    """The sequence that it concerns fails there; the others go on."""
    model = models.at(1.0)
    engine, _ = speculating(model, max_depth=3, **MODES["4 bits"])
    groups = [model.request(prompt, greedy()) for prompt in models.prompts[:2]]
    for group in groups:
        engine.submit(group)
    while not groups[0].sequences[0].token_ids:
        engine.step()

    def fail(_: int) -> Row:
        raise ArithmeticError("no token")

    def broken(guesses: Guesses) -> Iterator[Row]:
        return map(fail, range(len(guesses) + 1))

    groups[0].sequences[0].sampler.rows = broken  # type: ignore
    errors = []
    while not engine.idle:
        errors += [event for _, event in engine.step() if isinstance(event, Exception)]
    assert [str(error) for error in errors] == ["no token"]
    assert groups[1].sequences[0].token_ids == models.expected[1]
