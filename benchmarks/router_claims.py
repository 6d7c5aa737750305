"""What the papers say of each router, as comparisons of two trained variants, and whether it shows.

Directions, not sizes: models here are a thousandth of the papers' (ALGORITHMS.md 27).
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
        row: of ALGORITHMS.md 27, or the section that says it.
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
            ("bits_per_byte", "less", "modest gains of quality"),
        )
    ),
    *_claims(
        "DeepSeek", "groups", "softmax",
        ("bits_per_byte", "equal", "groups that bound where a token is sent cost no quality"),
    ),
]  # fmt: skip
