"""What the papers say, as comparisons of two trained variants or of two predictors, and what shows.

Directions, not sizes: models here are a thousandth of the papers'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Variant -> figures of each seed, the same seeds for all."""

ABOUT_EQUAL = 0.01


@dataclass(frozen=True)
class Claim:
    """``metric`` of ``variant`` against that of ``other``.

    Attributes:
        row: of docs/reproduction.md; a number with a point has no row there.
        direction: ``less``, ``more``, or ``equal``: at most `ABOUT_EQUAL` worse, relatively.
    """

    row: str
    variant: str
    metric: str
    direction: str
    other: str
    paper: str

    def seen(self, results: Results) -> tuple[int, int]:
        """Seeds that show it, of how many."""
        pairs = list(zip(results[self.variant], results[self.other], strict=False))
        return sum(self._holds(a[self.metric], b[self.metric]) for a, b in pairs), len(pairs)

    def _holds(self, value: float, other: float) -> bool:
        if self.direction == "equal":
            return value <= other * (1 + ABOUT_EQUAL)
        return value < other if self.direction == "less" else value > other


@dataclass(frozen=True)
class Foretold:
    """``better`` foretells more than ``other``, in whatever model has both."""

    row: str
    better: str
    other: str
    paper: str

    def pairs(self, results: Results) -> list[tuple[float, float]]:
        """Of each model, all variants and seeds."""
        runs = [run for seeds in results.values() for run in seeds]
        return [
            (run[self.better], run[self.other])
            for run in runs
            if self.better in run and self.other in run
        ]


def _claims(row: str, variant: str, other: str, *lines: tuple[str, str, str]) -> list[Claim]:
    return [Claim(row, variant, metric, how, other, paper) for metric, how, paper in lines]


_LOCALITY = (
    ("chunk_sparsity", "more", "locality losses: 49 -> 71 % of experts unused by 8 tokens"),
    ("cache_hits", "more", "so caches hit more (our reading)"),
    ("bits_per_byte", "equal", "perplexity 14.85 -> 14.88"),
)

CLAIMS = [
    *_claims(
        "14", "bias", "sigmoid",
        ("max_violation", "less", "balance is better than with an auxiliary loss: .72 -> .04"),
        ("bits_per_byte", "equal", "perplexity is no worse: 9.56 -> 9.50"),
    ),
    *_claims(
        "10.3", "bias-dual", "bias",
        ("max_violation", "less", "steps that shrink as 1/t settle"),
        ("bits_per_byte", "equal", "at no cost"),
    ),
    *_claims(
        "15", "sinkhorn-often", "unbalanced",
        ("max_violation", "less", "some balanced steps replace the auxiliary loss"),
        ("bits_per_byte", "equal", "and cost no quality"),
    ),
    *_claims("16", "relu-local", "relu", *_LOCALITY),
    *_claims("16", "relu-local-weak", "relu", *_LOCALITY),
    *_claims(
        "16", "relu-local", "softmax",
        ("chunk_sparsity", "more", "61 -> 73 % against top-k"),
        ("reuse", "more", "87-90 % of experts are those of the token before"),
        ("bits_per_byte", "less", "perplexity 8.87 -> 8.69"),
    ),
    *_claims(
        "8", "pre-attention", "sigmoid",
        ("bits_per_byte", "equal", "routing before attention costs no quality"),
    ),
    *_claims(
        "6", "pre-gated", "softmax",
        ("reuse", "more", "tokens reuse the expert of the token before: 2921 of 4096, not 850"),
        ("cache_hits", "more", "so caches hit more (our reading)"),
        ("bits_per_byte", "equal", "quality is kept (after refactoring a dense model)"),
    ),
    *(
        claim
        for variant in ("similarity", "attention")
        for claim in _claims(
            "20", variant, "softmax",
            ("entropy_bits", "less", "routing entropy is lower"),
            ("fluctuation", "less", "assignments fluctuate less late in training"),
            ("kept_under_noise", "more", "routing is more robust to noise"),
            ("reuse", "more", "neighbours are routed alike (our reading)"),
            ("union", "less", "so fewer experts for 8 tokens (our reading)"),
            ("bits_per_byte", "less", "modest gains of quality"),
        )
    ),
    *_claims(
        "DeepSeek", "groups", "softmax",
        ("bits_per_byte", "equal", "groups that bound where a token is sent cost no quality"),
    ),
]  # fmt: skip

FORETOLD = [
    Foretold("5", "recall_token_table", "recall_popular", "the token's id decides the expert"),
    Foretold("1.5", "recall_path", "recall_token_table", "a path predictor is worth its training"),
    Foretold("6", "recall_lookahead", "recall_popular", "a later gate foresees from earlier rows"),
    Foretold("7", "recall_lookahead", "recall_lookahead_raw", "an adapted residual foresees more"),
    Foretold("1", "recall_ensemble", "recall_token_table", "together more than the free table"),
    Foretold("1", "recall_ensemble", "recall_lookahead", "together more than the best alone"),
]
