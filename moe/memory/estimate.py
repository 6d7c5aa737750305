"""Estimates the memory of sequences from a configuration, for networks that cannot be probed.

Layers differ: some keep keys and values of all tokens, some of a window of them, some latents in
their place, and some a state of a fixed size. `layer_types` of the configuration says which is
which, and the names below are those of transformers' configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WITH_STATE = ("linear_attention", "mamba", "conv", "recurrent", "kda")
_WITH_WINDOW = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_WITHOUT = ("moe", "mlp", "sparse", "dense")
_STATE_BYTES = 4
"""Recurrent states are in float32."""


@dataclass(frozen=True)
class SequenceBytes:
    """Memory of a sequence.

    Attributes:
        per_token: bytes of keys and values that each token adds.
        fixed: bytes of states, and of layers that see a window.
    """

    per_token: int
    fixed: int


def estimate_sequence(config: Any, itemsize: int) -> SequenceBytes:
    """Estimate a sequence's memory.

    Args:
        config: of a text model.
        itemsize: bytes of a number of keys and values.
    """
    kinds: list[str] = getattr(config, "layer_types", None) or []
    per_token = fixed = 0
    for layer in range(config.num_hidden_layers):
        differ = getattr(config, "is_heterogeneous", False)  # a newer attribute of transformers
        own = config.per_layer_config[layer] if differ else config
        kind = kinds[layer] if layer < len(kinds) else "full_attention"
        if kind in _WITH_STATE:
            fixed += sum(_state_sizes(own, kind, itemsize))
        elif kind not in _WITHOUT:
            size, window = itemsize * _row(own, kind), _window(own, kind)
            if window is None:
                per_token += size
            else:
                fixed += size * window
    return SequenceBytes(per_token, fixed)


def _window(config: Any, kind: str) -> int | None:
    found: int | None = getattr(config, _WITH_WINDOW[kind], None) if kind in _WITH_WINDOW else None
    return found


def _row(config: Any, kind: str) -> int:
    """Numbers that a token leaves in a layer of attention: keys, values and keys of an indexer."""
    indexer = getattr(config, "index_head_dim", None) or getattr(config, "indexer_head_dim", 0) or 0
    if rank := getattr(config, "kv_lora_rank", None):
        return int(rank + (getattr(config, "qk_rope_head_dim", None) or 0) + indexer)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "full_attention":  # where layers with windows have heads of another kind
        heads = getattr(config, "num_global_key_value_heads", None) or heads
        size = getattr(config, "global_head_dim", None) or size
    values = getattr(config, "v_head_dim", None) or size
    return int(heads * (size + values) + indexer)


def _state_sizes(config: Any, kind: str, itemsize: int) -> Iterator[int]:
    """Bytes of a recurrent state and of what a convolution keeps."""

    def of(name: str, default: int = 0) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else default

    if kind == "conv":
        yield itemsize * config.hidden_size * of("conv_L_cache")
    elif of("mamba_d_state") or of("ssm_state_size"):
        inner = of("mamba_expand", 2) * config.hidden_size
        heads = of("mamba_n_heads") or of("mamba_num_heads")
        width = of("mamba_d_head") or of("mamba_head_dim")
        inner, state = heads * width or inner, of("mamba_d_state") or of("ssm_state_size")
        groups = of("mamba_n_groups") or of("n_groups", 1)
        yield _STATE_BYTES * inner * state
        yield itemsize * (inner + 2 * groups * state) * (of("mamba_d_conv") or of("conv_kernel", 4))
    else:
        keys = of("linear_num_key_heads") or of("linear_num_heads") or config.num_attention_heads
        values = of("linear_num_value_heads") or keys
        own = of("linear_head_dim") or getattr(config, "head_dim", None) or 0
        key, value = of("linear_key_head_dim") or own, of("linear_value_head_dim") or own
        yield _STATE_BYTES * values * key * value
        yield itemsize * (2 * keys * key + values * value) * of("linear_conv_kernel_dim", 4)
