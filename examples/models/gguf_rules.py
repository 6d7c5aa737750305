"""The rules by which llama.cpp's converter (its ``conversion/``) writes a model's tensors and keys.

They start from the names that a checkpoint has, not from those of the network in memory, and take
llama.cpp's names from the package ``gguf``. Nothing here is shared with `moe.loading.gguf`, which
reads such files by a table of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

ARCHITECTURES = {
    "afmoe": "afmoe",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo2",
    "minimax_m2": "minimax-m2",
    "mistral4": "mistral4",
    "mixtral": "llama",
    "nemotron_h": "nemotron_h_moe",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "solar_open": "glm4moe",
    "step3p7": "step35",
}
"""transformers' names and llama.cpp's."""

AS_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "afmoe": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mup_enabled": True,
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "dots1": {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "gemma4_text": {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 2.0,
        "per_layer_config": {
            number: {"head_dim": 32, "num_key_value_heads": 1} for number in (1, 3)
        },
    },
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full"]},
    "granitemoehybrid": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
    },
    "kimi_linear": {"linear_head_dim": 16, "num_expert_group": 1, "topk_group": 1},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layers": None, "layer_types": None},
    "mimo_v2_flash": {
        "attention_value_scale": 0.5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    },
    "mistral4": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen3_5_moe_text": {"linear_num_value_heads": 4, "norm_topk_prob": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {"linear_num_value_heads": 4},
    "solar_open": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    },
    "step3p7": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_sliding_attention_heads": 6,
        "per_layer_config": {number: {"num_attention_heads": 6} for number in (1, 3)},
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits_shared": [0, 0, 0.3, 0],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
"""Configurations that llama.cpp can run, where `examples.models.tiny` has others; and some parts
that the released models have."""

Named = Iterator[tuple[str, Tensor]]
Rule = Callable[[Any, str, Tensor], Named]
"""What becomes of a checkpoint's tensor: names that llama.cpp's table knows, or its own."""


def gguf_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of a file, by their names in it; the text part's of a multimodal model."""
    config = _text_of(model.config)
    name = ARCHITECTURES[model.config.model_type]
    numbers = {own: number for number, own in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[name], config.num_hidden_layers)
    rule = RULES.get(name, _unchanged)
    found: dict[str, Tensor] = {}
    state = model.state_dict()
    if config.tie_word_embeddings:
        state = {name: value for name, value in state.items() if not name.startswith("lm_head")}
    for stored, value in _stacked(revert_weight_conversion(model, state)):
        for given, tensor in rule(config, _renamed(stored), value):
            own = given if given.startswith("blk.") else None
            own = own or table.get_name(given, try_suffixes=(".weight", ".bias"))
            assert own is not None, given
            found[own] = tensor
    if name == "gemma4":
        found["rope_freqs.weight"] = _standing(config)
    return found


def _standing(config: Any) -> Tensor:
    """Return what divides the frequencies of full layers: those that do not turn by 1e30."""
    number = config.layer_types.index("full_attention")
    pairs = config.per_layer_config[number].head_dim // 2
    turning = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * turning + [1e30] * (pairs - turning))


def _stacked(state: dict[str, Tensor]) -> Named:
    """Experts of a layer in one tensor for each projection; no parts that read images."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, value in state.items():
        if name.startswith(("vision_model.", "vit_large_projector.")):
            continue
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.(?:weight|bias))", name)
        if expert is None:
            yield name, value
        else:
            parts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = value
    for name, experts in parts.items():
        yield name, torch.stack([experts[number] for number in range(len(experts))])


def _renamed(name: str) -> str:
    """As the converter renames before it looks a name up."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = re.sub(r"expert_bias$", "expert_bias.bias", name).replace("dt_bias", "dt_proj.bias")
    merged = r"(?:backbone|model)(\.layers\.\d+)\.(?:mixer|feed_forward)\.experts\.(?=\w+_proj)"
    name = re.sub(merged, r"model\1.mlp.experts.", name)
    name = re.sub(r"model(\.layers\.\d+\.feed_forward\.experts\.w)", r"\1", name)
    name = name.removeprefix(".").replace("mixer.dt_proj.bias", "mixer.dt.bias")
    name = re.sub(r"router_bias$", "router_bias.bias", name)
    return re.sub(r"(sinks|sink_bias)$", r"\1.weight", name)


def _unchanged(_: Any, name: str, value: Tensor) -> Named:
    yield name, value


