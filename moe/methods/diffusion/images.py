"""Compares prompts with images that we read to those that the model's generation code reads.

A model that writes canvases has no logits of a prompt, so keys and values are compared: all that
the first canvas sees. Only the generation code lets tokens of an image see each other; it goes on
with one pass over a canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from moe.describe.probe import stand_in
from moe.images.reader import ImageReader, read_apart
from moe.kv.cache import KVCache
from moe.methods.diffusion.cache_view import CacheView, layer_windows
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.own_cache import CACHE_ARGUMENT
from moe.network.packed_pass import Work
from moe.network.prompt_rows import NotRows
from moe.text.tokenizer import ImagePrompt


class CanvasImageProbe:
    """Compares the keys and values of a prompt; see `moe.images.reader.ImageProbe`."""

    what: ClassVar[str] = "keys and values"

    @staticmethod
    def own_pass(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Callable[[], Any]:
        own: Any = model
        settings = {"max_new_tokens": 1, "max_length": None, "max_denoising_steps": 1}
        return partial(own.generate, **inputs, **settings)

    @staticmethod
    def gaps(
        backbone: Backbone, reader: ImageReader, inputs: Mapping[str, Any]
    ) -> tuple[float, float]:
        expected = _in_a_row(getattr(reader.reference(inputs), CACHE_ARGUMENT))
        prompt = reader.rows(inputs)
        if prompt.rows.offset:
            raise NotRows("positions behind the prompt are not the tokens' indices")
        return read_apart(backbone, prompt, _seen, expected)


@torch.inference_mode()
def _seen(backbone: Backbone, prompt: ImagePrompt, ends: Sequence[int]) -> Tensor:
    """What a canvas sees of a prompt that is read up to these ends, as `_in_a_row`."""
    cache, start = KVCache(len(prompt)), 0
    for end in ends:
        part = prompt.rows.part(start, end)
        lanes = backbone.reading([Work(prompt[start:end], cache, rows=part)])
        run_lanes(lanes, stand_in)
        for lane in lanes:
            lane.result()
        start = end
    return _in_a_row(CacheView(layer_windows(backbone.model.config), len(prompt), cache))


def _in_a_row(cache: Cache) -> Tensor:
    """All of a cache's keys and values as float32 numbers."""
    layers: Sequence[Any] = cache.layers
    return torch.cat([x.flatten().float() for one in layers for x in (one.keys, one.values)])
