"""Where torch computes few rows otherwise than many, so that a token gets the same bits in company.

The last bits of a router's logits decide between experts that are nearly equally good, the head's
between tokens, and 8-bit activations make more of them still: an answer could depend on what else
was read in the same pass.

Products of few rows have another order of sums. Routers and the head get ours; layers that are bit
planes (`QuantizedLinear`) are row-wise anyway; other whole layers of the trunk are left to torch,
which is up to twice as fast for long prompts: their float32 bits may differ.

Curves (SiLU, sigmoid, ...) of what is left behind the last whole vector of a thread's share are
computed by other code, so where a token stands among others shows. `RowWise` has torch compute them
in blocks that leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu, softplus
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kernels import row_linear
from moe.seam import routing_modules

_GRAIN, _VECTOR = 32768, 64
"""torch runs an elementwise operation of fewer elements on one thread, whole vectors at a time."""

_NAMES = ("sigmoid", "tanh", "exp", "sin", "cos")
_CURVES = {silu, gelu, softplus} | {getattr(of, n) for n in _NAMES for of in (torch, Tensor)}


def make_row_wise(model: PreTrainedModel) -> None:
    """Let `kernels.row_linear` make the products of modules that choose experts or tokens."""
    modules: list[nn.Module] = [module for _, module in routing_modules(model)]
    head = model.get_output_embeddings()
    if head is not None:
        modules.append(head)
    for module in modules:
        module.forward = partial(_run, module.forward)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _RowLinear():
        return forward(*args, **kwargs)


class _RowLinear(TorchFunctionMode):
    """Most routers of transformers are no `nn.Linear`, but call `linear` themselves."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return (row_linear if func is linear else func)(*args, **(kwargs or {}))


class RowWise(TorchFunctionMode):
    """While it is active, an element's curve is the same bits wherever it stands (on a CPU)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CURVES and args and not kwargs.get("inplace") and "out" not in kwargs:
            return _in_blocks(partial(func, **kwargs), *args)
        return func(*args, **kwargs)


def _in_blocks(curve: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``curve(x, *args)``, by whole vectors, and no more at a time than one thread gets."""
    flat = x.reshape(-1)
    if over := flat.numel() % _VECTOR:
        flat = pad(flat, (0, _VECTOR - over))
    blocks = flat.split(_GRAIN - _VECTOR)
    found = [curve(block, *args) for block in blocks]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole[: x.numel()].view(x.shape)
