"""A transformers causal LM without weights: every parameter on the meta device, nothing drawn.

The class is transformers' own for the configuration; no file of the model directory is imported.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from moe.errors import UnsupportedModelError


def build_meta_model(
    config: PreTrainedConfig, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model class of `config` on the meta device, in evaluation mode; `config` is copied.

    `dtype` is what parameters are in unless the architecture asks for another one (a router bias
    in float32, say); by default the configuration's own, or float32. Raises
    `UnsupportedModelError` where transformers has no such class. Weights that are quantised are
    planned as the floats that they stand for.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{config.model_type} ({type(config).__name__}) has no "
            "causal language model class in transformers "
            f"{transformers.__version__}; only text generation with such a class is supported"
        )
    model_class = _get_model_class(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    config = copy.deepcopy(config)
    if config.sub_configs.get("text_config") is not None and (
        model_class.config_class == config.sub_configs["text_config"]
    ):
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return _construct(model_class, config, dtype or _config_dtype(config))


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
