"""Multi-token-prediction layers of a checkpoint: found by their tensors, loaded as a submodule.

Checkpoints keep such a layer beside the model's tensors (``model.layers.61.eh_proj`` behind 61
layers, ``mtp.fc``), and transformers ignores it. Each has a projection of two joined rows, two
norms before it and one behind the layer, under one of a few names (`PARTS`); what else is there is
a decoder layer of the model's own class. If the tensors do not fill one, the model runs without,
and the message says why.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from experts.manifest import MTP_MODULE
from experts.safetensors_io import TensorInfo
from moe.loading.meta_model import build_like
from moe.loading.plan import make_plan
from moe.network.mtp import final_norm, place_of, prepare_head, width_of

PARTS = {
    "project": ("eh_proj", "fc", "input_proj"),
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "norm": ("shared_head.norm", "transformer.shared_head.norm", "final_layernorm", "norm"),
}
"""Names of the parts of such a layer that no other layer has, in public checkpoints."""
HIDDEN_FIRST = ("input_proj",)
"""Projections whose columns begin with those of the hidden state."""
SHARED = re.compile(r"(^|\.)(shared_head\.head|shared_head\.output|embed_tokens|lm_head)\.")
"""The model's own embedding and head, stored again."""
WRAPPER = re.compile(r"^(layers\.(?P<number>\d+)\.|mtp_block\.|transformer_layer\.)")
"""Matches the beginnings of names of the decoder layer."""


@dataclass(frozen=True)
class MtpTensors:
    """Tensors of the multi-token-prediction layers of a checkpoint.

    Attributes:
        names: of the first layer: what each is there, ``layer.`` and a name in a decoder layer, or
            a key of `PARTS` and ``weight``.
        others: of further layers, and copies of the model's embedding and head.
        layers: how many there are.
        hidden_first: the projection has the columns of the hidden state first.
    """

    names: Mapping[str, str]
    others: tuple[str, ...]
    layers: int
    hidden_first: bool


def find_mtp(tensors: Mapping[str, TensorInfo], hidden: int) -> MtpTensors | None:
    """The multi-token-prediction layers among a checkpoint's tensors; None if there are none.

    Args:
        hidden: size of the model's hidden states.
    """
    starts: dict[str, str] = {}  # of each layer its names' beginning, and its projection
    for name, info in tensors.items():
        for part in PARTS["project"]:
            whole = info.shape == (hidden, 2 * hidden)
            if name.endswith(f"{part}.weight") and whole:
                start = name.removesuffix(f"{part}.weight")
                if any(f"{start}{norm}.weight" in tensors for norm in PARTS["hnorm"]):
                    starts[start] = part
    if not starts:
        return None
    first, *further = sorted(starts, key=_numbers)
    names, others, numbers = dict[str, str](), list[str](), {0}
    for name in tensors:
        if name.startswith(tuple(further)) and further:
            others.append(name)
        elif name.startswith(first):
            rest, number = _without_wrapper(name.removeprefix(first))
            numbers.add(number)
            if SHARED.search(rest) or number:
                others.append(name)
            else:
                names[name] = _part(rest)
    count = max(len(starts), len(numbers))
    return MtpTensors(names, tuple(others), count, starts[first] in HIDDEN_FIRST)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _without_wrapper(rest: str) -> tuple[str, int]:
    found = WRAPPER.match(rest)
    if found is None:
        return rest, 0
    return rest[found.end() :], int(found["number"] or 0)


def _part(rest: str) -> str:
    for part, names in PARTS.items():
        for name in names:
            if rest.startswith(f"{name}."):
                return f"{part}.{rest.removeprefix(f'{name}.')}"
    return f"layer.{rest}"


class MtpMismatch(Exception):
    """The tensors of a layer do not fill one of the model's class; the message says what."""


@dataclass(frozen=True)
class PlannedMtp:
    """The use of a checkpoint's multi-token-prediction tensors.

    Attributes:
        renamed: the parameter that each becomes; None: it is ignored.
        why_not: why the network has no such layer; empty if it has.
    """

    renamed: Mapping[str, str | None]
    why_not: str


NOT_ASKED = "speculation.mode asks for no multi-token prediction"
ABSENT = "the model brings no multi-token-prediction layer"
WITHOUT_MTP = PlannedMtp({}, ABSENT)