def _paired(config: Any, name: str, value: Tensor) -> Named:
    """Queries and keys in the order of pairs that turn together."""
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if re.search(rf"\.{part}_proj\.(weight|bias)$", name):
            halves = value.reshape(getattr(config, heads), 2, -1, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
    yield name, value


def _granite(config: Any, name: str, value: Tensor) -> Named:
    block = "blk." + "".join(re.findall(r"layers\.(\d+)\.", name))
    for merged, ending in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
        if name.endswith(f"{merged}.input_linear.weight"):
            gate, up = value.chunk(2, -2)
            yield f"{block}.ffn_gate_{ending}.weight", gate
            yield f"{block}.ffn_up_{ending}.weight", up
            return
    if "mamba" in name:
        yield from _mamba2(config.mamba_n_groups, name, value)
    else:
        yield from _paired(config, name, value)


def _mamba2(groups: int, name: str, value: Tensor) -> Named:
    if name.endswith("A_log"):
        value = -value.exp().reshape(-1, 1)
    elif name.endswith(".D"):
        value = value.reshape(-1, 1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        value = value.reshape(groups, -1)
    elif name.endswith("conv1d.weight"):
        value = value.squeeze()
    yield name, value


def _jamba(_: Any, name: str, value: Tensor) -> Named:
    value = value.squeeze() if name.endswith("conv1d.weight") else value
    yield name, -value.exp() if name.endswith("A_log") else value


def _latent(config: Any, name: str, value: Tensor) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield name, value
        return
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = value.view(config.num_attention_heads, sum(sizes), -1).split(sizes, 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _kimi(config: Any, name: str, value: Tensor) -> Named:
    if name.endswith("A_log"):
        value = -value.exp()
    elif "_conv1d" in name:
        value = value.reshape(1, len(value), 1, -1)
    # transformers writes dense layers under the name of those with experts
    name = re.sub(r"block_sparse_moe\.(?=\w+_proj\.)", "mlp.", name)
    yield from _latent(config, name, value)


def _qwen_linear(config: Any, name: str, value: Tensor) -> Named:
    if name.endswith("A_log"):
        value = -value.exp()
    elif "conv1d" in name:
        value = value.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if "in_proj_qkvz" not in name:
        yield name, value
        return
    block = "blk." + "".join(re.findall(r"layers\.(\d+)\.", name))
    keys, key = config.linear_num_key_heads, config.linear_key_head_dim
    own = config.linear_num_value_heads // keys * config.linear_value_head_dim
    q, k, v, z = value.view(keys, -1, value.shape[-1]).split([key, key, own, own], 1)
    yield f"{block}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield f"{block}.attn_gate.weight", z.flatten(0, 1)


def _qwen35(config: Any, name: str, value: Tensor) -> Named:
    """Value heads in tiles: the first of every key head, then the second, ..."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    before = 2 * keys * config.linear_key_head_dim

    def tiled(rows: Tensor) -> Tensor:
        heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        value = torch.cat([value[:before], tiled(value[before:])])
    elif re.search(r"in_proj_[zba]|A_log|linear_attn\.dt", name):
        value = tiled(value)
    elif "linear_attn.out_proj" in name:
        value = tiled(value.mT).mT
    yield from _qwen_linear(config, name, value)


def _gpt_oss(_: Any, name: str, value: Tensor) -> Named:
    """Experts are transposed, gate and up in turns."""
    stem = name.removesuffix("_bias")
    leaf = ".bias" if stem != name else ".weight"
    turned = value.mT if leaf == ".weight" and ".experts." in name else value
    if stem.endswith("gate_up_proj"):
        yield stem.replace("gate_up_proj", f"gate_proj{leaf}"), turned[:, 0::2]
        yield stem.replace("gate_up_proj", f"up_proj{leaf}"), turned[:, 1::2]
    elif ".experts." in name:
        yield f"{stem}{leaf}", turned
    else:
        yield name, value


def _gemma4(_: Any, name: str, value: Tensor) -> Named:
    block = "blk." + "".join(re.findall(r"layers\.(\d+)\.", name))
    if name.endswith("router.scale"):
        yield f"{block}.ffn_gate_inp.scale", value
    elif name.endswith("per_expert_scale"):
        yield f"{block}.ffn_down_exps.scale", value
    else:
        yield name + ".weight" * (".experts." in name or "layer_scalar" in name), value


def _llama4(_: Any, name: str, value: Tensor) -> Named:
    if name.endswith("gate_up_proj"):
        gate, up = value.mT.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", value.mT
    else:
        yield name, value


def _dbrx(config: Any, name: str, value: Tensor) -> Named:
    if "experts.mlp" in name:
        value = value.view(config.ffn_config.moe_num_experts, -1, value.shape[-1])
        yield f"{name}.weight", value.mT if name.endswith("w2") else value
    else:
        yield name, value


RULES: dict[str, Rule] = {
    "dbrx": _dbrx,
    "deepseek2": _latent,
    "gemma4": _gemma4,
    "glm-dsa": _latent,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite,
    "granitemoe": _granite,
    "jamba": _jamba,
    "kimi-linear": _kimi,
    "lfm2moe": lambda _, name, value: iter(
        [(name, value.squeeze(1) if "conv.conv" in name else value)]
    ),
    "llama": _paired,
    "llama4": _llama4,
    "mistral4": lambda config, name, value: _latent(
        config, name + ".weight" * name.endswith(("gate_up_proj", "down_proj")), value
    ),
    "nemotron_h_moe": lambda config, name, value: _mamba2(config.n_groups, name, value),
    "qwen35moe": _qwen35,
    "qwen3next": _qwen_linear,
    "step35": lambda _, name, value: iter([(name, value + name.endswith("norm.weight"))]),
}
"""By llama.cpp's name; the tensors of the others are written as they are."""

_FOUND_AS = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "vocab_size": ("vocab_size",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
}
"""Keys of a file, and what configurations call them; of several, the first that is there."""


def gguf_keys(config: Any) -> dict[str, Any]:
    """Return what llama.cpp must know of a model beside its tensors and its tokenizer."""
    name, config = ARCHITECTURES[config.model_type], _text_of(config)
    known = dict(_all_values(config))
    keys = {
        key: next((known[own] for own in names if known.get(own) is not None), None)
        for key, names in _FOUND_AS.items()
    }
    heads = known.get("num_key_value_heads") or keys["attention.head_count"]
    keys["attention.head_count_kv"] = heads
    head = known.get("head_dim") or config.hidden_size // config.num_attention_heads
    keys["attention.key_length"] = keys["attention.value_length"] = head
    rope = config.rope_parameters if getattr(config, "rope_parameters", None) else {}
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1))
        if rope["rope_type"] == "yarn":
            keys["rope.scaling.type"] = "yarn"
            keys["rope.scaling.factor"] = float(rope["factor"])
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    keys |= KEYS.get(name, lambda _: {})(config)
    return {key: value for key, value in keys.items() if value is not None}


def _text_of(config: Any) -> Any:
    """The text part, with what is said of layers at large."""
    config = copy.copy(config.get_text_config())
    config.allow_global_per_layer_attribute_access = True
    return config


def _all_values(config: Any) -> Iterator[tuple[str, Any]]:
    for names in _FOUND_AS.values():
        for name in names:
            if isinstance(value := getattr(config, name, None), (int, float)):
                yield name, value
    for name in ("num_key_value_heads", "head_dim"):
        yield name, getattr(config, name, None)


def _of_layers(config: Any, attention: tuple[str, ...] = ("attention", "full_attention")) -> Any:
    heads = config.num_key_value_heads
    return [heads if kind in attention else 0 for kind in config.layer_types]


def _latent_keys(config: Any) -> dict[str, Any]:
    rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    rope = getattr(config, "rope_parameters", None) or {}
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotary,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotary,
        "expert_weights_norm": config.norm_topk_prob,
    }
    if rope.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys


