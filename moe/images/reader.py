"""`ImageReader`: conversations with images to rows for a text model, by transformers' own parts.

The checkpoint's processor turns text and pixels into token ids and whatever its model wants of the
pixels; the model's own forward turns these into embeddings and positions, and is stopped where it
calls its text model. The rows that it hands over are what our passes read. No architecture is
known: `enable_images` shows by a probe that our passes over such rows, also in parts, give the
logits of transformers' whole forward; else images are refused with the reason.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from moe.describe.probe import TOLERANCE, difference, stand_in
from moe.errors import RequestError
from moe.hooks import ModelHook
from moe.images.decode import Picture, decode
from moe.images.tower_rows import TowerRows
from moe.loading.meta_model import join_towers, text_model
from moe.model_lock import on_device, plain_torch
from moe.network.attention import PACKED
from moe.network.backbone import Backbone
from moe.network.lanes import Lane, LaneRandom, run_lanes
from moe.network.packed_pass import Work
from moe.network.prompt_rows import PromptRows, caught, watch
from moe.network.stored_embedding import backbone_dtype
from moe.text.chat import render
from moe.text.tokenizer import ImagePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Processor = Callable[..., Mapping[str, Any]]
_KEPT = 4
"""Prompts whose rows are kept: a request reads its prompt more than once."""


class ImageReader:
    """Reads images for one model. Threads may share it.

    Args:
        processor: transformers' own of the checkpoint.
        model: the whole multimodal model, which shares its text part with the backbone.
        most_pixels: of all images of a prompt.
        towers: the rows of pictures that its towers have encoded.
        own_pass: see `ImageProbe`.

    Attributes:
        towers: as given.
        whole: prompts with images must be read in one pass.
    """

    def __init__(
        self,
        processor: Processor,
        model: PreTrainedModel,
        most_pixels: int,
        towers: TowerRows,
        *,
        own_pass: Callable[[PreTrainedModel, Mapping[str, Any]], Callable[[], Any]],
        whole: bool = False,
    ) -> None:
        self._processor, self._model, self._own_pass = processor, model, own_pass
        self._most_pixels, self.towers, self.whole = most_pixels, towers, whole
        self._lock = threading.Lock()
        self._known: OrderedDict[object, ImagePrompt] = OrderedDict()

    def read(self, text: str, images: Sequence[object]) -> ImagePrompt:
        """The prompt of a rendered conversation with its images, in order.

        Raises:
            RequestError: an image cannot be read, or the conversation does not fit the images.
        """
        pictures = decode(images, self._most_pixels)
        key = text, tuple(picture.digest for picture in pictures)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._read(text, pictures)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def _read(self, text: str, pictures: Sequence[Picture]) -> ImagePrompt:
        try:
            inputs = self.inputs(text, [picture.image for picture in pictures])
            with plain_torch(), on_device(self._model.device):
                return self.rows(inputs)
        except Exception as error:  # processors are many programs, and check in their own ways
            raise RequestError(
                f"the model's own processor refused the images: {type(error).__name__}: "
                f"{error!s:.300}; send no marks of images as text, and one image for each part"
            ) from error

    def inputs(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """Run the processor, for the model's forward.

        Pixels are in the model's dtype: Llama 4's processor writes bfloat16 for every model.
        """
        made = self._processor(
            text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=False
        )
        device, dtype = self._model.device, self._model.dtype
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for name, value in made.items()
        }

    @torch.inference_mode()
    def rows(self, inputs: Mapping[str, Any]) -> ImagePrompt:
        """The prompt with what the text model is given for it. Raises what the model raises."""
        ids = inputs["input_ids"]
        with _attention(self._model, PACKED):
            found = caught(self._own_pass(self._model, _one_more(inputs)))
        rows = PromptRows(found, ids.shape[1])
        rows.whole |= self.whole
        return ImagePrompt(ids[0].tolist(), rows)

    @torch.inference_mode()
    def reference(self, inputs: Mapping[str, Any]) -> Any:
        """What transformers' own pass over a prompt returns; experts stand in."""
        lane = Lane(self._own_pass(self._model, inputs), "prefill")
        with LaneRandom(0, self._model.device).active():
            run_lanes([lane], stand_in)
        return lane.result()


