"""How much a test tries: less in CI, which has twenty minutes on two cores."""

from __future__ import annotations

import os

IN_CI = "CI" in os.environ


def amount(usual: int, in_ci: int) -> int:
    """Examples, rounds or batches of a test."""
    return in_ci if IN_CI else usual
