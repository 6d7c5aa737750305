"""Tiny models whose checkpoints bring a multi-token-prediction layer, and transformers' own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from examples.models.tiny import tiny_model


def with_mtp(kind: str, folder: Path) -> tuple[Any, Any]:
    """Save a tiny model with such a layer; returns transformers' model and its `MtpModel`."""
    network = tiny_model(kind)
    network.config.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):  # as the last of the model's layers
        if (kinds := getattr(network.config, name, None)) is not None:
            setattr(network.config, f"mtp_{name}", kinds[-1:])
    network.save_pretrained(folder)
    layer = MtpModel(network, 1).eval()
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith("layers."):
            if "norm" in name:
                nn.init.normal_(tensor, mean=1.0, std=0.2)
            elif tensor.is_floating_point():
                nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
    count = network.config.num_hidden_layers
    tensors = as_checkpoint(layer.state_dict(), f"model.layers.{count}.")
    save_file(tensors, folder / "mtp.safetensors")
    return network, layer


def as_checkpoint(state: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors of `MtpModel`'s only layer under the names of DeepSeek-V3, each expert alone."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("layers.0."):
            continue
        rest = name.removeprefix("layers.0.").removeprefix("mtp_block.")
        rest = re.sub(r"^post_norm\.", "shared_head.norm.", rest)
        block, _, kind = rest.partition("experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            named[start + rest] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = own.chunk(2) if kind == "gate_up_proj" else [own]
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for each, part in zip(kinds, parts, strict=True):
                named[f"{start}{block}experts.{expert}.{each}.weight"] = part
    return {name: tensor.clone().contiguous() for name, tensor in named.items()}


@torch.no_grad()
def transformers_draft(network: Any, layer: Any, tokens: list[int]) -> Tensor:
    """``(V,)`` logits of the token behind all but the first of these tokens, the last of which the
    model has not read."""
    from transformers.cache_utils import MtpCache

    ids = torch.tensor([tokens])
    hidden = network.model(ids[:, :-1]).last_hidden_state
    _, logits, _ = layer(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=None,
        position_ids=torch.arange(1, len(tokens))[None],
        mtp_cache=MtpCache(config=network.config.get_mtp_config()),
    )
    return logits[0, 0]
