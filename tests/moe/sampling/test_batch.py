"""Batches of tokens: against a plain numpy sampler of one row, by property and distribution; and
nothing in them waits for a device but the one readback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sampling import batch, draws, host
from moe.sampling.batch import LogitsError, Row, Token, draw_batch
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler, sample_batch
from tests.readbacks import readbacks

INF = float("inf")
VALUES = st.sampled_from([-INF, -2.5, -1.0, -0.0, 0.0, 0.5, 2.0, 7.0])
VOCABULARY = 11


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], Row]:
    """Logits with many ties, and everything that can be asked for."""
    logits = draw(st.lists(VALUES, min_size=VOCABULARY, max_size=VOCABULARY))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1e-300, 1e300])),
        top_k=draw(st.integers(0, VOCABULARY + 2)),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 1e-6, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.4, 1.0])),
        logprobs=draw(st.sampled_from([None, 0, 3, 20])),
    )
    edits = None
    if ids := draw(st.lists(st.integers(0, VOCABULARY - 1), unique=True)):
        numbers = [
            [
                draw(st.sampled_from(own))
                for own in ([0.0, -100.0, 1.5], [1.0, 1.3, 0.5], [0.0, 0.7])
            ]
            for _ in ids
        ]
        edits = np.array(ids), np.array(numbers)
    bits = None
    if draw(st.booleans()):
        allowed = draw(st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY))
        bits = np.packbits(np.array(allowed), bitorder="little")
    return logits, Row(params, draw(st.floats(0, 1 - 2**-53)), edits, bits)


def expected(logits: list[float], row: Row) -> Token | None:
    """One token after the other; None: no token can be drawn."""
    raw, params = np.array(logits), row.params
    scores = raw.copy()
    for token_id, (added, factor, subtracted) in zip(*(row.edits or ((), ())), strict=True):
        score = scores[token_id] + added
        scores[token_id] = (score / factor if score > 0 else score * factor) - subtracted
    if row.bits is not None:
        allowed = np.unpackbits(row.bits, count=VOCABULARY, bitorder="little")
        scores[allowed == 0] = -INF
    scores = scores.astype(np.float32).astype(np.float64)
    if scores.max() == -INF or raw.max() == -INF:
        return None
    order = sorted(range(VOCABULARY), key=lambda i: (-scores[i], i))
    if params.temperature == 0:
        chosen = order[0]
    else:
        with np.errstate(over="ignore"):
            weights = np.exp((scores - scores.max()) / params.temperature)
        ranked = order[: params.top_k] if params.top_k else order
        mass, total, kept = 0.0, weights[ranked].sum(), []
        for i in ranked:
            if i == ranked[0] or params.top_p == 1 or mass < params.top_p * total:
                kept.append(i)
            mass += weights[i]
        kept = [i for i in kept if weights[i] >= params.min_p and weights[i] > 0]
        if not params.top_k and params.top_p == 1:
            kept.sort()
        sums = weights[kept].cumsum()
        place = int((sums <= row.uniform * sums[-1]).sum())
        chosen = kept[min(place, len(kept) - 1)]
    if params.logprobs is None:
        return Token(chosen)
    logs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    top = sorted(range(VOCABULARY), key=lambda i: (-raw[i], i))[: params.logprobs]
    return Token(chosen, logs[chosen], tuple((i, logs[i]) for i in top))


@given(st.lists(rows(), min_size=1, max_size=7), st.sampled_from([1, 3, 1000]))
def test_each_row_is_what_a_plain_sampler_takes(
    batched: list[tuple[list[float], Row]], at_once: int
) -> None:
    """In any company, in parts of any size, and by the arithmetic of other devices, too."""
    logits = [torch.tensor([values]) for values, _ in batched]
    given = [row for _, row in batched]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_CACHED", at_once * VOCABULARY)
        found = draw_batch(logits, given)
        patch.setattr(host, "on_host", lambda _: False)
        patch.setattr(batch, "_FIRST_GUESS", 2)  # more scores are looked at, and more again
        assert [str(token) for token in draw_batch(logits, given)] == [str(t) for t in found]
    for (values, row), (token, likeliest) in zip(batched, found, strict=True):
        wanted = expected(values, row)
        if wanted is None:
            assert isinstance(token, LogitsError)
            continue
        assert isinstance(token, Token)
        assert token.id == wanted.id
        assert values[likeliest] == max(values)
        if wanted.logprob is not None:
            assert token.logprob == pytest.approx(wanted.logprob, abs=1e-12)
            assert token.top is not None
            assert wanted.top is not None
            assert [i for i, _ in token.top] == [i for i, _ in wanted.top]
            assert [v for _, v in token.top] == pytest.approx([v for _, v in wanted.top])
        else:
            assert token.top is None


@pytest.mark.parametrize("largest", [draws.largest, draws.sorted_keys])
def test_both_ways_to_the_largest_scores_agree(largest: Callable[..., torch.Tensor]) -> None:
    scores = torch.randint(-3, 3, (4, 301)).float() * torch.tensor([1.0, -0.5, 0.0, 1e30])[:, None]
    scores[0, ::7] = -INF
    plain = (-scores.numpy()).argsort(axis=1, kind="stable")
    for count in (1, 20, 300, 301):
        assert np.array_equal(largest(scores, count).numpy(), plain[:, :count])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=0.8, top_p=0.7),
    ],
)
def test_tokens_of_one_batch_follow_the_distribution(params: SamplingParams) -> None:
    """The parts of `draw` for large vocabularies, too: most of 1,300 tokens are masked."""
    from scipy.stats import chisquare  # machines with few packages use `rows`

    logits = torch.full((1300,), -INF)
    logits[100::130] = torch.tensor([0.0, 1.5, 0.3, 0.3, -1.0, 2.0, 1.1, -3.0, 0.9, 1.8])
    ids, weights = batch.candidates(logits, params)
    uniforms = np.random.default_rng(5).random(1000)
    found = draw_batch([logits.expand(1000, -1)], [Row(params, own) for own in uniforms])
    counts = np.bincount([t.id for t, _ in found if isinstance(t, Token)], minlength=1300)
    assert counts.sum() == counts[ids].sum() == 1000
    assert chisquare(counts[ids], 1000 * weights / weights.sum()).pvalue > 1e-3


EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"top_p": 0.8, "repetition_penalty": 1.3, "logprobs": 20},
    {"top_k": 5, "presence_penalty": 0.5, "logit_bias": {3: -1.0}},
    {"min_p": 0.1, "frequency_penalty": 0.5, "logprobs": 0},
]


def samplers() -> list[Sampler]:
    return [Sampler(SamplingParams(seed=9, **own), [1, 2, 2], 700) for own in EVERYTHING]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Not on company: the same tokens and log-probabilities as alone."""
    logits = torch.randn(4, len(EVERYTHING), 700)
    alone, together = samplers(), samplers()
    for rows_BV in logits:
        made = sample_batch(together, list(rows_BV))
        assert made == [own.sample(row) for own, row in zip(alone, rows_BV, strict=True)]
    bfloat = logits[0].bfloat16()
    made = sample_batch(together, list(bfloat))
    assert made == sample_batch(alone, list(bfloat.float()))


def test_a_batch_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every parameter, a structure's mask, and the arithmetic of other devices."""
    monkeypatch.setattr(host, "on_host", lambda _: False)
    logits = torch.randn(len(EVERYTHING), 700) * 4
    given = [sampler.row() for sampler in samplers()]
    given[2] = given[2]._replace(bits=np.full(88, 0x55, np.uint8))
    (only,) = readbacks(lambda: draw_batch([logits], given))
    assert only.startswith("numpy at moe/sampling/batch.py:")


def test_a_row_that_cannot_be_used_is_nobody_elses() -> None:
    logits = torch.randn(3, 700)
    logits[1, 5] = float("nan")
    params = replace(SamplingParams(seed=4), top_p=0.9, logprobs=2)
    made = sample_batch([Sampler(params, [], 700) for _ in range(3)], list(logits))
    assert isinstance(made[1], LogitsError)
    assert made[0] == Sampler(params, [], 700).sample(logits[0])
    assert made[2] == Sampler(params, [], 700).sample(logits[2])
