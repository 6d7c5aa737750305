"""The probe that lets sequences share a pass: last bits do not matter to it, a wrong mask does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.models.tiny import tiny_config
from moe import MoE, SamplingParams
from moe.network import attention as packed
from moe.network.attention import MaskRule
from tests.amounts import deep_except

DEMO = Path(__file__).parents[2] / "examples/demo-model"
attend = packed._attend


def last_bits(*args: Any) -> Tensor:
    out, generator = attend(*args), torch.Generator().manual_seed(0)
    return out * (1 + 1e-6 * torch.randn(out.shape, generator=generator))


def unmasked(query: Tensor, key: Tensor, value: Tensor, _: MaskRule, *rest: Any) -> Tensor:
    everything = MaskRule(lambda batch, head, query, key: key >= 0, None)
    return attend(query, key, value, everything, *rest)


def blind_to_itself(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, *rest: Any
) -> Tensor:
    if query.shape[2] == 1:
        rule = MaskRule(lambda batch, head, query, key: key < query, None)
    return attend(query, key, value, rule, *rest)


@pytest.mark.parametrize("bits", deep_except([8], [None, 8, 4]))
@pytest.mark.parametrize(
    ("attention", "equal"), [(last_bits, True), (unmasked, False), (blind_to_itself, False)]
)
def test_rounding_is_told_from_a_wrong_mask(
    monkeypatch: pytest.MonkeyPatch, bits: int | None, attention: Callable[..., Tensor], equal: bool
) -> None:
    """Layers that round what they read to 8 bits make thousandths of last bits."""
    monkeypatch.setattr(packed, "_attend", attention)
    monkeypatch.setattr(
        packed, "_attend_prompt", lambda q, seen, *how: attention(q, *seen.read(), *how)
    )
    with MoE.from_pretrained(DEMO, model={"trunk_bits": bits, "head_bits": bits}) as model:
        assert model.status()["packing"]["enabled"] == equal


AUTO: Any = AutoModelForCausalLM
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 100.0,
    "short_mscale": 1.1, "long_mscale": 1.3, "factor": 16.0,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [4.0 + 0.3 * i for i in range(4)],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("model_type", "rope"),
    [("phimoe", LONGROPE), ("qwen3_moe", LONGROPE), ("qwen3_moe", DYNAMIC)],
    ids=["longrope of its own", "longrope", "dynamic"],
)
def test_rotary_tables_that_depend_on_length(
    model_type: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts on both sides of the length where frequencies change, and answers that cross it."""
    config = tiny_config(model_type)
    config.rope_parameters = rope
    config.max_position_embeddings = 256 if rope is LONGROPE else 16
    torch.manual_seed(0)
    reference = AUTO.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    prompts = [[3 + (7 * i + n) % 120 for i in range(n)] for n in (9, 30, 15, 4)]
    expected = []
    for prompt in prompts:
        fresh = AUTO.from_pretrained(tmp_path, attn_implementation="eager")
        out = fresh.generate(
            torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    params = SamplingParams(max_new_tokens=14, temperature=0.0, ignore_eos=True)
    for drafts in ("off", "ngram"):
        settings = {"prefill.wave_tokens": 64, "speculation.mode": drafts}
        model = MoE.from_pretrained(tmp_path, settings)
        status = model.status()
        assert status["packing"]["enabled"], status["packing"]
        assert not model.backbone.can_cut
        assert any("depend on the length of the prompt" in notice for notice in model.notices)
        completions = model.generate(prompts, params)
        assert [list(c.token_ids) for c in completions] == expected, status["fused"]
    assert status["fused"]["enabled"], status["fused"]
