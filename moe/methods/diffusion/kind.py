"""Which models write canvases, and what their classes want before they are loaded.

A model is known by its structure, not by its name: a ``generate`` that is not transformers' common
one, a ``canvas_length``, an encoder that reads, and a decoder that refines.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from moe.errors import CheckpointError


def serves(model: PreTrainedModel) -> bool:
    """Whether a model writes canvases by code of its own, by its class and configuration."""
    own = not isinstance(model, GenerationMixin) and hasattr(model, "generate")
    return own and isinstance(getattr(model.config, "canvas_length", None), int)


def text_model(model: PreTrainedModel) -> nn.Module:
    """The part of the encoder that turns embeddings of a prompt into keys and values."""
    reader: Any = model.get_encoder()
    found: nn.Module = reader.get_decoder()
    return found


def set_generation(model: PreTrainedModel, stored: dict[str, Any]) -> None:
    """Let a model generate by the settings stored beside it, of its own class.

    Raises:
        CheckpointError: they are not valid for this model.
    """
    kind: Any = type(model).generation_config_class
    known = vars(kind())
    settings = {name: value for name, value in stored.items() if name in known and name[0] != "_"}
    try:
        defaults = kind._get_default_generation_params()
        for name, value in settings.items():
            # The file names a class; only that of the default is made.
            own: Any = defaults.get(name)
            if isinstance(value, dict) and is_dataclass(own):
                given = {key: item for key, item in value.items() if key != "_cls_name"}
                made: Any = type(own)
                settings[name] = made(**given)
        model.generation_config = kind(**settings)
    except Exception as error:  # the class checks values with its own types of errors
        raise CheckpointError(
            f"generation_config.json is not valid for {type(model).__name__}: {error}; repair or "
            "remove the file"
        ) from error


def schedule_of(model: PreTrainedModel) -> dict[str, Any]:
    """The settings by which a model writes canvases, as far as it has them, ready for JSON."""
    own: Any = model
    try:
        settings, _ = own._prepare_generation_config(None)
    except Exception:  # generation code of an architecture that is not known
        settings = None
    names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold")
    schedule = {name: getattr(settings, name, None) for name in (*names, "confidence_threshold")}
    config = getattr(settings, "sampler_config", None)
    return schedule | {"entropy_bound": getattr(config, "entropy_bound", None)}


def share_tied_modules(model: PreTrainedModel) -> None:
    """Let modules whose parameters are all tied to another's be that other module.

    An encoder and a decoder with the same weights then have one set of experts, linear layers and
    norms, whatever is done to them: experts taken away, matrices cut into planes. Modules that are
    replaced meanwhile want `link_shared` again.
    """
    ties = model.all_tied_weights_keys
    shared: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(remove_duplicate=False)]
        if not own or not all(one in ties for one in own) or not _is_registered(model, name):
            continue
        sources = {ties[one].removesuffix(one.removeprefix(name)) for one in own}
        if len(sources) != 1:
            continue
        (source_name,) = sources
        source = model.get_submodule(source_name)
        if type(source) is not type(module) or _kept_buffers(source) or _kept_buffers(module):
            continue
        path, _, leaf = name.rpartition(".")
        del model.get_submodule(path)._modules[leaf]
        shared[name] = source_name
        for one in own:
            del ties[one]
    model.shared_modules = shared  # type: ignore[assignment]
    link_shared(model)


def link_shared(model: PreTrainedModel) -> None:
    """Let the modules of `share_tied_modules` be what now has their sources' names."""
    links: Any = model.shared_modules
    for name, source_name in links.items():
        path, _, leaf = name.rpartition(".")
        # Not registered: it has one name, and one place in the state of the model.
        object.__setattr__(model.get_submodule(path), leaf, model.get_submodule(source_name))


def _is_registered(model: nn.Module, name: str) -> bool:
    """Whether the module is still there under its name: one around it may be shared by now."""
    for part in name.split("."):
        found = model._modules.get(part)
        if found is None:
            return False
        model = found
    return True


def _kept_buffers(module: nn.Module) -> bool:
    """Whether it has buffers that a checkpoint holds."""
    return any(
        name not in one._non_persistent_buffers_set
        for one in module.modules()
        for name in one._buffers
    )
