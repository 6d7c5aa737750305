"""Which experts a draft visits: the best by the router's own rule among those in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.models.tiny import tiny_model
from kernels.reference import AnyExperts
from moe import MoE
from moe.commands.convert.convert import convert
from moe.describe.routers import find_selectors
from moe.settings import ModelSettings
from moe.speculate.draft import NEVER, Mode
from moe.speculate.elastic import DraftLayers, ElasticDrafts
from tests.moe.speculate.test_elastic import running
from tests.moe.test_offload import SMALL, budget

TOP_K, SCALE = 2, 2.5
HERE = (1, 3, 4, 6)
"""Experts of each layer that are in memory."""


@pytest.fixture
def biased(tmp_path: Path) -> MoE:
    """Some experts of a model whose routers choose by scores and a bias, and weigh by scores
    alone."""
    network = tiny_model("deepseek_v3")
    network.config.n_group = network.config.topk_group = 1
    for name, bias in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(bias, std=0.2)
    network.save_pretrained(tmp_path / "model")
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(tmp_path / "model", tmp_path / "store", settings)
    whole = MoE.from_pretrained(store, SMALL)
    assert whole.config.num_experts_per_tok == TOP_K
    assert whole.config.routed_scaling_factor == SCALE
    quiet = {"hot_set": False, "prefetch": False}  # no expert is read ahead
    return MoE.from_pretrained(store, budget(store, whole, 0.5, offload=quiet))


def test_a_draft_takes_the_best_of_those_in_memory(biased: MoE) -> None:
    loaded, seen = biased._loaded, list[tuple[Tensor, Tensor, Tensor]]()

    def noted(
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: AnyExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        read = hidden_TH, expert_ids_TK, weights_TK
        seen.append((read[0].clone(), read[1].clone(), read[2].clone()))  # buffers are used again
        return loaded.backend.forward(*read, experts, add_to_TH)

    selectors = [found.selector for found in find_selectors(loaded.backbone)]
    drafts = ElasticDrafts(loaded.backbone, DraftLayers(loaded.experts.layers, noted, selectors))
    sequences = running(biased, [[5, 9, 2], [7] * 6, list(range(3, 20))])
    assert loaded.offloaded is not None
    cache = loaded.offloaded.cache
    cache.drop(cache.hot_set())
    assert cache.warm([(layer, expert) for layer in range(3) for expert in HERE]) == 3 * len(HERE)
    with torch.inference_mode():
        drafts.draft(Mode("elastic", bits=4), sequences, [3] * 3, NEVER)
    modules = loaded.backbone.model.modules()
    gates = [module for module in modules if hasattr(module, "e_score_correction_bias")]
    assert len(seen) == 3 * len(gates)
    absent = turned = 0
    for number, (rows, ids, weights) in enumerate(seen):
        layer = number % len(gates)
        gate, slots, here = gates[layer], cache.slot_ids(layer), cache.resident(layer)
        scores = (rows @ gate.weight.T).sigmoid()
        ranking = scores + gate.e_score_correction_bias
        best = ranking.masked_fill(~here, -torch.inf).topk(TOP_K).indices
        absent += int((~here[ranking.topk(TOP_K).indices]).sum())
        plain = scores.masked_fill(~here, -torch.inf).topk(TOP_K).indices
        turned += int((plain.sort(1).values != best.sort(1).values).sum())
        expected = scores.gather(1, best)
        expected = SCALE * expected / expected.sum(1, keepdim=True)
        for row in range(len(rows)):
            wanted = dict(zip(slots[best[row]].tolist(), expected[row].tolist(), strict=True))
            taken = zip(ids[row].tolist(), weights[row].tolist(), strict=True)
            found = {slot: weight for slot, weight in taken if slot >= 0}
            assert found == pytest.approx(wanted, rel=1e-4)
    assert absent > 0, "all that routers wanted was in memory"
    assert turned > 0, "biases turned no choice"
