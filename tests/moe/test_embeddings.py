"""Half-precision embeddings stay as small as they came, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.models.tiny import tiny_model
from moe import MoE
from moe.network.stored_embedding import backbone_dtype

IDS = list(range(3, 26))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_table_keeps_its_dtype_and_the_model_its_logits(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_model("qwen3_moe").to(dtype=dtype).save_pretrained(tmp_path)  # type: ignore[call-arg]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    moe = MoE.from_pretrained(tmp_path, model={"expert_dtype": "float32"})
    network = moe.backbone.model
    assert network.get_input_embeddings().weight.dtype is dtype
    assert network.lm_head.weight.dtype is torch.float32
    assert backbone_dtype(network) is torch.float32
    assert moe.status()["fused"]["enabled"]
    assert moe.status()["packing"]["enabled"]
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(moe.logits(IDS), expected, atol=1e-5, rtol=1e-5)
    lines = {line.name: line.bytes for line in moe._loaded.memory_plan.lines}
    assert lines["trunk"] + lines["experts"] == moe.stats()["weight_bytes"]


def test_a_table_that_the_head_shares_is_the_trunks(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.bfloat16().save_pretrained(tmp_path)
    network = MoE.from_pretrained(tmp_path).backbone.model
    assert network.get_input_embeddings().weight is network.lm_head.weight
    assert network.lm_head.weight.dtype is torch.float32
