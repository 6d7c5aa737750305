"""The MoE architectures that GGUF files may have: what llama.cpp and transformers call things.

One row an architecture. Names of tensors are llama.cpp's (``gguf-py/gguf/constants.py``), without
``blk.N.`` and without ``.weight`` or ``.bias``; the tests hold them to the package ``gguf``. Keys
are those of a file's header without the architecture's name. What llama.cpp's ``src/models`` does
without a key is written down here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experts.files import HeaderError
from moe.loading.gguf.layouts import (
    DECAY,
    KEY_PAIRS,
    NORM_OF_ONE_MORE,
    QUERY_PAIRS,
    TILED_COLUMNS,
    TILED_DECAY,
    TILED_HEADS,
    TensorLayout,
    grouped_gates,
    grouped_qkv,
    latent_keys,
    latent_values,
    nth,
)

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""llama.cpp's numbers of the function over the router's scores."""

Derived = Callable[[dict[str, Any], Sequence[frozenset[str]]], dict[str, Any]]
"""Parts of a configuration by the others, and by the names of tensors of each layer; raises
`HeaderError` where what they follow from is missing."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The differences between llama.cpp and transformers in one architecture.

    Attributes:
        model_type: transformers' name.
        text: its name of the text part, where only a multimodal class has that.
        keys: what it calls keys of a file, beyond `KEYS`.
        lists: keys that state something of each layer.
        unused: keys that tell nothing here, beyond `moe.loading.gguf.config.SHOWN`.
        sizes: what it calls the number of experts and their width, and others that tensors show.
        fixed: what llama.cpp does without the file saying so.
        shown: parts of the configuration that say whether there is a tensor of a name.
        by_layer: parts that say of each layer the kind of the first tensor that it has.
        derived: parts that follow from the others.
        gating: the function over the router's scores.
        normalised: whether weights of the chosen experts are made to sum to 1; None: a key says it.
        rotary: parts of `rope_parameters`, unless keys say otherwise.
        yarn: likewise, where positions are scaled by YaRN.
        turned: kinds of layers whose `rope_parameters` stand apart, and how much of
            ``rope.dimension_count`` they turn.
        dense_first: what it calls the number of layers before the first with experts.
        turns: it turns queries and keys by position.
        names: parameters of a layer that it calls otherwise than `NAMES`; of the whole model, too.
        layers: what its layers are called.
        layouts: tensors that are laid out otherwise.
    """

    model_type: str
    text: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    by_layer: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    derived: Derived = lambda config, layers: {}
    gating: int = SOFTMAX
    normalised: bool | None = True
    rotary: Mapping[str, Any] = field(default_factory=dict)
    yarn: Mapping[str, Any] = field(default_factory=dict)
    turned: Mapping[str, float] = field(default_factory=dict)
    dense_first: str = ""
    turns: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)


KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
"""Keys that every file must state, and what most architectures call them."""

DEFAULTS: Mapping[str, Any] = {
    "attention.clamp_kqv": None,
    "attention.key_length": None,
    "attention.key_length_mla": None,
    "attention.q_lora_rank": None,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": None,
    "attention.temperature_scale": 0.1,  # the converter leaves Mistral 4's out
    "attention.value_length": None,
    "attention.value_length_mla": None,
    "attention.value_scale": None,
    "embedding_length_per_layer_input": 0,
    "embedding_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": None,
    "interleave_moe_layer_step": 1,
    "logit_scale": 1.0,
    "moe_latent_size": None,
    "residual_scale": 1.0,
    "rope.scaling.finetuned": True,
    "swiglu_clamp_exp": None,
    "swiglu_clamp_shexp": None,
}
"""Keys that need not be there, and what llama.cpp takes them for then."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Names of a tensor's parameter in most architectures, without ``.weight`` or ``.bias``."""

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
"""Tensors of all experts of a layer. Where they go, the network's experts say themselves."""


