"""What benchmarks share."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.common import several


def test_numbers_with_spaces_or_commas_between(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", **several(int), default=[8])
    for written in ("1 2 4", "1,2,4", "1,2 4"):
        assert parser.parse_args(["--ranks", *written.split()]).ranks == [1, 2, 4]
    assert parser.parse_args([]).ranks == [8]
    with pytest.raises(SystemExit):
        parser.parse_args(["--ranks", "1,x"])
    assert "invalid int value: '1,x'" in capsys.readouterr().err
