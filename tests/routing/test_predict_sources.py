"""Each way of guessing, against plain counting and models of routing where the answer is known."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from routing import Routing
from routing.predict import contexts
from routing.predict.ensemble import EvidenceSource, floats, sigmoid
from routing.predict.lookahead import (
    ANY_DISTANCE,
    Gate,
    Lookahead,
    fit_gate,
    margins,
)
from routing.predict.path import CONTEXT, PathEvidence, PathNetwork, fit_path
from routing.predict.token_table import fit_token_table
from routing.routers import RouterRule

E, K, V, H = 12, 2, 30, 16
ROUTING = Routing(torch.tensor([[0, 1]]), torch.ones(1, 2))


def best(source: EvidenceSource, layer: int, target: int) -> list[list[int]]:
    evidence = source.evidence(layer, target)
    assert evidence is not None
    return np.sort(np.argsort(-evidence, -1)[:, :K], -1).tolist()


def test_the_token_table_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, (200,), generator=generator)
    ids = [torch.rand(200, E, generator=generator).topk(K).indices.to(torch.int16) for _ in "ab"]
    pairs = contexts(tokens, 2)
    table = fit_token_table(pairs, ids, [E, E], V)

    single: defaultdict[int, Counter[int]] = defaultdict(Counter)
    double: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row, (before, token) in enumerate(pairs.tolist()):
        single[token].update(ids[1][row].tolist())
        double[before, token].update(ids[1][row].tolist())
    seen, pairs_seen = Counter(tokens.tolist()), Counter(map(tuple, pairs.tolist()))
    for before, token in [(3, 4), (2, 2), (V - 1, 5), (1, V - 1)]:
        table.start(torch.tensor([[9, before, token]]))
        evidence = table.evidence(-1, 1)
        assert evidence is not None
        odds = sigmoid(evidence)[0]
        marginal = np.bincount(ids[1].flatten().numpy(), minlength=E) / 200
        expected = (np.array([single[token][e] for e in range(E)]) + 8 * marginal) / (
            seen[token] + 8
        )
        if pairs_seen[before, token] > 1:
            counts = np.array([double[before, token][e] for e in range(E)])
            expected = (counts + expected) / (pairs_seen[before, token] + 1)
        likeliest = np.argsort(-expected)[:5]
        assert odds[likeliest] == pytest.approx(expected[likeliest], rel=0.01)
        assert odds.sum() == pytest.approx(K, rel=0.02)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 20))
def test_visits_of_steps_are_those_of_their_tokens(seed: int, steps: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = contexts(torch.randint(8, (60,), generator=generator), 2)
    ids = [torch.rand(60, e, generator=generator).topk(K).indices for e in (E, E - 3)]
    table = fit_token_table(tokens, ids, [E, E - 3], V)
    asked = torch.randint(-1, V, (count, 2), generator=generator).clamp_min(torch.tensor([-1, 0]))
    step = torch.randint(steps, (count,), generator=generator)
    table.start(asked)
    for layer, experts in enumerate((E, E - 3)):
        evidence = table.evidence(-1, layer)
        assert evidence is not None
        wanted = np.zeros((steps, experts))
        np.add.at(wanted, step.numpy(), sigmoid(evidence))
        found = table.visits(asked, step, steps, layer)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_token_table_knows_what_tokens_decide() -> None:
    generator = torch.Generator().manual_seed(1)
    decided = torch.rand(V, E, generator=generator).topk(K).indices.to(torch.int16)
    tokens = torch.randint(V, (600,), generator=generator)
    table = fit_token_table(contexts(tokens, 2), [decided[tokens]], [E], V)
    table.start(contexts(torch.arange(V), 2))
    assert best(table, -1, 0) == decided.sort(-1).values.tolist()


def test_sequences_that_begin_alike_are_no_pairs() -> None:
    tokens = torch.cat([contexts(torch.tensor([4, 2, 4]), 2)] * 3)
    ids = [torch.tensor([[0], [1], [2]] * 3)]
    table = fit_token_table(tokens, ids, [4], V)
    keys = table.tensors()["keys"].tolist()
    assert keys == [2, 4, 3 * V + 4, 5 * V + 2]
    table.start(torch.tensor([[-1, 4], [2, 4]]))
    evidence = table.evidence(-1, 0)
    assert evidence is not None
    assert evidence[0, 0] == evidence[0, 2]
    assert evidence[1, 2] > evidence[1, 0]


def test_a_token_table_of_different_layers_and_unused_slots() -> None:
    tokens = torch.tensor([1, 2, 1, 2])
    ids = [torch.tensor([[0], [1], [0], [1]]), torch.tensor([[2], [-1], [2], [-1]])]
    table = fit_token_table(contexts(tokens, 2), ids, [2, 3], V)
    table.start(torch.tensor([[-1, 2], [-1, 7]]))
    first, second = table.evidence(-1, 0), table.evidence(-1, 1)
    assert first is not None
    assert second is not None
    assert first.shape == (2, 2)
    assert second.shape == (2, 3)
    assert first[0, 1] > first[0, 0]
    assert sigmoid(second[0, 2]) < 0.5 < sigmoid(first[0, 1])


def _rule_oracle(rule: RouterRule, logits: Tensor) -> Tensor:
    scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
    values = scores[rule.score](logits)
    if rule.correction is not None:
        values = values + rule.correction
    if rule.groups > 1:
        groups = values.view(len(values), rule.groups, -1)
        best = groups.topk(1 if rule.group_score == "max" else 2, -1).values.sum(-1)
        kept = best.topk(rule.groups_kept, -1).indices
        mask = torch.full_like(groups, -torch.inf)
        for row, chosen in enumerate(kept.tolist()):
            mask[row, chosen] = 0
        values = (groups + mask).flatten(1)
    return values.topk(rule.top_k, -1).indices.sort(-1).values


@given(
    st.integers(0, 1 << 30),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from([(1, 1, "max"), (4, 2, "max"), (3, 1, "top2"), (4, 3, "top2")]),
)
def test_margins_are_positive_for_the_chosen_alone(seed, score, corrected, grouping) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    correction = torch.rand(E, generator=generator) if corrected else None
    rule = RouterRule(K, score, correction, *grouping)
    logits = torch.randn(5, E, generator=generator)
    expected = _rule_oracle(rule, logits)
    gate = Gate(torch.eye(E), rule)
    assert gate.choose(floats(logits)).tolist() == expected.tolist()
    margins = gate.margins(floats(logits))
    assert margins.dtype == np.float32
    assert np.isfinite(margins).all()
    chosen = np.zeros((5, E), bool)
    np.put_along_axis(chosen, expected.numpy(), True, 1)
    assert (margins[chosen] >= 0).all()
    assert (margins[~chosen] <= 0).all()


def test_every_expert_is_sure_where_all_are_taken() -> None:
    assert (margins(RouterRule(3), np.zeros((2, 3), np.float32)) > 10).all()


def test_lookahead_is_the_later_gate_on_earlier_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    gate = Gate(
        torch.randn(E, H, generator=generator), RouterRule(K), torch.randn(E, generator=generator)
    )
    source = Lookahead("x", {(2, 1): gate, (3, ANY_DISTANCE): gate})
    rows = torch.randn(4, H, generator=generator)
    source.start(torch.zeros(4, 1, dtype=torch.int64))
    assert source.evidence(-1, 0) is None
    source.observe(1, rows, ROUTING)
    assert gate.bias is not None
    expected = (rows @ gate.weight.T + gate.bias).topk(K).indices.sort(-1).values
    assert best(source, 1, 2) == expected.tolist()
    assert best(source, 1, 3) == expected.tolist()
    assert source.evidence(1, 1) is None
    assert source.evidence(0, 2) is None
    source.observe(0, rows, ROUTING)
    assert source.evidence(0, 2) is None, "fitted for another distance"
    assert source.evidence(0, 3) is None, "beyond its reach"
    source.start(torch.zeros(4, 1, dtype=torch.int64))
    assert source.evidence(0, 3) is None, "rows of the last step"


@pytest.mark.parametrize("experts", [E, 48])
def test_a_fitted_gate_foresees_a_linear_change(experts: int) -> None:
    generator = torch.Generator().manual_seed(4)
    size = 40
    router = torch.randn(experts, 6, generator=generator) @ torch.randn(
        6, size, generator=generator
    )
    change = torch.eye(size) + 0.5 * torch.randn(size, size, generator=generator) / size**0.5
    rows = torch.randn(1500, size, generator=generator)
    logits = rows @ change.T @ router.T + 0.3
    gate = fit_gate(rows[:1000], logits[:1000], RouterRule(K), router)
    made = torch.from_numpy(gate.logits(floats(rows[1000:])))
    assert float((made - logits[1000:]).abs().max()) < 0.1
    assert (gate.down is not None) == (experts > 32)


def test_few_rows_do_not_pull_a_gate_away_from_its_start() -> None:
    generator = torch.Generator().manual_seed(5)
    router = torch.randn(E, H, generator=generator)
    rows = torch.randn(10, H, generator=generator)
    noisy = rows @ router.T + torch.randn(10, E, generator=generator)
    gate = fit_gate(rows, noisy, RouterRule(K), router)
    assert float((gate.weight - router).abs().mean()) < 0.5


def test_the_path_predictor_learns_a_rule_of_two_tokens() -> None:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(6, (3000,), generator=generator)
    pairs = contexts(tokens, CONTEXT)
    first = (pairs[:, -1] * 2 + pairs[:, -2].clamp_min(0)) % E
    ids = [torch.stack([first, (first + 3) % E], 1).to(torch.int16)]
    vectors = torch.randn(6, 8, generator=generator)
    path = fit_path(pairs[:2500], [i[:2500] for i in ids], [E], vectors, passes=40)
    path.start(pairs[2500:])
    assert np.mean(np.array(best(path, -1, 0)) == ids[0][2500:].sort(-1).values.numpy()) > 0.95


def test_the_path_predictor_runs_as_its_network_does() -> None:
    torch.manual_seed(0)
    network = PathNetwork(torch.randn(V, 8), 7)
    network.averages.data = torch.randn_like(network.averages)
    tokens = torch.randint(-1, V, (5, CONTEXT))
    path = PathEvidence(network, [3, 4])
    path.start(tokens)
    first, second = path.evidence(-1, 0), path.evidence(-1, 1)
    assert first is not None
    assert second is not None
    expected = network(tokens).detach()
    assert np.concatenate([first, second], 1) == pytest.approx(expected.numpy(), abs=1e-4)
    again = PathEvidence.restore(path.tensors(), [3, 4])
    again.start(tokens)
    assert again.evidence(-1, 1) == pytest.approx(second, abs=0.02)
