"""Well-known families through the seam; `benchmarks.architectures` does all architectures."""

from __future__ import annotations

import pytest

from benchmarks.architectures import TOLERANCE, check

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(model_type: str) -> None:
    result = check(model_type)
    assert result.get("tokens_equal") is True, result
    assert result["max_abs_diff"] <= TOLERANCE


def test_a_refusal_names_architecture_and_reason() -> None:
    refused = check("doge")["refused"]
    assert refused.startswith("DogeForCausalLM has no experts that dispatch through")
