"""Greedy answers are held against transformers' own forward of the tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from examples.models.tiny import tiny_model


@lru_cache(maxsize=1)
def _network(model_type: str) -> PreTrainedModel:
    model = tiny_model(model_type)
    model.config._attn_implementation = "eager"
    return model


def likeliest(
    model_type: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What transformers finds likeliest at the place of each token of an answer, given those before
    it: the same tokens if, and only if, the answer is the greedy one. One pass reads an answer."""
    model, found = _network(model_type), []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
            found.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return found
