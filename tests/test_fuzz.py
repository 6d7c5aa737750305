"""What fuzzing has found stays mended: every input that is kept passes through its reader again."""

from __future__ import annotations

import pytest

from tests.fuzz import CORPORA, TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_are_read_or_refused(target: str) -> None:
    inputs = sorted((CORPORA / target).iterdir())
    assert inputs
    for file in inputs:
        TARGETS[target](file.read_bytes())