class ImageProbe(Protocol):
    """Compares our passes over prompts with images to transformers' own.

    Attributes:
        what: it compares.
    """

    what: ClassVar[str]

    @staticmethod
    def own_pass(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Callable[[], Any]:
        """transformers' own pass over a prompt, to be called."""
        ...

    @staticmethod
    def gaps(
        backbone: Backbone, reader: ImageReader, inputs: Mapping[str, Any]
    ) -> tuple[float, float]:
        """The differences if the prompt is read in one pass, and in two; NaN: it cannot be."""
        ...


IMAGES = ModelHook[type[ImageProbe]]("images")


class LogitsProbe:
    """Compares the logits of a prompt, and of one token more."""

    what: ClassVar[str] = "logits"

    @staticmethod
    def own_pass(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Callable[[], Any]:
        return partial(model, **inputs, use_cache=False)

    @staticmethod
    def gaps(
        backbone: Backbone, reader: ImageReader, inputs: Mapping[str, Any]
    ) -> tuple[float, float]:
        packed, longer = backbone.packed, _one_more(inputs)
        backbone.set_packed(False)
        try:
            expected = reader.reference(longer).logits[0].float()
        finally:
            backbone.set_packed(packed)
        return read_apart(backbone, reader.rows(inputs), _logits, expected)


def read_apart(
    backbone: Backbone,
    prompt: ImagePrompt,
    read: Callable[[Backbone, ImagePrompt, Sequence[int]], Tensor],
    expected: Tensor,
) -> tuple[float, float]:
    """The differences of `ImageProbe.gaps`.

    Args:
        read: gives the numbers of a prompt that is read up to these ends.
        expected: transformers' own.
    """
    whole = difference(read(backbone, prompt, [len(prompt)]), expected)
    if not backbone.can_cut or prompt.rows.whole:
        return whole, float("nan")
    return whole, difference(read(backbone, prompt, [len(prompt) // 2, len(prompt)]), expected)


def _one_more(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the last token once more: its position tells those of new tokens."""
    shape = inputs["input_ids"].shape
    return {
        name: torch.cat([value, value[:, -1:]], 1)
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for name, value in inputs.items()
    }


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the text part's masks be made for this implementation of attention."""
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = own


def enable_images(
    backbone: Backbone,
    towers: PreTrainedModel,
    processor: Processor,
    conversation: Callable[[int], str],
    most_pixels: int,
) -> ImageReader | str:
    """Make the reader of images for a model; or say why there is none.

    Args:
        towers: all of the model but its text part.
        conversation: makes the text of a conversation with so many images.
    """
    join_towers(towers, backbone.model)
    watch(text_model(backbone.model))
    rows = TowerRows(towers.eval())
    probe = IMAGES.of(backbone.model) or LogitsProbe
    made = partial(ImageReader, processor, towers, most_pixels, rows, own_pass=probe.own_pass)
    reader = made()
    try:
        inputs = reader.inputs(conversation(1), [_probe_image(96, 64)])
        gap, cut = probe.gaps(backbone, reader, inputs)
    except Exception as error:  # as `enable_packing`: an architecture may do anything
        return f"its images cannot be read: {type(error).__name__}: {error!s:.300}"
    most = TOLERANCE[backbone_dtype(backbone.model)]
    if not gap <= most:
        return f"rows of images give other {probe.what} than transformers' own (by {gap:.1e})"
    # `rows` finds out by several pictures; a model that reads one a prompt needs not know.
    with suppress(Exception), plain_torch(), on_device(towers.device):
        reader.rows(reader.inputs(conversation(2), [_probe_image(96, 64), _probe_image(64, 128)]))
    rows.reset()
    return made(whole=not cut <= most)


@torch.inference_mode()
def _logits(backbone: Backbone, prompt: ImagePrompt, ends: Sequence[int]) -> Tensor:
    """``(T + 1, V)`` logits of a prompt that is read up to these ends, and of its last token once
    more."""
    rows = []
    cache = backbone.new_cache(len(prompt) + 1)
    cache.offset = prompt.rows.offset
    start = 0
    for end in ends:
        part = prompt.rows.part(start, end)
        work = [Work(prompt[start:end], cache, all_logits=True, rows=part)]
        lanes = backbone.lanes(work, "prefill")
        run_lanes(lanes, stand_in)
        rows += [each for lane in lanes for each in lane.result()]
        start = end
    lanes = backbone.lanes([Work(prompt[-1:], cache, all_logits=True)], "decode")
    run_lanes(lanes, stand_in)
    rows += [each for lane in lanes for each in lane.result()]
    return torch.cat(rows)


def _probe_image(width: int, height: int) -> Any:
    """An image with something in it; not square, so that rows and columns differ."""
    from PIL import Image

    image = Image.new("RGB", (width, height))
    points = [(x, y) for y in range(height) for x in range(width)]
    image.putdata([(5 * x % 256, 3 * y % 256, (x * y) % 256) for x, y in points])
    return image


def conversation(tokenizer: PreTrainedTokenizerBase, images: int) -> str:
    """A conversation with so many images, by the model's chat template."""
    content = [{"type": "image"}] * images + [{"type": "text", "text": "What is this?"}]
    return render(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True)


def load_processor(
    directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Processor | str:
    """transformers' processor of a checkpoint for text and images, without torchvision where there
    is one; or why there is none."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )

    name = _processor_name(directory)
    found = processor_class_from_name(name) if name else None
    if found is None and type(config) in PROCESSOR_MAPPING:
        found = PROCESSOR_MAPPING[type(config)]
    if found is None:
        return "transformers has no processor for it"
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        parts = {
            "tokenizer": tokenizer,
            "image_processor": AutoImageProcessor.from_pretrained(
                directory, backend="pil", **options
            ),
        }
        processor: Processor = _text_and_images(found, parts).from_pretrained(directory, **options)
    except Exception as error:  # files may hold anything
        if "torchvision" in str(error).lower() and find_spec("torchvision") is None:
            return (
                "its processor needs torchvision, which is not installed: pip install torchvision, "
                "from the index that torch is from"
            )
        return f"its processor cannot be loaded ({type(error).__name__}: {error!s:.300})"
    return processor


def _processor_name(directory: Path) -> str | None:
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        try:
            about = json.loads((directory / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        name = about.get("processor_class") if isinstance(about, dict) else None
        if isinstance(name, str):
            return name
    return None


def _text_and_images(found: Any, parts: Mapping[str, Any]) -> Any:
    """A processor's class without the parts that read sounds and films, which often need packages
    of their own."""

    class TextAndImages(found):
        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(name, argument)
            return None

    TextAndImages.__name__ = found.__name__
    return TextAndImages
