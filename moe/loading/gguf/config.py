"""Makes a configuration of transformers from what a GGUF file says of its model.

transformers' own tables leave out sizes of experts and how positions are scaled, and its newer
versions replace them, so `moe.loading.gguf.architectures` stands alone. Sizes that tensors show are
taken from the tensors. Keys that change what a model computes are understood or refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experts.files import HeaderError
from moe.errors import UnsupportedModelError
from moe.loading.gguf.architectures import ARCHITECTURES, DEFAULTS, KEYS, Architecture
from moe.loading.gguf.header import FLOATS, GgufTensor, kind_name
from moe.loading.gguf.parts import check_experts

SHOWN = (
    "vocab_size",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "attention.layer_norm_epsilon",
    "attention.value_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "feed_forward_length",
    "leading_dense_block_count",
    "nextn_predict_layers",
)
"""Keys that tensors, or other keys, say again."""
_TELLING = (
    "rope.",
    "expert_",
    "attention.",
    "ssm.",
    "shortconv.",
    "interleave_",
    "leading_",
    "full_attention",
    "nextn_",
    "moe_",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "final_logit",
    "attn_logit",
    "swiglu_",
)
"""Beginnings of keys that change what a model computes."""
_EACH_OR_ALL = list | int | float

ROTARY_TENSORS: Mapping[str, tuple[str, ...]] = {
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",),
    "rope_factors_long.weight": ("long_factor",),
}
"""Tensors by which a file divides the frequencies of positions (Llama 3.1's and 4's, and LongRoPE's
at either length), and which of transformers' parts of ``longrope`` they are."""
MAX_ROTARY_BYTES = 1 << 20
"""Most bytes of one of them: a number for each of half a head's dimensions."""

_logger = logging.getLogger(__name__)


def architecture(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> tuple[str, Architecture]:
    """llama.cpp's name, and what is known of it; raises `UnsupportedModelError`, as all below."""
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name, ()) if isinstance(name, str) else ()
    if not known:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} cannot be read, those of "
            f"{', '.join(ARCHITECTURES)} can; use the model's own checkpoint (safetensors)"
        )
    stated = metadata.get(f"{name}.expert_gating_func")
    if not stated:  # as in files that were written before the key
        biased = any(tensor.endswith(".exp_probs_b.bias") for tensor in tensors)
        stated = max(own.gating for own in known) if biased else min(own.gating for own in known)
    return str(name), next((own for own in known if own.gating == stated), known[0])


class GgufKeys:
    """The keys that begin with an architecture's name."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self._name, self._used = metadata, name, set[str]()

    def get(self, key: str, default: Any = None, kind: Any = int | float) -> Any:
        """A finite number, or what else is wanted; `...` as default: there, and above 0.

        Of a list, one number a layer, the one that all layers have that have any.
        """
        value = self._metadata.get(f"{self._name}.{key}")
        self._used.add(key)
        if isinstance(value, list) and kind not in (list, _EACH_OR_ALL):
            several = {repr(own): own for own in value if own}
            value = next(iter(several.values())) if len(several) == 1 else value
        if value is None and default is ...:
            raise HeaderError(f"does not state {self._name}.{key}")
        if value is not None and not isinstance(value, kind):
            raise self.refused(key)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refused(key)
        if default is ... and isinstance(value, int | float) and value <= 0:
            raise self.refused(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        return f"{self._name}.{key}" in self._metadata

    def refused(self, key: str) -> UnsupportedModelError:
        value = self._metadata.get(f"{self._name}.{key}")
        return UnsupportedModelError(
            f"it states {self._name}.{key} = {repr(value)[:80]}, which is not supported; use the "
            "model's own checkpoint (safetensors)"
        )

    def check(self, known: Architecture, config: Mapping[str, Any]) -> None:
        """Refuse keys that state another routing or rotation than the model class computes, and
        keys that are not known here; log the rest."""
        theta, rope = self.get("rope.freq_base"), config.get("rope_parameters", {})
        understood = {*known.keys, *(["rope.freq_base_swa"] if known.turned else [])}
        for key, wanted in (
            ("expert_gating_func", (None, 0, known.gating)),
            ("expert_weights_norm", (None, config.get("norm_topk_prob", known.normalised))),
            ("expert_weights_scale", (None, 0.0, 1.0)),
            ("expert_group_count", (None, 0, 1)),
            ("expert_group_used_count", (None, 0, 1)),
            ("attention.sliding_window", (None, 0)),
            ("attention.temperature_length", (None, rope.get("original_max_position_embeddings"))),
            ("rope.freq_base_swa", (None, theta)),
            ("rope.scaling.attn_factor", (None, rope.get("attention_factor", 1.0))),
            ("rope.scaling.yarn_attn_factor", (None, 1.0)),
            ("rope.scaling.yarn_ext_factor", (None, 1.0)),
        ):
            if key not in understood and self.get(key) not in wanted:
                raise self.refused(key)
        own = f"{self._name}."
        for key in (key.removeprefix(own) for key in self._metadata if key.startswith(own)):
            if key not in self._used and key not in (*SHOWN, *known.unused):
                if key.startswith(_TELLING):
                    raise self.refused(key)
                _logger.warning("the GGUF file states %r, which is not used", own + key)


def gguf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    divisors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The configuration; raises `HeaderError` where a key is missing or makes no sense.

    Args:
        divisors: the numbers in `ROTARY_TENSORS`, of those that there are.
    """
    name, known = architecture(metadata, tensors)
    keys = GgufKeys(metadata, name)
    layers = _layers(keys, tensors)
    config = _stated(keys, known, len(layers)) | dict(known.fixed)
    config |= _shown(name, known, keys, layers, {n: t.shape for n, t in tensors.items()})
    if known.normalised is None:
        config["norm_topk_prob"] = bool(keys.get("expert_weights_norm", False))
    if known.turns:
        config["rope_parameters"] = _rope(keys, known, config, divisors)
    elif divisors:
        raise HeaderError(f"has {next(iter(divisors))}, and its attention has no positions")
    stems = [frozenset(tensor.rpartition(".")[0] or tensor for tensor in own) for own in layers]
    config |= known.derived(config, stems)
    _check_sizes(known, config, tensors)
    keys.check(known, config)
    own = {key: value for key, value in config.items() if not key.startswith("_")}
    tokens = _special_tokens(metadata, tensors)
    if known.text:
        stated = {part: value for part, value in tokens.items() if value is not None}
        own = {"text_config": own | stated | {"model_type": known.text}}
    return own | tokens | {"model_type": known.model_type} | _stored_types(tensors)


