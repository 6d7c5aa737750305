"""Verification gives the model's own tokens: exactly where nothing is left to chance, else by their
distribution, however bad the draft is."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.sampling import draws, host
from moe.sampling.batch import LogitsError, Token
from moe.sampling.drafted import DraftedTokens
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from moe.sampling.sampler import verify as verify_batch
from moe.speculate.draft import PLAIN, Draft, Mode
from tests.amounts import amount
from tests.readbacks import readbacks

MODE = Mode("elastic")
VOCABULARY = 6
ROUNDS = amount(5_000, quick=2_000)


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), [0, 1], VOCABULARY)


def verify(own: Sampler, draft: Draft, logits_TV: Tensor) -> list[Token]:
    """Of one sequence; raises what it has in place of tokens."""
    (found,) = verify_batch([own], [draft.guesses], [logits_TV])
    if found.error is not None:
        raise found.error
    return found.tokens


def by_rule(*tokens: int) -> Draft:
    return Draft.sure(MODE, tokens, [1.0] * len(tokens))


def rows(count: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, VOCABULARY, generator=generator)


def drafted(guesser: Sampler, logits_TV: Tensor) -> Draft:
    """A draft whose own logits are these."""
    tokens, _, proposals = zip(*(guesser.propose(row) for row in logits_TV), strict=True)
    return Draft(MODE, tokens, (1.0,) * len(tokens), proposals)


def drafted_on_device(forks: list[Sampler], logits_TV: Tensor) -> list[Draft]:
    """The same by drafts whose tokens stay where they are drawn."""
    made: list[list[Any]] = [[] for _ in forks]
    with patch.object(host, "on_host", lambda _: False):
        for place, own_V in enumerate(logits_TV):
            drawn = DraftedTokens(forks, own_V.expand(len(forks), -1), place)
            tokens = drawn.ids_B.tolist()
            for draft, *own in zip(made, tokens, drawn.proposals(tokens), strict=True):
                draft.append(own)
    return [Draft(MODE, *zip(*((t, 1.0, p) for t, p in own), strict=True)) for own in made]


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=5), st.integers(0, 99))
def test_greedy_tokens_are_those_of_no_draft(guesses: list[int], seed: int) -> None:
    logits_TV = rows(len(guesses) + 1, seed)
    tokens = [token.id for token in verify(sampler(temperature=0), by_rule(*guesses), logits_TV)]
    best = logits_TV.argmax(-1).tolist()
    right = next((i for i, (a, b) in enumerate(zip(guesses, best, strict=False)) if a != b), None)
    assert tokens == best[: len(best) if right is None else right + 1]


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.4, 1.0, 2.0]),
            "top_k": st.integers(0, 4),
            "top_p": st.sampled_from([0.3, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.2]),
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.7]),
            "logit_bias": st.sampled_from([{}, {3: 2.0}]),
            "seed": st.integers(0, 5),
        }
    ),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.booleans(),
)
def test_a_seed_gives_what_it_gives_without_drafts(
    params: dict[str, Any], seed: int, noise: float, at_once: bool
) -> None:
    """Also with penalties, which see each accepted token; whatever the draft is like. Each row
    depends on the token before it, as a model's do."""
    with patch("moe.sampling.sampler._reading_waits", lambda _: at_once):
        check_seed(params, seed, noise)


def check_seed(params: dict[str, Any], seed: int, noise: float) -> None:
    after_VV = rows(VOCABULARY, seed)
    plain, expected = sampler(**params, logprobs=2), list[Token]()
    while len(expected) < 24:
        expected.append(plain.sample(after_VV[expected[-1].id if expected else 0]))
    speculating, chosen = sampler(**params, logprobs=2), 0
    tokens: list[Token] = []
    while len(tokens) < 20:
        last, guesser = tokens[-1].id if tokens else 0, speculating.fork()
        read, proposals = [last], []
        for noise_V in rows(3, seed + len(tokens)):
            token, _, proposal = guesser.propose(after_VV[read[-1]] + noise * noise_V)
            read.append(token)
            proposals.append(proposal)
        draft = Draft(MODE, tuple(read[1:]), (1.0,) * 3, tuple(proposals))
        new = verify(speculating, draft, after_VV[read])
        tokens, chosen = tokens + new, chosen + len(new) - 1
    assert tokens == expected[: len(tokens)]
    if noise == 0.0:
        assert chosen == 15  # all of every draft


