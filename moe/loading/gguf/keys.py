"""What a GGUF file's keys say of an architecture: understood, or refused by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experts.header import HeaderError
from moe.errors import UnsupportedModelError

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


class Keys:
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
        """Refuse what says that experts are weighed, or positions turned, in a way that the model
        class does not know, and what nobody has looked at; log other keys."""
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