def rotary_tensors(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the `ROTARY_TENSORS` that a file has, small enough to be read with its header.

    Raises `HeaderError`.
    """
    found = {name: tensors[name] for name in ROTARY_TENSORS.keys() & tensors.keys()}
    for name, tensor in found.items():
        if len(tensor.shape) != 1 or kind_name(tensor.kind) != "F32":
            raise HeaderError(f"has {name} of another type than F32, or not of one dimension")
        if tensor.end - tensor.start > MAX_ROTARY_BYTES:
            raise HeaderError(f"has {name} of more than {MAX_ROTARY_BYTES} bytes")
    return found


def _special_tokens(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """Return what transformers reads of tokens, of a whole model and of its text part."""
    return {
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": next(iter(_ids(metadata, "bos")), None),
        "pad_token_id": next(iter(_ids(metadata, "padding")), None),
        "eos_token_id": _ids(metadata, "eos", "eot", "eom") or None,
    }


def _stored_types(tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The dtype of a model whose matrices have one; and ggml's types, as loading needs them."""

    def kinds(wanted: Callable[[str, GgufTensor], bool]) -> list[str]:
        return sorted({kind_name(t.kind) for name, t in tensors.items() if wanted(name, t)})

    wide = kinds(lambda _, tensor: len(tensor.shape) > 1)
    return {
        "dtype": FLOATS.get(wide[0], "bfloat16") if len(wide) == 1 else "bfloat16",
        "quantization_config": {
            "quant_method": "gguf",
            "types": kinds(lambda *_: True),
            "expert_types": kinds(lambda name, _: name.endswith("_exps.weight")),
        },
    }


def _layers(keys: GgufKeys, tensors: Mapping[str, GgufTensor]) -> list[frozenset[str]]:
    """The names of each layer's tensors, of all but those that draft further tokens."""
    count = keys.get("block_count", ..., int)
    drafting = keys.get("nextn_predict_layers", 0, int)
    found: dict[str, set[str]] = {}
    for tensor in tensors:
        if tensor.startswith("blk."):
            _, number, own = tensor.split(".", 2) if tensor.count(".") > 1 else ("", "", "")
            found.setdefault(number, set()).add(own)
    wanted = [str(number) for number in range(min(count - drafting, len(found)))]
    drafts = range(count - drafting, min(count, len(found)))
    behind = found.keys() - set(wanted)
    absent = len(wanted) != count - drafting or not found.keys() >= set(wanted)
    if absent or not behind <= {str(number) for number in drafts}:
        raise HeaderError(
            f"has blk.* of {len(found)} layers, and its keys say {count}"
            + (f", of which {drafting} may be absent" if drafting else "")
        )
    return [frozenset(found[number]) for number in wanted]


def _stated(keys: GgufKeys, known: Architecture, num_layers: int) -> dict[str, Any]:
    """Return what keys say, by transformers' names."""
    config: dict[str, Any] = {}
    for key, ours in (KEYS | dict(known.keys)).items():
        default, kind = DEFAULTS.get(key, ...), int | float
        if key in known.lists:
            config[ours] = _of_each(keys, key, default, num_layers)
            continue
        if key == "attention.layer_norm_rms_epsilon":
            default = keys.get("attention.layer_norm_epsilon", ...) if not keys.has(key) else ...
        value = keys.get(key, default, kind)
        if value == 0 and value is not False and default not in (None, ...):
            value = default  # llama.cpp takes 0 for absent
        config[ours] = value
    config[known.keys.get("block_count", KEYS["block_count"])] = num_layers
    names = KEYS | dict(known.keys)
    if "qk_rope_head_dim" in config:
        config["head_dim"] = config["qk_rope_head_dim"]
    else:
        heads = config[names["attention.head_count"]]
        heads = heads[0] if isinstance(heads, list) else heads
        width = config[names["embedding_length"]] // heads
        config["head_dim"] = keys.get("attention.key_length", width)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if "feed_forward_length" not in known.keys and keys.get("feed_forward_length", kind=object):
        config["intermediate_size"] = keys.get("feed_forward_length")
    return config


def _of_each(keys: GgufKeys, key: str, default: Any, num_layers: int) -> list[Any] | None:
    """Return a key's value for each layer; one number stands for all."""
    value = keys.get(key, default, _EACH_OR_ALL)
    if not isinstance(value, list):
        return None if value is None else [value] * num_layers
    least = 1 if key.startswith("attention.head_count") else 0
    fits = [isinstance(own, int | float) and least <= own < math.inf for own in value]
    if len(value) < num_layers or not all(fits):
        raise keys.refused(key)
    return value[:num_layers]  # those behind are of layers that draft


def _shown(
    name: str,
    known: Architecture,
    keys: GgufKeys,
    layers: Sequence[frozenset[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Read sizes from tensors: those of things that are made before the loader compares shapes."""
    check_experts(name, {tensor for own in layers for tensor in own})
    sparse = [number for number, own in enumerate(layers) if "ffn_gate_inp.weight" in own]
    experts = [_experts(layers[number], f"blk.{number}.", shapes) for number in sparse]
    told: dict[str, Any] = {
        known.sizes["experts"]: experts[0][0],
        known.sizes["width"]: experts[0][1],
    }
    told["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    if known.dense_first:
        told[known.dense_first] = sparse[0]
    for tensor, ours in known.sizes.items():
        found = (shapes[key] for key in shapes if key.endswith(f".{tensor}.weight"))
        if tensor.startswith("ffn_") and (shape := next(found, None)):
            told[ours] = shape[-1]
    for ours, tensor in known.shown.items():
        told[ours] = tensor in shapes or any(tensor in own for own in layers)
    for ours, kinds in known.by_layer.items():
        told[ours] = [
            next((kind for tensor, kind in kinds.items() if f"{tensor}.weight" in own), "")
            for own in layers
        ]
    return told


def _experts(
    own: frozenset[str], block: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """Return the number of a layer's experts, and their width."""
    if "ffn_down_exps.weight" in own:
        shape = shapes[f"{block}ffn_down_exps.weight"]
        if len(shape) != 3:
            raise HeaderError(f"has {block}ffn_down_exps.weight of {shape}, not of 3 dimensions")
        return shape[0], shape[2]
    apart = [tensor for tensor in own if tensor.startswith("ffn_down.") and tensor.count(".") == 2]
    if not apart:
        raise HeaderError(f"has {block}ffn_gate_inp.weight and no experts beside it")
    return len(apart), shapes[f"{block}{apart[0]}"][-1]


def _check_sizes(
    known: Architecture, config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> None:
    """Check that keys do not contradict the shapes of what is made by them."""
    names = KEYS | dict(known.keys)
    hidden, heads = config[names["embedding_length"]], config[names["attention.head_count_kv"]]
    heads = heads[0] if isinstance(heads, list) else heads
    embeddings = tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else (0,)
    attn_k = re.compile(r"blk\.\d+\.attn_k\.weight")  # an indexer has one of its own
    keys = next((t.shape for n, t in tensors.items() if attn_k.fullmatch(n)), None)
    checked = [("token_embd.weight", (embeddings[0], hidden), embeddings)]
    several = {"_sliding_head", "qk_rope_head_dim"} & config.keys()  # heads of other sizes, too
    if keys is not None and config.get("head_dim") and not several:
        checked.append(("attn_k.weight", (heads * config["head_dim"], hidden), keys))
    for tensor, stated, found in checked:
        if found != stated:
            raise HeaderError(f"has {tensor} of {found}, and its keys say {stated}")


_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope(
    keys: GgufKeys,
    known: Architecture,
    config: dict[str, Any],
    divisors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    rotated = keys.get("rope.dimension_count", config["head_dim"])
    base = keys.get("rope.freq_base", 10000.0)
    if not known.turned:
        return _rope_of(keys, known, config["head_dim"], divisors, rotated, base)
    if keys.get("rope.scaling.type", "none", str) != "none":
        raise keys.refused("rope.scaling.type")
    kinds = {}
    for kind, share in known.turned.items():
        head, size, own_base, own = config["head_dim"], int(rotated * share), base, divisors
        if kind == "sliding_attention":
            own_base, own = keys.get("rope.freq_base_swa", base), {}
            head = keys.get("attention.key_length_swa", head)
            size = keys.get("rope.dimension_count_swa", size)
        elif share < 1:  # numbers are there for all that turn in the other layers
            own = {name: numbers[: size // 2] for name, numbers in divisors.items()}
        kinds[kind] = _rope_of(keys, known, head, own, size, own_base)
    return kinds


def _rope_of(
    keys: GgufKeys,
    known: Architecture,
    head: int,
    divisors: Mapping[str, Sequence[float]],
    rotated: int,
    base: float,
) -> dict[str, Any]:
    """Positions in layers of one kind, which turn `rotated` of a head's dimensions."""
    rope = {**known.rotary, "rope_theta": base, "rope_type": "default"}
    if rotated != head:
        rope["partial_rotary_factor"] = rotated / head
    scaling = keys.get("rope.scaling.type", "none", str)
    factor = keys.get("rope.scaling.factor")
    turning = _turning(divisors, head // 2)
    if turning is not None and scaling == "none":
        rope |= {"rope_type": "proportional", "partial_rotary_factor": turning / (head // 2)}
    elif divisors and scaling in ("none", "longrope"):
        rope |= _longrope(keys, known, divisors, rotated // 2)
    elif scaling in ("linear", "yarn") and not divisors:
        for key, ours in (_YARN if scaling == "yarn" else {"factor": "factor"}).items():
            if (value := keys.get(f"rope.scaling.{key}")) is not None:
                rope[ours] = value
        rope |= {"rope_type": scaling} | (dict(known.yarn) if scaling == "yarn" else {})
        if "rope.dimension_count" in known.keys and keys.has("rope.scaling.yarn_log_multiplier"):
            # llama.cpp's converter states a tenth of what both of transformers' factors are.
            tenth = keys.get("rope.scaling.yarn_log_multiplier")
            rope["mscale"] = rope["mscale_all_dim"] = 10 * tenth
    elif scaling != "none":
        raise keys.refused("rope.scaling.type")
    elif factor not in (None, 0, 1):
        raise keys.refused("rope.scaling.factor")
    if rope["rope_type"] != "longrope":
        rope = {part: value for part, value in rope.items() if not part.endswith("_mscale")}
    if rope.get("mrope_interleaved"):
        rope["mrope_section"] = keys.get("rope.dimension_sections", ..., list)[:3]
    return rope


def _turning(divisors: Mapping[str, Sequence[float]], pairs: int) -> int | None:
    """Return how many of a head's pairs are rotated, where a file divides the others' frequencies
    by 1e30."""
    numbers = list(divisors.get("rope_freqs.weight", ()))
    turning = numbers.count(1.0)
    stands = all(number > 9e29 for number in numbers[turning:])
    return turning if len(numbers) == pairs and 0 < turning < pairs and stands else None


def _longrope(
    keys: GgufKeys, known: Architecture, divisors: Mapping[str, Sequence[float]], wanted: int
) -> dict[str, Any]:
    found = {part: own for name, own in divisors.items() for part in ROTARY_TENSORS[name]}
    for name, own in divisors.items():
        if len(own) != wanted or not all(0 < number < math.inf for number in own):
            raise HeaderError(f"has {name} of {len(own)} numbers, not of {wanted} above 0")
    if len(found) != 2:
        raise HeaderError(f"has {', '.join(divisors)} alone, for prompts of one length only")
    scale = float(keys.get("rope.scaling.attn_factor", 1.0))
    several = found["short_factor"] != found["long_factor"]
    original = "rope.scaling.original_context_length" if several else "context_length"
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.get(original, ...),
        "factor": 1.0,
        "attention_factor": scale,
        **{part: scale for part in known.rotary if part.endswith("_mscale")},
        **{part: list(numbers) for part, numbers in found.items()},
    }


def _ids(metadata: Mapping[str, Any], *names: str) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return list(dict.fromkeys(number for number in found if type(number) is int))
