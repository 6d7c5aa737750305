"""A block of stacked experts in small: the same code with smaller sizes and random weights.

What a block computes is found out and proven on its miniature (`moe.network.adopt`), however large
the model is and before any of its weights is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

_LEAST = 4  # of the hidden size and an expert's width in a miniature


def owns_stack(module: nn.Module) -> bool:
    """Return whether a module, none of torch's own, has 3-D parameters, or several equal 2-D
    ones."""
    if type(module).__module__.startswith("torch."):
        return False
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    flat = [shape for shape in shapes if len(shape) == 2]
    return any(len(shape) == 3 for shape in shapes) or len(flat) > len(set(flat))


def stacked_parameters(block: nn.Module) -> dict[str, Tensor]:
    """The stacked parameters of a block, by name."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in block.named_modules()
        if owns_stack(module)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim in (2, 3)
    }


def expert_counts(block: nn.Module) -> list[int]:
    """Return values that E may have: the least leading dimension of 3-D parameters; where experts'
    rows come one after the other, any number of rows of another matrix that divides theirs."""
    stacked = stacked_parameters(block)
    leading = [p.shape[0] for p in stacked.values() if p.ndim == 3]
    if leading:
        return [min(leading)]
    rows = gcd(*(p.shape[0] for p in stacked.values()))
    others = {p.shape[0] for n, p in block.named_parameters() if p.ndim == 2 and n not in stacked}
    return sorted(count for count in others if count > 1 and rows % count == 0)


def make_miniature(block: nn.Module, hidden: int) -> tuple[nn.Module, int]:
    """A copy with random float32 weights, whose sizes but for counts of experts are divided by a
    common divisor; and its hidden size."""
    stacked = list(stacked_parameters(block).values())
    counts = {p.shape[0] for p in stacked if p.ndim == 3} | set(expert_counts(block))
    sizes = {hidden} | {size for p in stacked if p.ndim == 3 for size in p.shape[1:]}
    for parameter in stacked:
        if parameter.ndim == 2:
            sizes |= {parameter.shape[0] // count for count in expert_counts(block)}
    common = gcd(*sizes)
    most = min(sizes) // _LEAST
    divisor = max((d for d in range(1, common + 1) if common % d == 0 and d <= most), default=1)
    tensors = [*block.parameters(), *block.buffers()]
    scaled = sizes | {
        size for tensor in tensors for size in tensor.shape if size >= _LEAST * divisor
    }
    scaled = {size for size in scaled if size % divisor == 0}
    if counts & sizes:
        divisor = 1
    scaled -= counts

    def smaller(size: int) -> int:
        return size // divisor if size in scaled else size

    generator, mini = seeded(), copy.deepcopy(block)
    for module in mini.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    shape = [smaller(size) for size in tensor.shape]
                    own[name] = _random(tensor, shape, generator)
        for name, value in vars(module).items():
            if type(value) is int:
                vars(module)[name] = smaller(value)
    return mini.eval(), smaller(hidden)


def _random(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Any:
    if not like.is_floating_point():
        return torch.zeros(shape, dtype=like.dtype)
    values = torch.randn(shape, generator=generator)
    values = values * shape[-1] ** -0.5 if len(shape) > 1 else values * 0.1
    return nn.Parameter(values, requires_grad=False) if isinstance(like, nn.Parameter) else values


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class BlockCall:
    """The only call of one of a block's modules."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]


@torch.no_grad()
def observe_block(block: nn.Module, rows: Tensor) -> list[BlockCall]:
    """Every module of a block that one pass calls once, in the order of the calls' ends."""
    made: dict[str, list[BlockCall]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            values = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
            made.setdefault(name, []).append(BlockCall(name, args, kwargs, values))

        return hook

    hooks = [
        module.register_forward_hook(keep(name), with_kwargs=True)
        for name, module in block.named_modules()
        if name
    ]
    try:
        block(rows)
    finally:
        for handle in hooks:
            handle.remove()
    return [calls[0] for calls in made.values() if len(calls) == 1]
