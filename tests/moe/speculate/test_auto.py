"""``speculation.mode: auto`` on the shipped model: the same tokens, and counted in statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe import MoE, SamplingParams

DEMO = Path("examples/demo-model").resolve()
SETTINGS: dict[str, Any] = {"model": {"expert_bits": 8}, "memory": {"kv_tokens": 2048}}
TEXTS = ("def f(self, a, b):\n    return", "import os\nimport", "#include <torch/", "The list of")


@pytest.fixture(scope="module")
def plain() -> MoE:
    return MoE.from_pretrained(DEMO, SETTINGS)


@pytest.fixture(scope="module")
def auto() -> MoE:
    return MoE.from_pretrained(DEMO, SETTINGS, speculation={"mode": "auto", "max_depth": 6})


@pytest.mark.deep
def test_greedy_tokens_are_those_without_drafts(plain: MoE, auto: MoE) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    for batch in (1, 3, 4):
        for _ in range(3):  # it goes on learning
            expected = [c.token_ids for c in plain.generate(TEXTS[:batch], params)]
            assert [c.token_ids for c in auto.generate(TEXTS[:batch], params)] == expected


def test_statistics_add_up(auto: MoE) -> None:
    auto.reset_stats()
    auto.generate(TEXTS, SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True))
    figures = auto.stats()["speculation"]
    assert figures["tokens"] >= 4 * 29  # one of each comes of the prompt
    assert sum(figures["depths"].values()) <= figures["tokens"]
    assert figures["rows"] >= sum(figures["depths"].values())
    for record in figures["modes"].values():
        positions = record["by_position"]
        assert sum(p["accepted"] for p in positions) == record["accepted"] <= record["verified"]
        verified = [p["verified"] for p in positions]
        assert verified == sorted(verified, reverse=True)
    assert set(figures["control"]["expected_acceptance"]) == {
        "elastic:4b",
        "elastic:2b",
        "elastic:4b:top2",
        "mtp",
    }
