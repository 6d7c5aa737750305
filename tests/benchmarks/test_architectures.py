"""Well-known families through the seam; `benchmarks.architectures` does all architectures."""

from __future__ import annotations

import pytest

from benchmarks.architectures import check, is_near

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
    assert is_near(result), result


def test_a_refusal_names_architecture_and_reason() -> None:
    refused = check("doge")["refused"]
    assert refused.startswith("DogeForCausalLM has no experts that dispatch through")


def test_what_is_far_from_transformers_must_be_as_near_to_float64() -> None:
    """A hybrid whose recurrence makes 5e-4 of last bits in transformers' own float32."""
    result = check("qwen3_5_moe")
    far = result["from_float64"]
    assert result["tokens_equal"]
    assert is_near(result)
    assert far is None or far["ours"] <= far["transformers"] < 1e-3
    assert not is_near({"max_abs_diff": 1e-3, "from_float64": {"ours": 2.0, "transformers": 1.0}})
