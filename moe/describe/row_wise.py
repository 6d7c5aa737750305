"""Where torch computes few rows otherwise than many, so that a token gets the same bits in company.

The last bits of a router's logits decide between experts that are nearly equally good, the head's
between tokens, and 8-bit activations make more of them still: an answer could depend on what else
was read in the same pass.

Products of few rows have another order of sums. Routers and the head get ours; layers that are bit
planes (`QuantizedLinear`) are row-wise anyway; other whole layers of the trunk are left to torch,
which is up to twice as fast for long prompts: their float32 bits may differ.

Curves (SiLU, sigmoid, ...) of what is left behind the last whole vector of a thread's share are
computed by other code, so where a token stands among others shows. Modules that compute some are
found by watching a pass, and have torch compute them in blocks that leave nothing. Around experts,
where lanes sleep, nothing can be watched over; what comes there from a router is no vector at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu, softplus
from torch.overrides import TorchFunctionMode

from kernels import row_linear
from moe.describe.probe import random_prompts, stand_in
from moe.network.backbone import Backbone
from moe.network.kv_cache import Work
from moe.network.lanes import run_lanes
from moe.network.seam import experts_modules, routing_modules

_GRAIN, _VECTOR = 16384, 64
"""torch runs an elementwise operation of fewer elements on one thread, whole vectors at a time (of
32,768 most, of 20,000 GELU)."""

_NAMES = ("sigmoid", "tanh", "exp", "sin", "cos")
_CURVES = {silu, gelu, softplus} | {getattr(of, n) for n in _NAMES for of in (torch, Tensor)}


def make_row_wise(backbone: Backbone) -> None:
    """Mend routers, the head and curves of a model on a CPU."""
    if backbone.device.type != "cpu":
        return
    model = backbone.model
    for module in _with_curves(backbone):
        module.forward = partial(_run, RowWise(), module.forward)
    for _, module in routing_modules(model):
        module.forward = partial(_route, module.forward)
    head = model.get_output_embeddings()
    if head is not None:
        head.forward = partial(_run, RowWise(products=True), head.forward)


class RowWise(TorchFunctionMode):
    """While it is active, an element's curve is the same bits wherever it stands.

    Args:
        products: `kernels.row_linear` makes products. Most routers of transformers are no
            `nn.Linear`, but call `linear` themselves.
    """

    def __init__(self, *, products: bool = False) -> None:
        super().__init__()
        self._products = products

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
        return (row_linear if self._products and func is linear else func)(*args, **kwargs)


class _Watch(TorchFunctionMode):
    """Notes the innermost running module for each curve."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found: dict[nn.Module, None] = {}

    def begins(self, module: nn.Module, _: Any) -> None:
        self.running.append(module)

    def ends(self, *_: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CURVES and self.running:
            self.found[self.running[-1]] = None
        return func(*args, **(kwargs or {}))


def _with_curves(backbone: Backbone) -> list[nn.Module]:
    """Modules that compute curves themselves, and have no experts inside."""
    watch, work = _Watch(), Work(random_prompts(backbone, (3,))[0], backbone.new_cache(3))
    hooks = []
    for module in backbone.model.modules():
        hooks.append(module.register_forward_pre_hook(watch.begins))
        hooks.append(module.register_forward_hook(watch.ends))
    try:
        with torch.inference_mode(), watch:
            run_lanes(backbone.lanes([work]), stand_in)
    finally:
        for hook in hooks:
            hook.remove()
    experts = {module for _, module in experts_modules(backbone.model)}
    return [module for module in watch.found if experts.isdisjoint(module.modules())]


def _run(mode: RowWise, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


def _route(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a router or a gate gives; torch computes curves of every second element one by one."""
    routed = _run(RowWise(products=True), forward, *args, **kwargs)
    if not isinstance(routed, Tensor):
        return routed
    apart = routed.new_empty(*routed.shape, 2)[..., 0]
    return apart.copy_(routed)


def _in_blocks(curve: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``curve(x, *args)``, by whole vectors, and no more at a time than one thread gets."""
    flat = x.reshape(-1).contiguous()
    if over := flat.numel() % _VECTOR:
        flat = pad(flat, (0, _VECTOR - over))
    blocks = flat.split(_GRAIN - _VECTOR)
    found = [curve(block, *args) for block in blocks]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole[: x.numel()].view(x.shape)
