"""Shapes of the models that people run: what their sequences keep, against counts by hand."""

from __future__ import annotations

import pytest

from examples.models.shapes import SHAPES
from moe.memory.estimate import estimate_sequence

DELTA_STATE = 4 * 32 * 128 * 128 + 2 * 4 * (2 * 16 * 128 + 32 * 128)
"""Bytes of a gated delta rule: 32 heads of 128 x 128, and four rows of a convolution."""
NUMBERS = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 48 * 2 * 4 * 128,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 94 * 2 * 4 * 128,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 12 * 2 * 2 * 256,
    "Qwen/Qwen3.6-35B-A3B": 10 * 2 * 2 * 256,
    "Qwen/Qwen3.8-Flash-Next": 12 * (2 * 2 * 256 + 128),
    "zai-org/GLM-4.5-Air": 46 * 2 * 8 * 128,
    "zai-org/GLM-4.7": 92 * 2 * 8 * 128,
    "zai-org/GLM-5": 78 * (512 + 64 + 128),
    "deepseek-ai/DeepSeek-V3": 61 * (512 + 64),
    "deepseek-ai/DeepSeek-V3.2": 61 * (512 + 64 + 128),
    "moonshotai/Kimi-K2-Instruct": 61 * (512 + 64),
    "MiniMaxAI/MiniMax-M2": 62 * 2 * 8 * 128,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 32 * 2 * 8 * 128,
    "allenai/OLMoE-1B-7B-0924": 16 * 2 * 16 * 128,
    "ibm-granite/granite-4.0-h-small": 4 * 2 * 8 * 128,
    "LiquidAI/LFM2-8B-A1B": 6 * 2 * 8 * 64,
}
"""Of a token's keys and values, latents and indexer's keys, in layers that see all tokens."""
FIXED = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 0,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 36 * DELTA_STATE,
    "Qwen/Qwen3.8-Flash-Next": 36 * DELTA_STATE,
    "LiquidAI/LFM2-8B-A1B": 18 * 2 * 3 * 2048,
    "openai/gpt-oss-20b": 12 * 128 * 2 * (2 * 8 * 64),
    "ibm-granite/granite-4.0-h-small": 36 * (4 * 128 * 64 * 128 + 2 * 4 * (128 * 64 + 2 * 128)),
    "google/gemma-4-26B-A4B-it": 25 * 1024 * 2 * (2 * 8 * 256),
}
"""Bytes of a sequence's states and windows, with numbers of 16 bits."""


@pytest.mark.parametrize("name", NUMBERS)
def test_keys_and_values_are_counted_by_kinds_of_layers(name: str) -> None:
    assert estimate_sequence(SHAPES[name].config, 2).per_token == 2 * NUMBERS[name]


@pytest.mark.parametrize("name", FIXED)
def test_states_and_windows_are_counted_by_kinds_of_layers(name: str) -> None:
    assert estimate_sequence(SHAPES[name].config, 2).fixed == FIXED[name]
