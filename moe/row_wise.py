"""Routers and the head, so that a token gets the same bits alone and in company.

torch multiplies few rows in another order of sums than many. The last bits of a router's logits
decide between experts that are nearly equally good, the head's between tokens, and 8-bit
activations make more of them still: an answer could depend on what else was read in the same pass.
Layers that are bit planes (`QuantizedLinear`) are row-wise anyway. Other whole layers of the trunk
are left to torch, which is up to twice as fast for long prompts: their float32 bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kernels import row_linear
from moe.seam import routing_modules


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
