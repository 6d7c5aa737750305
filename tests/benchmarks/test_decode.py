"""The report of `benchmarks.decode`: ours at each width, and whoever else there is as a peer."""

import sys

import pytest

from benchmarks.decode import BATCHES, by_bits, parse

RATES = {"moe 8 bits": 6.0, "moe 4 bits": 8.0, "moe 8 bits, unfused": 2.0, "llama.cpp Q8_0": 3.0}


def report(names: list[str], bits: list[int]) -> list[dict]:
    rates = {f"decode {batch}": {n: RATES[n] * batch for n in names} for batch in BATCHES}
    shares = {n: dict.fromkeys(BATCHES, 0.5) for n in names if n.startswith("moe")}
    return by_bits(rates, shares, bits)


def test_each_width_has_its_figures_and_the_unfused_is_a_peer() -> None:
    eight, four = report(list(RATES), [8, 4])
    peers = {"moe 8 bits, unfused": 8.0, "llama.cpp Q8_0": 12.0}
    assert (eight["bits"], four["bits"]) == (8, 4)
    assert eight["batch"]["4"] == {
        "tokens_per_second": 24.0, "bandwidth_fraction": 0.5, "peers": peers
    }  # fmt: skip
    assert four["batch"]["4"]["tokens_per_second"] == 32.0
    assert four["batch"]["4"]["peers"] == peers


@pytest.mark.parametrize("given", [["--bits"], ["--bits", "8,4"], []])
def test_peers_may_be_alone(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["decode", *given])
    assert parse().bits == {0: None, 1: [], 2: [8, 4]}[len(given)]
    (alone,) = report(["llama.cpp Q8_0"], [])
    assert alone["bits"] is None
    assert alone["batch"]["1"]["peers"] == {"llama.cpp Q8_0": 3.0}
