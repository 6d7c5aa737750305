"""Linear layers of a transformers model as nested bit planes, swapped in by type.

Routers and gates are as wide as there are experts, or one, and stay whole, as do norms, embeddings
and everything that is not exactly a `torch.nn.Linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experts.layer_file import WHOLE
from experts.linear import QuantizedLinear
from kernels.planes import PlaneLayout, PrefixBits
from moe.seam import routing_modules


def quantizes(bits: int | None) -> bool:
    """Whether a setting of bits asks for planes."""
    return bits is not None and bits < WHOLE


def linear_layout(linear: nn.Module, group_size: int) -> PlaneLayout:
    assert isinstance(linear, nn.Linear)
    return PlaneLayout(linear.out_features, linear.in_features, group_size)


def chosen_linears(
    network: PreTrainedModel, trunk_bits: int | None, head_bits: int | None
) -> dict[str, int]:
    """Linear layers to be quantized, by name, and their bits."""
    head = network.get_output_embeddings()
    routing = dict(routing_modules(network))
    chosen = {}
    for name, module in network.named_modules():
        bits = head_bits if module is head else trunk_bits
        if type(module) is not nn.Linear or bits is None or not quantizes(bits):
            continue
        if module is head or name not in routing:
            chosen[name] = bits
    return chosen


def quantize_linear(network: PreTrainedModel, name: str, group_size: int, bits: int) -> None:
    """Replace one linear layer of the network; one on meta gets no values."""
    linear = network.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    dtype = network.config.dtype
    assert isinstance(dtype, torch.dtype)
    replaced: Any = QuantizedLinear.of(linear, group_size, bits, dtype)
    replaced._is_hf_initialized = True  # transformers asks every module
    network.set_submodule(name, replaced)
    tied = network.all_tied_weights_keys
    for target in [t for t, source in tied.items() if f"{name}.weight" in (t, source)]:
        del tied[target]


def planes_of(network: nn.Module) -> dict[str, PrefixBits]:
    """Bits of the linear layers that are planes, by name."""
    return {
        name: module.bits
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def mend_linears(network: nn.Module) -> list[str]:
    """Make whole the layers whose weight has been read without calling them; their names.

    To be asked after a probe. Nothing was wrong, but each read makes the whole weight anew.
    """
    found = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear) and module.reads
    }
    for name, module in found.items():
        network.set_submodule(name, module.whole())
    return list(found)
