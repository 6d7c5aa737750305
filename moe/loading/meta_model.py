"""A transformers causal LM without weights: every parameter on the meta device, nothing drawn.

The class is transformers' own for the configuration; no file of the model directory is imported.
A multimodal model is built without the parts that text does not need (`_keep_text`). The weights
keep the names that its class gives them, so that transformers' own conversions find them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from moe.errors import UnsupportedModelError
from moe.hooks import ModelHook
from moe.network.adopt import adopt_experts
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.packed_pass import Work
from moe.network.seam import attach, experts_modules

BUILT = ModelHook[Callable[[PreTrainedModel], None]]("built")
"""Prepares a new model on the meta device, before its experts are adopted."""
TEXT_MODEL = ModelHook[Callable[[PreTrainedModel], nn.Module]]("text_model")
_MOST_DRAFTING = 64
_MAPPINGS: tuple[Any, ...] = (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
)


def build_meta_model(
    config: PreTrainedConfig, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model class of `config` on the meta device, in evaluation mode; `config` is copied.

    `dtype` is what parameters are in unless the architecture asks for another one (a router bias
    in float32, say); by default the configuration's own, or float32. Raises
    `UnsupportedModelError` where transformers has no such class. Weights that are quantised are
    planned as the floats that they stand for.
    """
    config, others = _generating_part(config)
    model_class = _class_of(config)
    if model_class is None:
        raise UnsupportedModelError(
            f"{config.model_type} ({type(config).__name__}) has no class in transformers "
            f"{transformers.__version__} that generates text (a causal language model, or a "
            "multimodal one with text output); only such models are supported"
        )
    config = copy.deepcopy(config)
    if config.sub_configs.get("text_config") is not None and (
        model_class.config_class == config.sub_configs["text_config"]
    ):
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    model = _construct(model_class, config, dtype or _config_dtype(config))
    removed = _keep_text(model) if "text_config" in config.sub_configs else []
    _ignore(model, [*removed, *others])
    _ignore_drafting_layers(model)
    built = BUILT.of(model)
    if built is not None:
        built(model)
    adopt_experts(model)
    if removed and built is None:
        _check_text_pass(model, removed)
    return model