@pytest.mark.parametrize(
    ("params", "own_TV", "at_once"),
    [
        (
            {"top_k": 5, "top_p": 0.95, "min_p": 0.02},
            torch.tensor([[6.0, 0, 0, 0, 0, 0]] * 2),
            False,
        ),
        (
            {
                "temperature": 1.3,
                "presence_penalty": 1.0,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.3,
                "logit_bias": {2: 1.5, 4: -50.0},
            },
            rows(2, seed=8, scale=3.0),
            True,
        ),
        ({"temperature": 0.8, "top_p": 0.9, "top_k": 5}, rows(2, seed=9, scale=3.0), True),
    ],
)
def test_chances_are_those_of_the_model(
    params: dict[str, Any], own_TV: Tensor, at_once: bool
) -> None:
    """Chi-square over pairs of tokens, against the exact probabilities of the model, with drafts
    that are far from it. What comes second depends on what came first, as in a model."""
    first_V, after_VV = rows(1, seed=5, scale=1.0)[0], rows(VOCABULARY, seed=6, scale=1.5)
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    fresh = sampler(**params)
    targets = [fresh.fork() for _ in range(ROUNDS)]
    if at_once and not fresh.needs_tokens:
        drafts = drafted_on_device([target.fork() for target in targets], own_TV)
    else:
        drafts = [drafted(target.fork(), own_TV) for target in targets]
    logits = [torch.stack([first_V, *after_VV[list(draft.tokens)]]) for draft in drafts]
    with patch("moe.sampling.sampler._reading_waits", lambda _: at_once):
        found = verify_batch(targets, [draft.guesses for draft in drafts], logits)
    firsts = [one.tokens[0].id for one in found]
    others = verify_batch(targets, [()] * ROUNDS, [after_VV[first][None] for first in firsts])
    for first, one, other in zip(firsts, found, others, strict=True):
        counts[first, (one.tokens + other.tokens)[1].id] += 1
    assert chi_square_fits(counts, pair_chances(params, first_V, after_VV))


def pair_chances(params: dict[str, Any], first_V: Tensor, after_VV: Tensor) -> Tensor:
    """``(V, V)`` probabilities of the first two tokens."""
    chances = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    ids, weights = sampler(**params)._candidates(first_V)
    for first, chance in zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True):
        after = sampler(**params)
        after._remember(first)
        following, more = after._candidates(after_VV[first])
        chances[first, following] = torch.from_numpy(chance * more / more.sum())
    return chances


def chi_square_fits(counts: Tensor, chances: Tensor) -> bool:
    """Whether counts are as chances say, but for one time in ten thousand."""
    assert counts[chances == 0].sum() == 0
    expected = chances * counts.sum()
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    degrees = len(seen) - 1
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty's cube root: 3.72 standard deviations are one in ten thousand.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    return statistic < limit


