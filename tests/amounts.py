"""The two tiers of tests: `make test` is quick; `deep` marks what `make test-deep` runs.

A test takes its deep amount of examples, rounds or batches in the deep tier and when all tests run
(``DEEP=1``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

IN_CI = "CI" in os.environ
DEEP = "DEEP" in os.environ


def amount(deep: int, quick: int) -> int:
    """Return how many examples, rounds or batches a test takes."""
    return deep if DEEP else quick


def deep_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters, all but the `quick` ones marked ``deep``.

    A tuple is the values of several names.
    """
    deep = pytest.mark.deep
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=deep)
        for value in values
    ]
