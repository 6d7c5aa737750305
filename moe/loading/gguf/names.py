"""Where the tensors of a GGUF file go in a network, by the table of names in the package ``gguf``.

A layer's experts lie in one tensor for each of gate, up and down, whatever the network has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from moe.loading.gguf.keys import Architecture
from moe.loading.gguf.types import package
from moe.loading.transfer import Index
from moe.seam import experts_modules


@dataclass(frozen=True)
class Seat:
    """Where a stored tensor goes in a network.

    Attributes:
        target: the parameter.
        index: which part of it; behind the expert's number, where it has one.
        each: it holds all experts, and is presented as one tensor for each.
        heads: rows are in the order of pairs that turn together, in so many heads; 0: they are not.
        transposed: the network has columns where the file has rows.
    """

    target: str
    index: Index = ()
    each: bool = False
    heads: int = 0
    transposed: bool = False


def seats_of(
    model: PreTrainedModel, name: str, known: Architecture, expected: Mapping[str, Tensor]
) -> Iterator[tuple[str, Seat]]:
    """Where the tensors that a file may have go, by their names in it."""
    gguf, config = package(), model.config
    kinds = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[name], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    experts = {f"{path}.{own}" for path, m in experts_modules(model) for own in m._parameters}
    for path, module in experts_modules(model):
        block = table.get_name(f"{path}.down_proj").rpartition(".")[0]
        yield from _expert_seats(block, path, module)
    for target in expected.keys() - experts:
        for theirs, ending in _spellings(target):
            if (found := table.get_name(theirs)) is not None:
                own = heads.get(found.rpartition(".")[2], 0) if known.pairs else 0
                yield f"{found}{ending}", Seat(target, heads=own)


def _spellings(target: str) -> Iterator[tuple[str, str]]:
    """Names that llama.cpp's table may know a parameter by, each with the ending of its tensor."""
    for name in (target, target.replace(".mlp.", ".block_sparse_moe.")):
        stem, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias"):
            yield stem, f".{leaf}"
        else:
            yield name, ".weight"
            yield name.removesuffix("_bias"), ".bias"


def _expert_seats(block: str, path: str, module: Any) -> Iterator[tuple[str, Seat]]:
    """Of a layer's experts. Legend: gate and up one behind the other, or in turns."""
    turned = bool(module.is_transposed)
    width = module.gate_up_proj.shape[2 if turned else 1] // 2
    halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    if module.is_concatenated:
        halves = {"gate": slice(0, width), "up": slice(width, None)}
        yield f"{block}.ffn_gate_up_exps.weight", Seat(f"{path}.gate_up_proj", (), True, 0, turned)
    for part, half in halves.items():
        index = (slice(None), half) if turned else (half,)
        seat = Seat(f"{path}.gate_up_proj", index, each=True, transposed=turned)
        yield f"{block}.ffn_{part}_exps.weight", seat
        yield (
            f"{block}.ffn_{part}_exps.bias",
            Seat(f"{path}.gate_up_proj_bias", (slice(None), half)),
        )
    yield f"{block}.ffn_down_exps.weight", Seat(f"{path}.down_proj", (), True, 0, turned)
    yield f"{block}.ffn_down_exps.bias", Seat(f"{path}.down_proj_bias")