@settings(max_examples=15)
@given(st.data())
def test_as_many_proposals_are_taken_as_can_be(data: st.DataObject) -> None:
    """The chance that a token drawn from q is taken is the overlap of p and q; all of p comes out.

    Exact: over a grid of the uniform number that decides.
    """
    weights = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)
    p = np.array(data.draw(weights), dtype=float)
    q = np.array(data.draw(weights), dtype=float)
    q /= q.sum()
    ids = np.array(data.draw(st.permutations(range(4))))
    grid = 499
    steps = torch.arange(grid)
    uniforms = [(own.double()[:, None] + 0.5) / grid for own in (steps, steps * 307 % grid)]
    spread = [torch.from_numpy(own).expand(grid, 4) for own in (ids, p[ids], q)]
    taken, came = 0.0, np.zeros(4)
    for token in q.nonzero()[0].tolist():
        proposed = torch.full((grid, 1), token)
        got = draws.accepted(spread[0], spread[1], spread[2], proposed, *uniforms)
        offered = q.nonzero()[0][::-1], q[q > 0][::-1]
        numbers = torch.cat(uniforms, 1).tolist()
        for places, row in ((ids, p[ids]), (None, p)):
            alone = [host.accepted(places, row, offered, token, *own) for own in numbers]
            spread_ids, weights_GC = None if places is None else spread[0], torch.from_numpy(row)
            together = draws.accepted(
                spread_ids, weights_GC.expand(grid, 4), spread[2], proposed, *uniforms
            )
            assert together[:, 0].tolist() == alone
        came += q[token] / grid * np.bincount(got[:, 0], minlength=4)
        taken += float(q[token]) / grid * int((got == token).sum())
    p = p / p.sum()
    assert taken == pytest.approx(np.minimum(p, q).sum(), abs=0.01)
    np.testing.assert_allclose(came, p, atol=0.02)


def test_a_bad_row_ends_what_is_accepted_before_it() -> None:
    logits_TV = rows(3)
    best = logits_TV.argmax(-1).tolist()
    logits_TV[1, 2] = float("nan")
    assert len(verify(sampler(temperature=0), by_rule(*best[:2]), logits_TV)) == 1
    with pytest.raises(LogitsError, match="NaN"):
        verify(sampler(temperature=0), PLAIN, logits_TV[1:2])


def test_logprobs_are_the_models_own() -> None:
    logits_TV = rows(3)
    target = sampler(logprobs=1, temperature=0.7, top_k=3)
    draft = drafted(target.fork(), rows(2, seed=9))
    for token, row in zip(verify(target, draft, logits_TV), logits_TV, strict=False):
        assert token.logprob == pytest.approx(float(row.double().log_softmax(0)[token.id]))


def test_a_fork_leaves_the_sampler_as_it_is() -> None:
    one, other = (sampler(seed=3, frequency_penalty=0.5, repetition_penalty=1.2) for _ in range(2))
    logits = rows(8)
    for row in logits[:3]:
        fork = one.fork()
        for guess in rows(4, seed=1):
            fork.propose(guess)
        assert one.sample(row) == other.sample(row)


def test_drafts_of_chance_draw_by_numbers_of_their_own() -> None:
    """Or what is drafted and what judges it would not be independent."""
    forks = [sampler().fork() for _ in range(2)]
    assert forks[0]._random.getstate() != forks[1]._random.getstate()


def test_all_drafts_are_verified_with_one_readback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: drawn and other drafts, plain ones, and what else was likely behind them."""
    monkeypatch.setattr("moe.sampling.sampler._reading_waits", lambda _: True)
    monkeypatch.setattr(host, "on_host", lambda _: False)
    ways: list[dict[str, Any]] = [{"top_k": 3, "logprobs": 1}, {"seed": 3}, {"temperature": 0}, {}]
    targets = [sampler(**way) for way in ways]
    drafts = [drafted(target.fork(), rows(3, seed=9)) for target in targets[:3]] + [PLAIN]
    logits = [rows(len(draft.tokens) + 1) for draft in drafts]

    def run() -> None:
        found = verify_batch(targets, [draft.guesses for draft in drafts], logits)
        for one, own_TV in zip(found, logits, strict=True):
            assert one.tokens
            known.append((one.likeliest(1), own_TV))

    known: list[tuple[list[int], Tensor]] = []
    assert len(readbacks(run)) == 1
    assert all(likeliest == own_TV.argmax(-1)[1:].tolist() for likeliest, own_TV in known)