def _linear_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
        "attention.recurrent_layers": [k == "linear_attention" for k in config.layer_types],
    }


def _gemma_keys(config: Any) -> dict[str, Any]:
    layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full, sliding = (layers[slides.index(own)].head_dim for own in (False, True))
    return {
        "attention.head_count_kv": [own.num_key_value_heads for own in layers],
        "attention.key_length": full,
        "attention.key_length_swa": sliding,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.value_length": full,
        "attention.value_length_swa": sliding,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }


def _mimo_keys(config: Any) -> dict[str, Any]:
    """Three layers that draft are counted; the window is one less than transformers'."""
    slides = [kind == "sliding_attention" for kind in config.layer_types] + [True] * 3
    heads = config.num_key_value_heads
    return {
        "block_count": config.num_hidden_layers + 3,
        "nextn_predict_layers": 3,
        "attention.head_count_kv": [2 * heads if own else heads for own in slides],
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": slides,
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "expert_gating_func": 2,
    }


def _step_keys(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    heads = {True: config.num_sliding_attention_heads, False: config.num_attention_heads}
    return {
        "attention.head_count": [heads[own] for own in slides],
        "attention.head_count_kv": [config.num_key_value_heads] * len(slides),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "expert_gating_func": 2,
        "expert_shared_feed_forward_length": config.share_expert_dim,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_router_scaling_factor,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "moe_every_n_layers": 1,
        "rope.dimension_count": config.head_dim,
        "swiglu_clamp_exp": [float(limit or 0) for limit in config.swiglu_limits],
        "swiglu_clamp_shexp": [float(limit or 0) for limit in config.swiglu_limits_shared],
    }


def _inner(config: Any) -> int:
    return int(config.mamba_expand * config.hidden_size)


KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "afmoe": lambda c: {
        "attention.sliding_window": c.sliding_window,
        "expert_weights_norm": True,
    },
    "dbrx": lambda c: {
        "attention.head_count_kv": c.attn_config.kv_n_heads,
        "attention.clamp_kqv": c.attn_config.clip_qkv,
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": c.ffn_config.ffn_hidden_size,
        "expert_count": c.ffn_config.moe_num_experts,
        "expert_used_count": c.ffn_config.moe_top_k,
        "context_length": c.max_seq_len,
    },
    "deepseek2": _latent_keys,
    "glm-dsa": lambda c: (
        _latent_keys(c)
        | {
            "attention.indexer.head_count": c.index_n_heads,
            "attention.indexer.key_length": c.index_head_dim,
            "attention.indexer.top_k": c.index_topk,
        }
    ),
    "gemma4": _gemma_keys,
    "dots1": lambda c: {"expert_weights_norm": c.norm_topk_prob},
    "ernie4_5-moe": lambda c: {
        "interleave_moe_layer_step": c.moe_layer_interval,
        "leading_dense_block_count": c.moe_layer_start_index,
    },
    "exaone-moe": lambda c: {
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [k == "sliding_attention" for k in c.layer_types],
        "expert_gating_func": 2,
        "expert_weights_norm": c.norm_topk_prob,
        "nextn_predict_layers": 0,
        "rope.scaling.type": "none",
    },
    "glm4moe": lambda c: {
        "expert_gating_func": 2,
        "expert_weights_norm": c.norm_topk_prob,
    },
    "gpt-oss": lambda c: {
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.intermediate_size,
    },
    "granitehybrid": lambda c: {
        "attention.head_count_kv": _of_layers(c),
        "expert_shared_feed_forward_length": c.shared_intermediate_size,
        "ssm.inner_size": _inner(c),
        "rope.scaling.finetuned": False,
    },
    "granitemoe": lambda c: {
        "expert_shared_feed_forward_length": getattr(c, "shared_intermediate_size", None),
    },
    "hunyuan-moe": lambda c: {
        "expert_feed_forward_length": c.intermediate_size,
        "expert_shared_feed_forward_length": c.intermediate_size,
        "expert_shared_count": 1,
    },
    "jamba": lambda c: {
        "attention.head_count_kv": _of_layers(c),
        "ssm.inner_size": _inner(c),
        "ssm.time_step_rank": c.mamba_dt_rank,
    },
    "kimi-linear": lambda c: (
        _latent_keys(c)
        | {
            "attention.head_count_kv": [int(k == "full_attention") for k in c.layer_types],
            "expert_gating_func": 2,
            "expert_weights_norm": None,
            "kda.head_dim": c.linear_head_dim,
            "leading_dense_block_count": 1,
        }
    ),
    "lfm2moe": lambda c: {
        "attention.head_count_kv": _of_layers(c),
        "expert_gating_func": 2,
        "expert_weights_scale": None,
    },
    "llama": lambda c: {"attention.sliding_window": getattr(c, "sliding_window", None)},
    "llama4": lambda c: {
        "expert_feed_forward_length": c.intermediate_size,
        "feed_forward_length": c.intermediate_size_mlp,
        "interleave_moe_layer_step": c.interleave_moe_layer_step,
    },
    "mimo2": _mimo_keys,
    "mistral4": _latent_keys,
    "minimax-m2": lambda c: {
        "expert_feed_forward_length": c.intermediate_size,
        "expert_gating_func": 2,
    },
    "nemotron_h_moe": lambda c: {
        "attention.head_count_kv": _of_layers(c),
        "feed_forward_length": [c.moe_intermediate_size * (k == "moe") for k in c.layer_types],
        "ssm.inner_size": c.mamba_num_heads * c.mamba_head_dim,
        "expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size,
        "expert_weights_norm": c.norm_topk_prob,
        "rope.dimension_count": 8,
        "rope.scaling.finetuned": False,
    },
    "phimoe": lambda c: {"attention.sliding_window": c.sliding_window or 0},
    "qwen2moe": lambda c: {
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    },
    "qwen35moe": lambda c: _linear_keys(c) | {"rope.dimension_sections": [11, 11, 10, 0]},
    "qwen3next": _linear_keys,
    "step35": _step_keys,
}
"""By llama.cpp's name: keys that others do not have, or have otherwise."""
