"""Holds a description against tokens that short random prompts do not bring: far positions, and
large numbers.

A model may do something behind some position only (Mistral 4 scales queries behind the first 8,192
tokens), or with large numbers only (a clamp of queries, a cap of logits). A pass is observed here
whose sequences are single tokens at positions around each number that the configuration has, while
norms and embeddings return 1,024 times as much. What attention reads, what feed-forward blocks
multiply and the logits must be what the description says. Routers are left out: such large numbers
make all their scores equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moe.describe.attention import check_attention
from moe.describe.decoder import check_feed, check_logits, decoder_layers, is_norm
from moe.describe.description import Description, NotDescribed
from moe.describe.observe import observe
from moe.describe.probe import random_prompts
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertCall

FARTHEST = 1 << 20
LOUDER = 1024.0
_WHERE = "at far positions or with large numbers"


@torch.inference_mode()
def check_extremes(description: Description, backbone: Backbone) -> None:
    """Raise `NotDescribed` where the model does more than the description says."""
    model = backbone.model
    positions = positions_of(model.config)
    prompts = [[token] for token in random_prompts(backbone, (len(positions),))[0]]
    with ExitStack() as stack:
        for module in model.modules():
            weighed = any(True for _ in module.parameters())  # activations have no weights
            if module is model.get_input_embeddings() or (weighed and is_norm(module)):
                stack.callback(module.register_forward_hook(_louder).remove)
        seen = observe(backbone, prompts, positions, _rows)
    found = zip(description.layers, decoder_layers(model, seen), strict=True)
    for index, (layer, (_, call)) in enumerate(found):
        try:
            check_attention(layer.attention, call, seen)
            check_feed(layer.feed, seen)
        except NotDescribed as error:
            raise NotDescribed(f"layer {index}: {error}, {_WHERE}") from error
    try:
        check_logits(description, model, seen)
    except NotDescribed as error:
        raise NotDescribed(f"{error}, {_WHERE}") from error


def positions_of(config: Any) -> list[int]:
    """Positions at and before each power of two, and each number that a configuration has."""
    text = config.get_text_config(decoder=True).to_dict()
    numbers = {1 << exponent for exponent in range(3, FARTHEST.bit_length())}
    numbers |= {int(n) for n in _numbers(text) if 2 < n <= FARTHEST and n == int(n)}
    return sorted({n - before for n in numbers for before in (0, 1)})


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _louder(_module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
    """Not norms of single heads: no clamp follows them."""
    return output * LOUDER if isinstance(output, Tensor) and output.ndim <= 3 else None


def _rows(_layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
    """In place of experts, without their weights: large numbers may leave routers without any."""
    return [call.hidden_states * 0.25 for call in calls]
