"""What `moe eval` says of routing policies, against what is known of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe import MoE
from moe.cli import main
from moe.commands.evaluate.command import evaluate
from moe.commands.evaluate.policy_costs import PolicyCostMeter, Variant, distinct_experts
from routing import PolicyChain, parse_policies

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:3000]


@pytest.mark.deep
def test_eval_prices_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = ["eval", str(DEMO), "--text", str(tmp_path / "text"), "--tokens", "200"]
    arguments += ["--set", "lossless=false"]
    policies = '--set=routing.policies=["des_vote:0.3:8", "pesf:0.5"]'
    assert main([*arguments, policies, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["policies"]
    found = [(cost["policy"], cost["phase"]) for cost in costs]
    both = "des_vote:0.3:8 + pesf:0.5"
    assert found == [
        ("des_vote:0.3:8", "decode"), ("pesf:0.5", "prefill"),
        (both, "prefill"), (both, "decode"),
    ]  # fmt: skip
    vote, skipping, as_prompt, decoded = costs
    assert vote["distinct"] <= 10 < vote["distinct_without"]
    assert vote["dropped"] == 0 < skipping["dropped"]
    assert vote["kl_bits"] > 0
    plain = evaluate(MoE.from_pretrained(DEMO), TEXT, tokens=200)
    assert vote["without"] == pytest.approx(plain.bits_per_byte)
    for one, other in ((as_prompt, skipping), (decoded, vote)):
        assert {**one, "policy": ""} == {**other, "policy": ""}
    assert main([*arguments, policies]) == 0
    assert "des_vote:0.3:8" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert "policies" not in json.loads(capsys.readouterr().out)


def test_policies_that_change_nothing_cost_nothing() -> None:
    model = MoE.from_pretrained(DEMO)
    chain = parse_policies(["top_p:1", "top_k:4"], lossless=False)
    ways = [*(Variant(PolicyChain((own,))) for own in chain.policies), Variant(chain)]
    prices = PolicyCostMeter(model, ways)
    prices.add(model.codec.encode(TEXT)[:100])
    for cost in prices.costs(400):
        assert (cost.worse, cost.kl_bits, cost.dropped, cost.top1_agreement) == (0, 0, 0, 1)
        assert cost.distinct == cost.distinct_without
    assert model.experts.policies.policies == ()


def test_distinct_experts_of_runs() -> None:
    visited = torch.tensor([[[1, 2], [2, 3], [4, -1], [4, 5], [0, 1]]])
    assert distinct_experts(visited, 2).tolist() == [[3, 2]]
    assert distinct_experts(visited, 8).shape == (1, 0)
