"""Tiny multimodal checkpoints with a tokenizer, a chat template and a processor of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from examples.models.tiny import OTHERS, tiny_config, tiny_model

_TEMPLATE = (
    "{%% for m in messages %%}{%% if m.content is string %%}{{ m.content }}{%% else %%}"
    "{%% for c in m.content %%}{%% if c.type == 'image' %%} %s {%% else %%}{{ c.text }}"
    "{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%} w5"
)


@dataclass(frozen=True)
class Case:
    """What a tiny checkpoint of an architecture needs for images.

    Attributes:
        marks: names in the configuration of the ids of these special tokens.
        shown: what the chat template writes for an image.
        processor: preprocessor_config.json.
        named: special tokens that the processor asks the tokenizer for by name.
        vision: sizes of the vision tower that differ from those of `tiny_config`.
        joined: processor_config.json, where there is one.
        torchvision: its image processor needs this package.
        within: how near logits are to transformers' own.
    """

    marks: dict[str, str]
    shown: str
    processor: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    joined: dict[str, Any] = field(default_factory=dict)
    torchvision: bool = False
    within: float = 1e-4


_QWEN = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_ERNIE = {
    "image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>", "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>", "video_end_token": "<|VIDEO_END|>",
}  # fmt: skip
_GLM = {
    "image_token": "<|image|>", "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>", "video_token": "<|video|>",
    "video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>",
}  # fmt: skip
_GEMMA = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_PIXTRAL = {
    "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
}  # fmt: skip
_LLAMA = {
    "image_token": "<|image|>", "patch_token": "<|patch|>", "boi_token": "<|image_start|>",
    "eoi_token": "<|image_end|>", "x_token": "<|tile_x_separator|>",
    "y_token": "<|tile_y_separator|>",
}  # fmt: skip
_KIMI = {
    "image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>",
    "vision_start_token": "<|media_begin|>", "vision_end_token": "<|media_end|>",
}  # fmt: skip


def _patches(kind: str, patch: int, **more: Any) -> dict[str, Any]:
    side = 2 * patch
    size = {"shortest_edge": side**2, "longest_edge": 16 * side**2}
    about = {"image_processor_type": kind, "patch_size": patch, "merge_size": 2, "size": size}
    return about | {"temporal_patch_size": 2} | more


CASES: dict[str, Case] = {
    # features behind the first layers, and three dimensions of positions
    "qwen3_vl_moe": Case(
        _QWEN,
        "<|vision_start|> <|image_pad|> <|vision_end|>",
        _patches("Qwen2VLImageProcessor", 16),
        vision={"depth": 3, "deepstack_visual_indexes": [0, 2]},
    ),
    # recurrent layers
    "qwen3_5_moe": Case(
        _QWEN,
        "<|vision_start|> <|image_pad|> <|vision_end|>",
        _patches("Qwen2VLImageProcessor", 16),
    ),
    # experts of images, and others of text
    "ernie4_5_vl_moe": Case(
        {f"{name}_id": mark for name, mark in _ERNIE.items()},
        "<|IMAGE_START|> <|IMAGE_PLACEHOLDER|> <|IMAGE_END|>",
        _patches("Ernie4_5_VLMoeImageProcessor", 14, temporal_patch_size=1),
        _ERNIE,
    ),
    "glm4v_moe": Case(
        {f"{name}_id": mark for name, mark in _GLM.items()},
        "<|begin_of_image|> <|image|> <|end_of_image|>",
        _patches("Glm4vImageProcessor", 14),
        _GLM,
    ),
    # tokens of an image see each other, and embeddings of each layer
    "gemma4": Case(
        {f"{name}_id": mark for name, mark in _GEMMA.items()},
        "<|image|>",
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        _GEMMA,
        {"model_type": "gemma4_vision"},
        within=1e-3,  # rounding alone: transformers' sdpa and eager attention differ by 1.7e-3
    ),
    # rows of an image end with a token of their own
    "mistral_large4": Case(
        {"image_token_index": "[IMG]"},
        "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 16},
        _PIXTRAL,
        {"image_size": 256},
        {"processor_class": "PixtralProcessor", "patch_size": 16, "spatial_merge_size": 2},
        torchvision=True,
    ),
    # an image is tiles
    "llama4": Case(
        {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>",
         "eoi_token_index": "<|image_end|>"},
        "<|image|>",
        {"image_processor_type": "Llama4ImageProcessor", "max_patches": 4,
         "size": {"height": 28, "width": 28}},
        _LLAMA,
        {"intermediate_size": 64},
        {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
        torchvision=True,
    ),
    "kimi_k25": Case(
        {f"{name}_id": mark for name, mark in _KIMI.items()},
        "<|media_begin|> <|media_pad|> <|media_end|>",
        {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 14, "merge_size": 2},
        _KIMI,
        torchvision=True,
    ),
}  # fmt: skip


def make(name: str, directory: Path) -> PreTrainedModel:
    """Write a checkpoint of an architecture; the model that it holds."""
    model = tiny_model(name, config=write_texts(name, directory))
    model.save_pretrained(directory)
    return model


def write_texts(name: str, directory: Path) -> PreTrainedConfig:
    """Write all of a checkpoint but weights and configuration; the configuration."""
    case = CASES[name]
    config = tiny_config(name)
    tokenizer = _tokenizer(case)
    for key, mark in case.marks.items():
        if hasattr(config, key):
            setattr(config, key, tokenizer.convert_tokens_to_ids(mark))
    if "model_type" in case.vision:  # a part that its configuration leaves out by default
        kind = CONFIG_MAPPING[case.vision["model_type"]]
        known = kind().to_dict()
        config.vision_config = kind(**{k: v for k, v in OTHERS.items() if k in known})
        config.text_config.use_bidirectional_attention = "vision"
    else:
        for key, value in case.vision.items():
            setattr(config.vision_config, key, value)
    tokenizer.chat_template = _TEMPLATE % case.shown
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(case.processor))
    if case.joined:
        (directory / "processor_config.json").write_text(json.dumps(case.joined))
    return config


def _tokenizer(case: Case) -> PreTrainedTokenizerFast:
    marks = dict.fromkeys([*case.marks.values(), *case.named.values()])
    words = ["<unk>", "<s>", "</s>", *marks]
    words += [f"w{number}" for number in range(128 - len(words))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        extra_special_tokens=case.named or list(marks),
    )


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (width * height * 3,), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), pixels.numpy().tobytes())