def _moved(block: str, **parts: str) -> dict[str, str]:
    return {name: f"{block}.{path}" for name, path in parts.items()}


_SHARED_EXPERT = _moved(
    "mlp",
    ffn_gate_shexp="shared_expert.gate_proj",
    ffn_up_shexp="shared_expert.up_proj",
    ffn_down_shexp="shared_expert.down_proj",
    ffn_gate_inp_shexp="shared_expert_gate",
)
_QWEN = {"experts": "num_experts", "width": "moe_intermediate_size"}
_SHARED_WIDTH = {"ffn_down_shexp": "shared_expert_intermediate_size"}
_DEEPSEEK = {"experts": "n_routed_experts", "width": "moe_intermediate_size"}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_ROUTED = {"expert_weights_scale": "routed_scaling_factor", **_GROUPS}
_SHARED_COUNT = {"expert_shared_count": "n_shared_experts"}
_PAIRS = {"attn_q": QUERY_PAIRS, "attn_k": KEY_PAIRS}


def _qwen_linear(layouts: Mapping[str, TensorLayout], **names: str) -> dict[str, Any]:
    """Layers of gated delta rule beside attention, as Qwen3-Next and Qwen3.5 have them."""
    norms = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
    own = {
        "ssm_a": "A_log",
        "ssm_dt": "dt_bias",
        "ssm_conv1d": "conv1d",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {
        "sizes": _QWEN | _SHARED_WIDTH,
        "fixed": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "keys": {
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
            "ssm.inner_size": "_inner",
        },
        "unused": ("attention.recurrent_layers", "full_attention_interval"),
        "by_layer": {
            "layer_types": {"ssm_out": "linear_attention", "attn_q": "full_attention"},
        },
        "derived": lambda config, _: {
            "linear_value_head_dim": config["_inner"] // config["linear_num_value_heads"]
        },
        "names": _SHARED_EXPERT
        | {"post_attention_norm": "post_attention_layernorm"}
        | {name: f"linear_attn.{path}" for name, path in (own | names).items()},
        "layouts": dict.fromkeys(norms, NORM_OF_ONE_MORE) | {"ssm_a": DECAY, **layouts},
    }


def _mamba(**names: str) -> dict[str, str]:
    common = {
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_conv1d": "conv1d",
        "ssm_in": "in_proj",
        "ssm_out": "out_proj",
    }
    return common | names


_MAMBA2 = _mamba(ssm_dt="dt_bias", ssm_norm="norm")


def _latent_sizes(config: dict[str, Any], _: Sequence[frozenset[str]]) -> dict[str, Any]:
    """Files before the halves of latent attention were split state a head's sizes elsewhere."""
    rotary = config["qk_rope_head_dim"]
    key, value = config["_key_mla"] or config["_key"], config["_value_mla"] or config["_value"]
    if key is None or value is None:
        raise HeaderError("does not state attention.key_length and attention.value_length")
    return {
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotary,
    }


_LATENT: dict[str, Any] = {
    "keys": {
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length": "_key",
        "attention.value_length": "_value",
        "attention.key_length_mla": "_key_mla",
        "attention.value_length_mla": "_value_mla",
        "rope.dimension_count": "qk_rope_head_dim",
        **_ROUTED,
        **_SHARED_COUNT,
    },
    "sizes": _DEEPSEEK,
    "dense_first": "first_k_dense_replace",
    "derived": _latent_sizes,
    "names": {"attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj"},
    "layouts": {
        "attn_k_b": TensorLayout(parts=latent_keys),
        "attn_v_b": TensorLayout(parts=latent_values),
    },
}


def _kimi(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return _latent_sizes(config, layers) | {"linear_num_heads": heads}


def _mistral(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    sizes = _latent_sizes(config, layers)
    head = sizes["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    turned = {"partial_rotary_factor": config["qk_rope_head_dim"] / head}
    scaled = {"llama_4_scaling_beta": config["_temperature"]}
    return sizes | {
        "head_dim": head,
        "rope_parameters": config["rope_parameters"] | turned | scaled,
    }


def _greedy(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    grouped = config["n_group"] > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _latent_sizes(config, layers) | {"topk_method": method}


def _periods(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    """Jamba's layers are told by where the first of a kind is, and how far the next."""
    told: dict[str, Any] = {"mamba_expand": config["_inner"] // config["hidden_size"]}
    for kind, tensor in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        places = [number for number, names in enumerate(layers) if tensor in names]
        told[f"{kind}_layer_offset"] = places[0] if places else len(layers)
        told[f"{kind}_layer_period"] = places[1] - places[0] if places[1:] else len(layers)
    return told


def _mamba2_sizes(config: dict[str, Any], _: Sequence[frozenset[str]]) -> dict[str, Any]:
    return {
        "mamba_expand": config["_inner"] // config["hidden_size"],
        "mamba_d_head": config["_inner"] // config["mamba_n_heads"],
        "position_embedding_type": "rope" if config["_rotated"] else None,
    }


def _dbrx(config: dict[str, Any], _: Sequence[frozenset[str]]) -> dict[str, Any]:
    sizes = ("ffn_hidden_size", "moe_num_experts", "moe_top_k")
    theta = config["rope_parameters"]["rope_theta"]
    attention = {"kv_n_heads": config["_kv_heads"], "clip_qkv": config["_clip"]}
    return {
        "attn_config": attention | {"rope_theta": theta},
        "ffn_config": {"hidden_size": config["d_model"]} | {name: config[name] for name in sizes},
    }


def _llama4_layers(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    found = [number for number, names in enumerate(layers) if "ffn_gate_inp" in names]
    # llama.cpp leaves the norm of queries and keys out in Maverick, which it knows by this number.
    return {"moe_layers": found, "use_qk_norm": config["num_local_experts"] != 128}


def _sliding_layers(config: dict[str, Any], _: Sequence[frozenset[str]]) -> dict[str, Any]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[bool(slides)] for slides in config["_slides"]]}


def _of_kind(config: dict[str, Any], part: str, slides: bool) -> int:
    """Return what a list says of the first full layer, or of the first with a window; 0: no such
    layer."""
    found = zip(config[part], config["_slides"], strict=True)
    return next((value for value, own in found if bool(own) == slides), 0)


def _gemma(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    full, sliding = (_of_kind(config, "_kv_heads", slides) for slides in (False, True))
    first, last = config["_dense"][0], config["_dense"][-1]
    return _sliding_layers(config, layers) | {
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "global_head_dim": config["head_dim"],
        "head_dim": config["_sliding_head"],
        "attention_k_eq_v": any("attn_k" in own and "attn_v" not in own for own in layers),
        "intermediate_size": first,
        "use_double_wide_mlp": first != last,
        "vocab_size_per_layer_input": config["vocab_size"],
    }


def _mimo(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    full = _of_kind(config, "_kv_heads", slides=False)
    return _sliding_layers(config, layers) | {
        "num_key_value_heads": full or _of_kind(config, "_kv_heads", slides=True) // 2,
        # The window leaves the token itself out, as the converter takes it from the checkpoint.
        "sliding_window": config["_window"] + 1,
    }


def _step(config: dict[str, Any], layers: Sequence[frozenset[str]]) -> dict[str, Any]:
    full, sliding = (_of_kind(config, "_heads", slides) for slides in (False, True))
    return _sliding_layers(config, layers) | {
        "num_attention_heads": full or sliding,
        "num_sliding_attention_heads": sliding or full,
    }


_GRANITE: dict[str, Any] = {
    "keys": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "sizes": {"experts": "num_local_experts", "width": "intermediate_size"}
    | {"ffn_down_shexp": "shared_intermediate_size"},
    "fixed": {"shared_intermediate_size": 0},
    "names": {
        "ffn_gate_inp": "block_sparse_moe.router",
        "ffn_gate_shexp": "shared_mlp.input_linear",
        "ffn_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    "layouts": {
        **_PAIRS,
        "ffn_gate_shexp": nth(0),
        "ffn_up_shexp": nth(1),
    },
}
_DENSE_OR_SPARSE = {"mlp_layer_types": {"ffn_gate_inp": "sparse", "ffn_gate": "dense"}}

_QWEN3_MOE = Architecture(model_type="qwen3_moe", sizes=_QWEN, fixed={"norm_topk_prob": True})
_DEEPSEEK_V3 = Architecture(model_type="deepseek_v3", gating=SIGMOID, normalised=None, **_LATENT)
ARCHITECTURES: Mapping[str, Sequence[Architecture]] = {
    "afmoe": [
        Architecture(
            model_type="afmoe",
            keys={
                "attention.sliding_window": "sliding_window",
                "expert_shared_count": "num_shared_experts",
                "expert_weights_scale": "route_scale",
            },
            sizes=_QWEN,
            fixed={"mup_enabled": True, "global_attn_every_n_layers": 4},
            dense_first="num_dense_layers",
            gating=SIGMOID,
            names={
                "attn_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b": "mlp.expert_bias",
            },
        )
    ],
    "dbrx": [
        Architecture(
            model_type="dbrx",
            keys={
                "context_length": "max_seq_len",
                "embedding_length": "d_model",
                "attention.head_count": "n_heads",
                "block_count": "n_layers",
                "attention.head_count_kv": "_kv_heads",
                "expert_used_count": "moe_top_k",
                "attention.clamp_kqv": "_clip",
                "attention.layer_norm_rms_epsilon": "_eps",
            },
            sizes={"experts": "moe_num_experts", "width": "ffn_hidden_size"},
            derived=_dbrx,
            layers="transformer.blocks",
            names={
                "token_embd": "transformer.wte",
                "output_norm": "transformer.norm_f",
                "attn_norm": "norm_attn_norm.norm_1",
                "attn_qkv": "norm_attn_norm.attn.Wqkv",
                "attn_output": "norm_attn_norm.attn.out_proj",
                "attn_output_norm": "norm_attn_norm.norm_2",
                "ffn_gate_inp": "ffn.router.layer",
            },
        )
    ],
    "deepseek2": [
        _DEEPSEEK_V3,
        Architecture(
            model_type="deepseek_v2",
            normalised=False,
            **{**_LATENT, "derived": _greedy},
        ),
    ],
    "dots1": [
        Architecture(
            model_type="dots1",
            keys={**_ROUTED, **_SHARED_COUNT},
            sizes=_DEEPSEEK,
            fixed={"sliding_window": None},
            dense_first="first_k_dense_replace",
            gating=SIGMOID,
            normalised=None,
        )
    ],
    "ernie4_5-moe": [
        Architecture(
            model_type="ernie4_5_moe",
            keys={
                "expert_used_count": "moe_k",
                "expert_shared_count": "moe_num_shared_experts",
                "interleave_moe_layer_step": "moe_layer_interval",
            },
            sizes={"experts": "moe_num_experts", "width": "moe_intermediate_size"},
            dense_first="moe_layer_start_index",
            names={"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
        )
    ],
    "exaone-moe": [
        Architecture(
            model_type="exaone_moe",
            keys={
                **_ROUTED,
                "attention.sliding_window": "sliding_window",
                "attention.sliding_window_pattern": "_slides",
                "expert_shared_count": "num_shared_experts",
            },
            lists=("attention.sliding_window_pattern",),
            sizes=_QWEN,
            by_layer=_DENSE_OR_SPARSE,
            derived=_sliding_layers,
            gating=SIGMOID,
            normalised=None,
        )
    ],
    "gemma4": [
        Architecture(
            model_type="gemma4_text",
            keys={
                "attention.head_count_kv": "_kv_heads",
                "attention.key_length_swa": "_sliding_head",
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "attention.sliding_window": "sliding_window",
                "attention.sliding_window_pattern": "_slides",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "expert_used_count": "top_k_experts",
                "feed_forward_length": "_dense",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            lists=(
                "attention.head_count_kv",
                "attention.sliding_window_pattern",
                "feed_forward_length",
            ),
            unused=("attention.value_length_swa",),
            sizes=_QWEN,
            fixed={"enable_moe_block": True},
            derived=_gemma,
            turned={"full_attention": 1, "sliding_attention": 1},
            names={
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm": "post_feedforward_layernorm",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "layer_output_scale": "layer_scalar",
            },
        )
    ],
    "glm4moe": [
        Architecture(
            model_type="glm4_moe",
            keys={**_ROUTED, **_SHARED_COUNT},
            sizes=_DEEPSEEK,
            shown={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
            rotary={"partial_rotary_factor": 1.0},
            dense_first="first_k_dense_replace",
            gating=SIGMOID,
            normalised=None,
            names={"post_attention_norm": "post_attention_layernorm"},
        )
    ],
    "glm-dsa": [
        Architecture(
            model_type="glm_moe_dsa",
            **_LATENT
            | {
                "keys": _LATENT["keys"]
                | {
                    "attention.indexer.head_count": "index_n_heads",
                    "attention.indexer.key_length": "index_head_dim",
                    "attention.indexer.top_k": "index_topk",
                },
                "names": _LATENT["names"]
                | _moved(
                    "self_attn.indexer",
                    **{
                        "indexer.k_norm": "k_norm",
                        "indexer.proj": "weights_proj",
                        "indexer.attn_k": "wk",
                        "indexer.attn_q_b": "wq_b",
                    },
                ),
            },
            unused=("attention.indexer.types",),
            by_layer=_DENSE_OR_SPARSE
            | {"indexer_types": {"indexer.proj": "full", "attn_norm": "shared"}},
            gating=SIGMOID,
            normalised=None,
        )
    ],
    "gpt-oss": [
        Architecture(
            model_type="gpt_oss",
            keys={"attention.sliding_window": "sliding_window"},
            sizes={"experts": "num_local_experts", "width": "intermediate_size"},
            gating=SOFTMAX_OF_CHOSEN,
            yarn={"truncate": False},
            names={
                "attn_sinks": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
            },
        )
    ],
    "granitehybrid": [
        Architecture(
            model_type="granitemoehybrid",
            **_GRANITE
            | {
                "keys": {
                    **_GRANITE["keys"],
                    "ssm.conv_kernel": "mamba_d_conv",
                    "ssm.state_size": "mamba_d_state",
                    "ssm.group_count": "mamba_n_groups",
                    "ssm.time_step_rank": "mamba_n_heads",
                    "ssm.inner_size": "_inner",
                    "rope.scaling.finetuned": "_rotated",
                },
                "by_layer": {"layer_types": {"ssm_in": "mamba", "attn_q": "attention"}},
                "shown": {"mamba_conv_bias": "ssm_conv1d.bias"},
                "derived": _mamba2_sizes,
                "names": _GRANITE["names"] | _moved("mamba", **_MAMBA2),
                "layouts": _GRANITE["layouts"] | {"ssm_a": DECAY},
            },
        )
    ],
    "granitemoe": [Architecture(model_type="granitemoeshared", **_GRANITE)],
    "hunyuan-moe": [
        Architecture(
            model_type="hunyuan_v1_moe",
            keys={"expert_used_count": "moe_topk"},
            sizes={"experts": "num_experts", "width": "intermediate_size"},
            names={
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
                "ffn_gate_inp": "mlp.gate.wg",
                **_moved(
                    "mlp.shared_mlp",
                    ffn_gate_shexp="gate_proj",
                    ffn_up_shexp="up_proj",
                    ffn_down_shexp="down_proj",
                ),
            },
        )
    ],
    "jamba": [
        Architecture(
            model_type="jamba",
            keys={
                "ssm.conv_kernel": "mamba_d_conv",
                "ssm.state_size": "mamba_d_state",
                "ssm.time_step_rank": "mamba_dt_rank",
                "ssm.inner_size": "_inner",
            },
            sizes={"experts": "num_experts", "width": "intermediate_size"},
            derived=_periods,
            normalised=False,
            turns=False,
            names={
                "output_norm": "model.final_layernorm",
                "ffn_norm": "pre_ff_layernorm",
                **_moved(
                    "mamba",
                    **_mamba(
                        ssm_x="x_proj",
                        ssm_dt="dt_proj",
                        ssm_dt_norm="dt_layernorm",
                        ssm_b_norm="b_layernorm",
                        ssm_c_norm="c_layernorm",
                    ),
                ),
                **_moved(
                    "feed_forward",
                    ffn_gate="gate_proj",
                    ffn_up="up_proj",
                    ffn_down="down_proj",
                    ffn_gate_inp="router",
                ),
            },
            layouts={"ssm_a": DECAY},
        )
    ],
    "kimi-linear": [
        Architecture(
            model_type="kimi_linear",
            **_LATENT
            | {
                "keys": _LATENT["keys"]
                | {
                    "expert_shared_count": "num_shared_experts",
                    "kda.head_dim": "linear_head_dim",
                    "ssm.conv_kernel": "linear_conv_kernel_dim",
                },
                "sizes": _QWEN,
                "derived": _kimi,
                "names": _LATENT["names"]
                | _moved(
                    "self_attn",
                    ssm_conv1d_q="conv1d",
                    ssm_conv1d_k="conv1d",
                    ssm_conv1d_v="conv1d",
                    ssm_f_a="forget_gate.f_a_proj",
                    ssm_f_b="forget_gate.f_b_proj",
                    ssm_dt="forget_gate.dt_bias",
                    ssm_a="forget_gate.A_log",
                    ssm_beta="b_proj",
                    ssm_g_a="g_a_proj",
                    ssm_g_b="g_b_proj",
                    ssm_norm="o_norm",
                ),
                "layouts": _LATENT["layouts"]
                | {
                    "ssm_a": DECAY,
                    "ssm_conv1d_q": nth(0),
                    "ssm_conv1d_k": nth(1),
                    "ssm_conv1d_v": nth(2),
                },
            },
            by_layer=_DENSE_OR_SPARSE
            | {
                "layer_types": {
                    "ssm_conv1d_q": "linear_attention",
                    "attn_kv_a_mqa": "full_attention",
                },
            },
            gating=SIGMOID,
            turns=False,
        )
    ],
    "lfm2moe": [
        Architecture(
            model_type="lfm2_moe",
            keys={
                "attention.layer_norm_rms_epsilon": "norm_eps",
                "shortconv.l_cache": "conv_L_cache",
            },
            sizes=_QWEN,
            fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
            dense_first="num_dense_layers",
            shown={"use_expert_bias": "exp_probs_b.bias"},
            by_layer={"layer_types": {"attn_q": "full_attention", "shortconv.conv": "conv"}},
            gating=SIGMOID,
            names={
                "token_embd_norm": "model.embedding_norm",
                "attn_norm": "operator_norm",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "ffn_norm": "ffn_norm",
                **_moved(
                    "conv",
                    **{
                        "shortconv.conv": "conv",
                        "shortconv.in_proj": "in_proj",
                        "shortconv.out_proj": "out_proj",
                    },
                ),
                **_moved(
                    "feed_forward",
                    ffn_gate="w1",
                    ffn_up="w3",
                    ffn_down="w2",
                    ffn_gate_inp="gate",
                    exp_probs_b="expert_bias",
                ),
            },
        )
    ],
    "llama": [
        Architecture(
            model_type="mixtral",
            keys={"attention.sliding_window": "sliding_window"},
            sizes={"experts": "num_local_experts", "width": "intermediate_size"},
            layouts=_PAIRS,
        )
    ],
    "llama4": [
        Architecture(
            model_type="llama4_text",
            keys={"feed_forward_length": "intermediate_size_mlp"},
            unused=("interleave_moe_layer_step",),
            sizes={"experts": "num_local_experts", "width": "intermediate_size"},
            fixed={
                "attention_chunk_size": 8192,
                "attn_temperature_tuning": True,
                "floor_scale": 8192,
                "attn_scale": 0.1,
                "no_rope_layer_interval": 4,
            },
            derived=_llama4_layers,
            gating=SIGMOID,
            normalised=False,
            names=_moved(
                "feed_forward",
                ffn_gate="gate_proj",
                ffn_up="up_proj",
                ffn_down="down_proj",
                ffn_gate_inp="router",
                ffn_gate_shexp="shared_expert.gate_proj",
                ffn_up_shexp="shared_expert.up_proj",
                ffn_down_shexp="shared_expert.down_proj",
            ),
        )
    ],
    "mimo2": [
        Architecture(
            model_type="mimo_v2_flash",
            keys={
                **_GROUPS,
                "attention.head_count_kv": "_kv_heads",
                "attention.sliding_window": "_window",
                "attention.sliding_window_pattern": "_slides",
                "attention.value_length": "v_head_dim",
                "attention.value_scale": "attention_value_scale",
            },
            lists=("attention.head_count_kv", "attention.sliding_window_pattern"),
            sizes=_DEEPSEEK,
            by_layer=_DENSE_OR_SPARSE,
            derived=_mimo,
            gating=SIGMOID,
            turned={"full_attention": 1, "sliding_attention": 1},
            names={"attn_sinks": "self_attn.sinks"},
        )
    ],
    "minimax-m2": [
        Architecture(
            model_type="minimax_m2",
            sizes={"experts": "num_local_experts", "width": "intermediate_size"},
            gating=SIGMOID,
            names={"exp_probs_b": "mlp.e_score_correction_bias"},
        )
    ],
    "mistral4": [
        Architecture(
            model_type="mistral4",
            normalised=None,
            **_LATENT
            | {
                "keys": _LATENT["keys"] | {"attention.temperature_scale": "_temperature"},
                "derived": _mistral,
            },
        )
    ],
    "nemotron_h_moe": [
        Architecture(
            model_type="nemotron_h",
            keys={
                "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
                "ssm.conv_kernel": "conv_kernel",
                "ssm.state_size": "ssm_state_size",
                "ssm.group_count": "n_groups",
                "ssm.time_step_rank": "mamba_num_heads",
                "ssm.inner_size": "_inner",
                "moe_latent_size": "moe_latent_size",
                "block_count": "_layers",
                **_ROUTED,
                **_SHARED_COUNT,
            },
            unused=("rope.scaling.finetuned",),
            sizes=_DEEPSEEK
            | {"ffn_down_shexp": "moe_shared_expert_intermediate_size"}
            | {"ffn_down": "intermediate_size"},
            shown={"use_conv_bias": "ssm_conv1d.bias"},
            by_layer={
                "layers_block_type": {
                    "ssm_in": "mamba",
                    "attn_q": "attention",
                    "ffn_gate_inp": "moe",
                    "ffn_up": "mlp",
                },
            },
            derived=lambda config, _: {
                "mamba_head_dim": config["_inner"] // config["mamba_num_heads"]
            },
            gating=SIGMOID,
            normalised=None,
            turns=False,
            names={
                "token_embd": "model.embeddings",
                "output_norm": "model.norm_f",
                "attn_norm": "norm",
                **_moved(
                    "mixer",
                    attn_q="q_proj",
                    attn_k="k_proj",
                    attn_v="v_proj",
                    attn_output="o_proj",
                    ffn_up="up_proj",
                    ffn_down="down_proj",
                    ffn_gate_inp="gate",
                    exp_probs_b="gate.e_score_correction_bias",
                    ffn_up_shexp="shared_experts.up_proj",
                    ffn_down_shexp="shared_experts.down_proj",
                    ffn_latent_down="fc1_latent_proj",
                    ffn_latent_up="fc2_latent_proj",
                    **_MAMBA2,
                ),
            },
            layouts={"ssm_a": DECAY},
        )
    ],
    "olmoe": [
        Architecture(
            model_type="olmoe",
            sizes={"experts": "num_experts", "width": "intermediate_size"},
            fixed={"norm_topk_prob": False},
            normalised=False,
        )
    ],
    "phimoe": [
        Architecture(
            model_type="phimoe",
            rotary={"short_mscale": 1.0, "long_mscale": 1.0},
            keys={"attention.sliding_window": "sliding_window"},
            sizes={"experts": "num_local_experts", "width": "intermediate_size"},
            shown={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"},
            names={"ffn_gate_inp": "mlp.router"},
        )
    ],
    "qwen2moe": [
        Architecture(
            model_type="qwen2_moe",
            sizes=_QWEN | _SHARED_WIDTH,
            fixed={"norm_topk_prob": False},
            normalised=False,
            names=_SHARED_EXPERT,
        )
    ],
    "qwen35moe": [
        Architecture(
            model_type="qwen3_5_moe_text",
            rotary={"mrope_interleaved": True},
            **_qwen_linear(
                {
                    "ssm_a": TILED_DECAY,
                    "ssm_out": TILED_COLUMNS,
                    **dict.fromkeys(
                        ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_conv1d"),
                        TILED_HEADS,
                    ),
                },
                attn_qkv="in_proj_qkv",
                attn_gate="in_proj_z",
                ssm_alpha="in_proj_a",
                ssm_beta="in_proj_b",
            ),
        )
    ],
    "qwen3moe": [_QWEN3_MOE],
    "qwen3next": [
        Architecture(
            model_type="qwen3_next",
            **_qwen_linear(
                {
                    "attn_qkv": TensorLayout(parts=grouped_qkv),
                    "attn_gate": TensorLayout(parts=grouped_gates),
                },
                attn_qkv="in_proj_qkvz",
                attn_gate="in_proj_qkvz",
                ssm_in="in_proj_qkvz",
                ssm_ba="in_proj_ba",
            ),
        )
    ],
    "qwen3vlmoe": [
        # Text alone is at one position in all sections, so it turns as Qwen3-MoE does.
        replace(_QWEN3_MOE, unused=("rope.dimension_sections", "n_deepstack_layers"))
    ],
    "step35": [
        Architecture(
            model_type="step3p7",
            text="step3p5",
            keys={
                "attention.head_count": "_heads",
                "attention.sliding_window": "sliding_window",
                "attention.sliding_window_pattern": "_slides",
                "expert_weights_scale": "moe_router_scaling_factor",
                "swiglu_clamp_exp": "swiglu_limits",
                "swiglu_clamp_shexp": "swiglu_limits_shared",
            },
            lists=(
                "attention.head_count",
                "attention.sliding_window_pattern",
                "swiglu_clamp_exp",
                "swiglu_clamp_shexp",
            ),
            unused=("moe_every_n_layers",),
            # transformers reads the number of heads when it validates divided frequencies.
            fixed={"allow_global_per_layer_attribute_access": True},
            sizes=_DEEPSEEK | {"ffn_down_shexp": "share_expert_dim"},
            by_layer=_DENSE_OR_SPARSE,
            derived=_step,
            gating=SIGMOID,
            turned={"full_attention": 0.5, "sliding_attention": 1},
            names={
                "attn_gate": "self_attn.g_proj",
                "token_embd": "model.language_model.embed_tokens",
                "output_norm": "model.language_model.norm",
            },
            layers="model.language_model.layers",
            layouts=dict.fromkeys(
                ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm", "output_norm"),
                NORM_OF_ONE_MORE,
            ),
        )
    ],
}
"""By llama.cpp's name. Where there are several, the first whose gating a file has."""
