"""Requests shaped like known workloads: lengths, arrivals and prompts, all from a seed.

Lengths are lognormal, with statistics only and no data. Mean prompts are those of the layered
prefill paper (ShareGPT 2,340 tokens, arXiv summarisation 9,194). Spreads and
answers are our choice, near what serving papers report for these data sets.

| trace    | prompt mean | 90th percentile / median | answer mean | 90th percentile / median |
|----------|-------------|--------------------------|-------------|--------------------------|
| sharegpt |       2,340 |                      3.3 |         480 |                      2.0 |
| arxiv    |       9,194 |                      1.8 |         230 |                      1.8 |
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

NORMAL_90 = 1.2815515655446004
"""90th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of token counts."""

    mean: float
    spread: float
    """90th percentile over median."""

    def sample(self, count: int, scale: float, generator: np.random.Generator) -> NDArray[np.int64]:
        """``(count,)`` lengths, at least 1, all divided by ``1 / scale``."""
        sigma = math.log(self.spread) / NORMAL_90
        median = self.mean * scale * math.exp(-(sigma**2) / 2)
        lengths = generator.lognormal(math.log(median), sigma, count)
        return np.maximum(np.rint(lengths), 1).astype(np.int64)


@dataclass(frozen=True)
class Trace:
    prompt: Lengths
    answer: Lengths


TRACES = {
    "sharegpt": Trace(Lengths(2340, 3.3), Lengths(480, 2.0)),
    "arxiv": Trace(Lengths(9194, 1.8), Lengths(230, 1.8)),
}


def request_lengths(
    trace: Trace, count: int, *, scale: float, context: int, seed: int
) -> list[tuple[int, int]]:
    """Tokens of ``(prompt, answer)`` of each request.

    Answers are cut to a quarter of the context and prompts to what is left.
    """
    generator = np.random.default_rng(seed)
    prompts = trace.prompt.sample(count, scale, generator)
    answers = np.minimum(trace.answer.sample(count, scale, generator), max(context // 4, 1))
    prompts = np.minimum(prompts, context - answers)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the first of ``count`` requests to each of them, ``rate`` a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


class PromptMaker:
    """Texts of random words, each word one token: as many tokens as asked for, with any endpoint
    that has this tokenizer. Every prompt is different, so that experts and prefixes are too."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        words = {tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
        candidates = sorted(word for word in words if re.fullmatch(r" [A-Za-z]+", word))
        self._words = [word for word in candidates if len(tokenizer.encode(word).ids) == 1]
        assert len(self._words) > 1

    def make(self, tokens: int) -> str:
        chosen = self._generator.choice(len(self._words), tokens)
        return "".join(self._words[index] for index in chosen)