def plan_mtp(
    network: PreTrainedModel, tensors: Mapping[str, TensorInfo], unwanted: str = ""
) -> PlannedMtp:
    """Give a network on meta the first multi-token-prediction layer of its checkpoint, if there is
    one.

    Args:
        unwanted: why it is to have none; empty if it is.
    """
    found = find_mtp(tensors, width_of(network))
    if found is None:
        return WITHOUT_MTP
    renamed: dict[str, str | None] = dict.fromkeys([*found.names, *found.others])
    if unwanted:
        return PlannedMtp(renamed, unwanted)
    try:
        return PlannedMtp(renamed | add_mtp(network, found, tensors), "")
    except MtpMismatch as error:
        return PlannedMtp(renamed, f"its multi-token-prediction layer does not fit: {error}")


def restore_mtp(network: PreTrainedModel, trunk: Mapping[str, TensorInfo]) -> str:
    """Give a network on meta the layer of its store; returns why it has none, or nothing.

    Args:
        trunk: tensors of the store outside experts; their names are the network's.
    """
    own = [name for name in trunk if name.startswith(f"{MTP_MODULE}.")]
    if not own:
        return ABSENT
    head = build_head(network, hidden_first=any(".he_proj." in name for name in own))
    network.add_module(MTP_MODULE, head)
    return ""


def add_mtp(
    network: PreTrainedModel, found: MtpTensors, tensors: Mapping[str, TensorInfo]
) -> dict[str, str]:
    """Give a network on meta the submodule ``mtp``, and say which parameter each tensor becomes.

    Raises:
        MtpMismatch: see there; the network stays as it was.
    """
    try:
        head = build_head(network, hidden_first=found.hidden_first)
        renamed = _places(head, found)
        infos = {to: tensors[name] for name, to in renamed.items()}
        problems = make_plan(head, infos).problems
    except Exception as error:  # an architecture's own code met a configuration it did not expect
        raise MtpMismatch(f"{type(error).__name__}: {error}") from error
    if problems:
        raise MtpMismatch(f"{problems[0]} ({len(problems)} problems)")
    network.add_module(MTP_MODULE, head)
    return {name: f"{MTP_MODULE}.{to}" for name, to in renamed.items()}


def build_head(network: PreTrainedModel, *, hidden_first: bool) -> PreTrainedModel:
    """The head of a network, on meta; see `moe.network.mtp`."""
    config = one_layer(network.config, network.config.get_text_config().num_hidden_layers)
    return prepare_head(build_like(network, config), hidden_first=hidden_first)


def _places(head: PreTrainedModel, found: MtpTensors) -> dict[str, str]:
    """The parameter of the head that each tensor becomes, by its name in a checkpoint."""
    joined = place_of(head, head.get_input_embeddings())
    layers = next(m for m in head.get_decoder().children() if isinstance(m, nn.ModuleList))
    norm, _ = final_norm(head)
    places = {
        "project": f"{joined}.{'he_proj' if found.hidden_first else 'eh_proj'}",
        "enorm": f"{joined}.enorm",
        "hnorm": f"{joined}.hnorm",
        "norm": norm,
        "layer": f"{place_of(head, layers)}.0",
    }
    renamed = {}
    for name, part in found.names.items():
        kind, _, rest = part.partition(".")
        renamed[name] = f"{places[kind]}.{rest}"
    return renamed


def one_layer(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A model's configuration for one layer: as transformers says for its own `MtpModel` where it
    does, else like the last of ``layers``."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    given = _given(text)
    for name, value in vars(text).items():
        if name in given:
            setattr(text, name, given[name])
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, value[-1:])
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if hasattr(text, name):
            setattr(text, name, 0)
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = []
    text.num_hidden_layers = 1
    return config


def _given(text: PreTrainedConfig) -> dict[str, Any]:
    """The lists by layer that transformers gives a model's first layer of this kind."""
    if not getattr(text, "num_mtp_layers", None):
        return {}
    try:
        own = text.get_mtp_config()
    except ValueError:  # it does not say which
        return {}
    names = ("layer_types", "mlp_layer_types")
    return {name: getattr(own, name)[:1] for name in names if getattr(own, name, None)}
