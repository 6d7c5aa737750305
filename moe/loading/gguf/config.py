"""What a GGUF file says of its model, as a configuration of transformers.

transformers' own tables leave out sizes of experts and how positions are scaled, and its newer
versions replace them, so this one stands alone. Sizes that tensors show are taken from the tensors.
Keys that say how experts are chosen or positions turned are understood or refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experts.safetensors_io import HeaderError
from moe.errors import UnsupportedModelError
from moe.loading.gguf.header import FLOATS, GgufTensor, kind_name

# What a GGUF file's keys say of an architecture: understood, or refused by name.

_SHOWN = (  # by tensors, or by another key
    "vocab_size",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "attention.value_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
)
_TELLING = ("rope.", "expert_", "attention.")
"""How keys begin that change what a model computes."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp and transformers differ about one.

    Attributes:
        model_type: transformers' name.
        experts, width: its names of the number of experts and of their intermediate size.
        gating: llama.cpp's number of the function over the router's scores.
        fixed: what llama.cpp does without the file saying so.
        rotary: the keys of `rope_parameters` that are fixed likewise.
        pairs: rows of queries and keys are in the order of pairs that turn together.
    """

    model_type: str
    experts: str = "num_local_experts"
    width: str = "intermediate_size"
    gating: int = 1  # softmax
    fixed: dict[str, Any] = field(default_factory=dict)
    rotary: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False


_QWEN = ("num_experts", "moe_intermediate_size")
ARCHITECTURES = {
    "gpt-oss": Architecture("gpt_oss", gating=3, rotary={"truncate": False}),
    "llama": Architecture("mixtral", pairs=True),
    "minimax-m2": Architecture("minimax_m2", gating=2),
    "qwen2moe": Architecture("qwen2_moe", *_QWEN, fixed={"norm_topk_prob": False}),
    "qwen3moe": Architecture("qwen3_moe", *_QWEN, fixed={"norm_topk_prob": True}),
}


def architecture(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """llama.cpp's name, and what is known of it; raises `UnsupportedModelError`, as all below."""
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} cannot be read, those of "
            f"{', '.join(ARCHITECTURES)} can; use the model's own checkpoint (safetensors)"
        )
    return str(name), known


class GgufKeys:
    """The keys that begin with an architecture's name."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self._name, self._used = metadata, name, set[str]()

    def get(self, key: str, default: Any = None, kind: Any = int | float) -> Any:
        """A finite number, or what else is wanted; `...` as default: there, and above 0."""
        value = self._metadata.get(f"{self._name}.{key}")
        self._used.add(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # the same for every layer
        if value is None and default is ...:
            raise HeaderError(f"does not state {self._name}.{key}")
        if value is not None and not isinstance(value, kind):
            raise self.refused(key)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refused(key)
        if value is not None and default is ... and value <= 0:
            raise self.refused(key)
        return default if value is None else value

    def refused(self, key: str) -> UnsupportedModelError:
        value = self._metadata.get(f"{self._name}.{key}")
        return UnsupportedModelError(
            f"it states {self._name}.{key} = {repr(value)[:80]}, which is not supported; use the "
            "model's own checkpoint (safetensors)"
        )

    def check(self, known: Architecture) -> None:
        """Refuse keys that state another routing or rotation than the model class computes, and
        keys that are not known here; log the rest."""
        for key, wanted in (
            ("expert_gating_func", (None, 0, known.gating)),
            ("expert_weights_norm", (None, known.fixed.get("norm_topk_prob", True))),
            ("expert_weights_scale", (None, 0.0, 1.0)),
            ("rope.scaling.attn_factor", (None, 1.0)),
            ("rope.scaling.yarn_attn_factor", (None, 1.0)),
        ):
            if self.get(key) not in wanted:
                raise self.refused(key)
        own = f"{self._name}."
        for key in (key.removeprefix(own) for key in self._metadata if key.startswith(own)):
            if key not in self._used and key not in _SHOWN:
                if key.startswith(_TELLING):
                    raise self.refused(key)
                _logger.warning("the GGUF file states %s%s, which is not used", own, key)


_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
_OPTIONAL = {
    "feed_forward_length": "intermediate_size",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def gguf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The configuration; raises `HeaderError` where a key is missing or makes no sense."""
    name, known = architecture(metadata)
    keys = GgufKeys(metadata, name)
    config = {ours: keys.get(key, ...) for key, ours in _NEEDED.items()} | known.fixed
    config |= {o: keys.get(key) for key, o in _OPTIONAL.items() if keys.get(key) is not None}
    config |= _shown(name, known, config, {n: t.shape for n, t in tensors.items()})
    config["rope_parameters"] = _rope(keys, known, config)
    keys.check(known)
    kinds, own, wide = (
        sorted({kind_name(t.kind) for n, t in tensors.items() if wanted(n, t)})
        for wanted in (
            lambda *_: True,
            lambda name, _: name.endswith("_exps.weight"),
            lambda _, tensor: len(tensor.shape) > 1,
        )
    )
    return config | {
        "model_type": known.model_type,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": FLOATS.get(wide[0], "bfloat16") if len(wide) == 1 else "bfloat16",
        "quantization_config": {"quant_method": "gguf", "types": kinds, "expert_types": own},
        "bos_token_id": next(iter(_ids(metadata, "bos")), None),
        "pad_token_id": next(iter(_ids(metadata, "padding")), None),
        "eos_token_id": _ids(metadata, "eos", "eot", "eom") or None,
    }


def _shown(
    name: str, known: Architecture, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """What shapes tell, and that they do not contradict the keys: sizes of things that are made
    before the loader compares shapes."""
    if len(experts := shapes.get("blk.0.ffn_down_exps.weight", ())) != 3:
        raise UnsupportedModelError(
            "its first layer has no experts (tensor blk.0.ffn_down_exps.weight), and dense models "
            f"of architecture {name} are not supported"
        )
    head = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    blocks = {tensor.split(".")[1] for tensor in shapes if tensor.startswith("blk.")}
    embeddings = shapes.get("token_embd.weight", (0,))
    for tensor, stated, shape in (
        ("token_embd.weight", (embeddings[0], config["hidden_size"]), embeddings),
        (
            "blk.0.attn_k.weight",
            (config["num_key_value_heads"] * head, config["hidden_size"]),
            None,
        ),
        ("blk.*", config["num_hidden_layers"], len(blocks)),
    ):
        if (found := shapes.get(tensor) if shape is None else shape) != stated:
            raise HeaderError(f"has {tensor} of {found}, and its keys say {stated}")
    told = {known.experts: experts[0], known.width: experts[2], "vocab_size": embeddings[0]}
    if shared := shapes.get("blk.0.ffn_down_shexp.weight"):
        told["shared_expert_intermediate_size"] = shared[-1]
    return told


def _rope(keys: GgufKeys, known: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": keys.get("rope.freq_base", 10000.0), "rope_type": "default"}
    rotated = keys.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling = keys.get("rope.scaling.type", "none", str)
    if scaling in ("linear", "yarn"):
        names = _YARN if scaling == "yarn" else {"factor": "factor"}
        for key, ours in names.items():
            if (value := keys.get(f"rope.scaling.{key}")) is not None:
                rope[ours] = value
        rope |= {"rope_type": scaling} | (known.rotary if scaling == "yarn" else {})
    elif scaling != "none":
        raise keys.refused("rope.scaling.type")
    return rope


def _ids(metadata: Mapping[str, Any], *names: str) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return list(dict.fromkeys(number for number in found if type(number) is int))
