"""What a GGUF file says of its model, as a configuration of transformers.

transformers' own tables leave out sizes of experts and how positions are scaled, and its newer
versions replace them, so this one stands alone. Sizes that tensors show are taken from the tensors.
Keys that say how experts are chosen or positions turned are understood or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experts.header import HeaderError
from moe.errors import UnsupportedModelError
from moe.loading.gguf.header import GgufTensor
from moe.loading.gguf.keys import Architecture, Keys, architecture
from moe.loading.gguf.types import FLOATS, kind_name

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
    keys = Keys(metadata, name)
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


def _rope(keys: Keys, known: Architecture, config: dict[str, Any]) -> dict[str, Any]:
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
