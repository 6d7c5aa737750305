"""Findings on traces that leave something out: they say so, and never fail."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from moe.calibration.trace import Trace
from moe.commands.trace.findings import Findings, analyse
from moe.commands.trace.plots import by_coactivation, draw
from moe.commands.trace.report import html, report_tables


def found(tokens: int, lengths: list[int], *, visited: bool = True) -> Findings:
    """Layers of four experts with empty slots, of eight with three slots, and of one."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(-1, 4, (tokens, 1), generator=generator)
    three = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :3].sort(1).values
    ids = [some, three, torch.zeros(tokens, 1, dtype=torch.long)]
    ids = ids if visited else [torch.full_like(own, -1) for own in ids]
    weights = [torch.rand(own.shape, generator=generator).half() * (own >= 0) for own in ids]
    words = torch.randint(0, 9, (tokens,), generator=generator).int()
    trace = Trace(words, lengths, [4, 8, 1], [own.to(torch.int16) for own in ids], weights)
    return analyse(trace, 9, "model", "text")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("tokens", "lengths", "visited"),
    [(1, [1], True), (50, [20, 30], True), (30, [30], False)],
)
def test_whatever_is_there_is_shown(tokens: int, lengths: list[int], visited: bool) -> None:
    findings = found(tokens, lengths, visited=visited)
    json.dumps(findings.as_json(), allow_nan=False)
    for sheet in report_tables(findings):
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
    images = draw(findings)
    assert (
        html(findings, images).count("data:image/png")
        == len(images)
        == len(report_tables(findings))
    )


def test_what_is_unknown_is_null() -> None:
    single = found(1, [1]).as_json()["layers"][1]
    assert single["recall"] == {}
    assert single["same_token"] is None
    assert single["distinct"] == [3.0, *[None] * 7]
    only = found(50, [20, 30]).layers[2]
    assert (only.explained, only.max_violation, only.pairs) == (0.0, 0.0, [])


def test_experts_that_go_together_are_drawn_side_by_side() -> None:
    lift = np.full((6, 6), 0.5)
    for some in ([0, 3, 5], [1, 2, 4]):
        lift[np.ix_(some, some)] = 4.0
    np.fill_diagonal(lift, np.nan)
    shown = by_coactivation(lift)
    assert np.isnan(np.diag(shown)).all()
    together = np.nan_to_num(shown, nan=2.0) == 2
    assert together[:3, :3].all()
    assert together[3:, 3:].all()
    assert together.sum() == 18