def build_like(network: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A network of the same class on the meta device by another configuration, which it keeps."""
    model = _construct(type(network), config, network.dtype)
    if "text_config" in config.sub_configs:
        _keep_text(model)
    if (built := BUILT.of(model)) is not None:
        built(model)
    adopt_experts(model)
    return model


def text_model(model: PreTrainedModel) -> nn.Module:
    """The module that turns embeddings of a prompt into keys and values: the decoder of text,
    unless a method says otherwise."""
    own = TEXT_MODEL.of(model)
    found: nn.Module = model.get_decoder() if own is None else own(model)
    return found


def has_towers(network: PreTrainedModel) -> bool:
    """Return whether the model is multimodal, so that `build_meta_model` leaves something out of
    it."""
    return "text_config" in network.config.sub_configs


def build_towers(network: PreTrainedModel) -> PreTrainedModel:
    """All of a multimodal model that `build_meta_model` leaves out of ``network``: on the meta
    device, without the decoder of text and its head (see `join_towers`).
    """
    assert has_towers(network)
    config = copy.deepcopy(network.config)
    towers = _construct(type(network), config, network.dtype)
    removed = _text_parts(towers)
    for name in removed:
        path, _, leaf = name.rpartition(".")
        delattr(towers.get_submodule(path), leaf)
    _ignore(towers, removed)
    there = {name for name, _ in towers.named_parameters(remove_duplicate=False)}
    towers.all_tied_weights_keys = {
        target: source
        for target, source in towers.all_tied_weights_keys.items()
        if {target, source} <= there
    }
    return towers


def join_towers(towers: PreTrainedModel, network: PreTrainedModel) -> None:
    """Give the other parts of a multimodal model the text part of ``network``, which both share:
    so it is whole."""
    for name in _text_parts(network):
        path, _, leaf = name.rpartition(".")
        setattr(towers.get_submodule(path), leaf, network.get_submodule(name))


def _text_parts(model: PreTrainedModel) -> list[str]:
    """The names of what reads text, of the decoder, and of the head, unless that is a part of the
    decoder."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    parts = list(dict.fromkeys(names[id(module)] for module in (decoder, text_model(model))))
    if head is not None and not names[id(head)].startswith(f"{parts[0]}."):
        parts.append(names[id(head)])
    return parts


def _generating_part(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """The part of a configuration that reads and generates text (of models that also speak; mostly
    it is the whole), and the names of the other parts in a checkpoint."""
    if "text_config" not in config.sub_configs:
        for name in config.sub_configs:
            part: Any = getattr(config, name, None)
            reads = isinstance(part, PreTrainedConfig) and "text_config" in part.sub_configs
            if reads and _class_of(part) is not None:
                others = [other for other in config.sub_configs if other != name]
                return part, [other.removesuffix("_config") for other in others]
    return config, []


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The multimodal model of a configuration that generates text, or its causal LM."""
    for mapping in _MAPPINGS:
        if type(config) in mapping:
            return _get_model_class(config, mapping)
    return None


def _ignore(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Say to ignore these modules' weights in a checkpoint of this model."""
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = known | {rf"^{re.escape(name)}\." for name in names}


_DRAFTING = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers"),
    *("num_mtp_modules", "n_mtp_layers", "num_mtp_predict_layers"),
)
"""Names by which configurations tell how many layers that draft stand behind the last one."""


def _ignore_drafting_layers(model: PreTrainedModel) -> None:
    """Say to ignore the layers behind the last one that the configuration calls layers that draft.

    transformers' own lists name those of the sizes that were published first.
    """
    config: Any = model.config.get_text_config()
    said = [getattr(config, name, 0) or getattr(model.config, name, 0) for name in _DRAFTING]
    counts = [count for count in said if type(count) is int and 0 < count <= _MOST_DRAFTING]
    first = getattr(config, "num_hidden_layers", None)
    if not counts or type(first) is not int:
        return
    numbers = "|".join(map(str, range(first, first + max(counts))))
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = known | {rf"(^|\.)layers\.({numbers})\."}


def _keep_text(model: PreTrainedModel) -> list[str]:
    """Remove the modules that are neither the decoder of text nor its head, nor the `text_model`;
    their names."""
    decoder = model.get_decoder()
    if model.get_output_embeddings() is None:  # the head is a part of the decoder
        model.get_output_embeddings = decoder.get_output_embeddings  # type: ignore[method-assign]
    if (head := model.get_output_embeddings()) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no head that gives logits")
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module is model:
            continue
        if module.get_output_embeddings() is head:
            # A whole causal LM is inside: what is around it only joins images with text.
            model.forward = module.forward
            break
    names = {id(module): name for name, module in model.named_modules()}
    kept = [names[id(module)] for module in (text_model(model), decoder, head)]
    removed: list[str] = []
    for name, module in list(model.named_modules()):
        below = any(name == one or name.startswith(f"{one}.") for one in kept)
        above = any(one.startswith(f"{name}.") for one in kept) or not name
        inside = any(name.startswith(f"{one}.") for one in removed)
        if not (below or above or inside) and any(True for _ in module.state_dict()):
            path, _, leaf = name.rpartition(".")
            delattr(model.get_submodule(path), leaf)
            removed.append(name)
    return removed


@torch.no_grad()
def _check_text_pass(model: PreTrainedModel, removed: list[str]) -> None:
    """Raise `UnsupportedModelError` if a pass over text needs one of the removed modules."""
    trial = copy.deepcopy(model)
    attach(trial, [m for _, m in experts_modules(trial)], _no_experts)
    backbone = Backbone(trial)
    backbone.set_packed(True)
    (lane,) = backbone.lanes([Work([0, 0, 0], backbone.new_cache(3))])
    run_lanes([lane], _no_experts)
    try:
        lane.result()
    except AttributeError as error:
        if any(f"'{name.rpartition('.')[2]}'" in str(error) for name in removed):
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot read text without its other parts: {error}"
            ) from error
    except Exception:  # it may want to read a number back, which the meta device has not
        pass


def _no_experts(_: int, calls: Sequence[ExpertCall]) -> list[torch.Tensor]:
    return [call.hidden_states for call in calls]


def _construct(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    config.dtype = dtype
    for name in config.sub_configs:
        if (sub_config := getattr(config, name, None)) is not None:
            sub_config.dtype = dtype
    contexts = model_class.get_init_context(
        dtype, is_quantized=False, _is_ds_init_called=False, allow_all_kernels=False
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        try:
            model = model_class(config)
        except Exception as error:  # each architecture checks sizes in its own constructor
            raise UnsupportedModelError(
                f"{model_class.__name__} cannot be built from this configuration: "
                f"{type(error).__name__}: {error}"
            ) from error
    return model.eval()


def _config_dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
