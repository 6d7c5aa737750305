"""Gives a token the same bits whatever other tokens are in its pass.

torch computes few rows otherwise than many. The last bits of a router's logits decide between
nearly equal experts, those of the head between tokens, and 8-bit activations amplify them: without
this, an answer could depend on what else was read in the same pass.

Matrix products of few rows sum in another order. Routers and the head get `kernels.row_linear`, and
routers `kernels.row_top_k`, as torch chooses any of equal numbers and takes five times as long;
quantized layers (`QuantizedLinear`) are row-wise anyway. Other layers get `row_linear` where it is
faster (`linears_are_faster`), or where a method asks for it (`make_linears_row_wise`). Elsewhere
torch computes them, and their float32 bits may differ.

torch computes activations (SiLU, sigmoid, ...) of the elements after the last whole SIMD vector of
a thread's share by other code, so the bits depend on where a token stands. Modules that compute
activations are found by observing a pass; they compute in blocks of whole vectors. Modules with
experts inside are left out, as a torch mode must not stay active while their lane sleeps; a
router's output is laid out so that torch never vectorises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu, softplus
from torch.overrides import TorchFunctionMode

from kernels import row_linear, row_top_k
from moe.cache_dir.proofs import current_proofs
from moe.describe.probe import random_prompts, stand_in
from moe.describe.stateful import active_modules
from moe.machine import cpu_maker, instruction_sets
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.network.seam import experts_modules, parents_of, routing_modules

_GRAIN, _VECTOR = 16384, 64
"""Below this many elements torch runs any elementwise operation on one thread (most of them below
32,768, GELU 20,000), by whole vectors of at most this many."""

_NAMES = ("sigmoid", "tanh", "exp", "sin", "cos")
_plain: ContextVar[bool] = ContextVar("_plain", default=False)
_TOP_K = (torch.topk, Tensor.topk)
_ACTIVATIONS = {silu, gelu, softplus} | {getattr(of, n) for n in _NAMES for of in (torch, Tensor)}


def make_row_wise(backbone: Backbone) -> None:
    """Make routers, the head and activations of a model on a CPU row-wise."""
    if backbone.device.type != "cpu":
        return
    model = backbone.model
    names = {module: name for name, module in model.named_modules()}

    def found() -> list[str]:
        return [names[module] for module in _with_activations(backbone)]

    for name in current_proofs().recall("activations", [*names.values()], list[str], found):
        module = model.get_submodule(name)
        module.forward = partial(_run, RowWise(), module.forward)
    gates = [module for _, module in routing_modules(model)]
    for module in gates:
        module.forward = partial(_route, module.forward)
    for module in _choosing(model, gates):
        module.forward = partial(_run, RowWise(products=True), module.forward)
    head = model.get_output_embeddings()
    if head is not None:
        head.forward = partial(_run, RowWise(products=True), head.forward)


def _choosing(model: nn.Module, gates: Sequence[nn.Module]) -> list[nn.Module]:
    """Routers that have such a gate inside: of equal scores they choose the first as others do."""
    parents = parents_of(model)
    found = dict.fromkeys(parents[gate] for gate in gates)
    return [module for module in found if not experts_modules(module)]


def linears_are_faster(backbone: Backbone) -> bool:
    """Return whether `row_linear` should take torch's place in a packed model.

    torch's MKL multiplies float32 by 256 bits on AVX-512 of other makers than Intel; there ours is
    1.4 to 5 times as fast. Recurrent states can grow last bits to 1e-3, so these models keep the
    products that transformers has.
    """
    is_slow = "AVX-512F" in instruction_sets() and cpu_maker() != "GenuineIntel"
    return is_slow and not backbone.recurrent


def make_linears_row_wise(model: nn.Module) -> None:
    """Make all linear layers of a model on a CPU row-wise, in place, but for those that are."""
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module.weight.device.type == "cpu":
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return (linear if _plain.get() else row_linear)(x, module.weight, module.bias)


@contextmanager
def as_torch_does() -> Iterator[None]:
    """Let modules compute as they do by themselves, to see what they compute."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


class RowWise(TorchFunctionMode):
    """While it is active, activations give an element the same bits wherever it stands.

    Args:
        products: `kernels.row_linear` computes matrix products, too, and `kernels.row_top_k` the
            largest numbers. Most routers of transformers are no `nn.Linear`, but call `linear`
            themselves.
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
        if func in _ACTIVATIONS and args and not kwargs.get("inplace") and "out" not in kwargs:
            return _in_blocks(partial(func, **kwargs), *args)
        if self._products:
            if func is linear:
                return row_linear(*args, **kwargs)
            if func in _TOP_K and (given := _plain_top_k(*args, **kwargs)):
                return torch.return_types.topk(row_top_k(*given))
        return func(*args, **kwargs)


class _Watch(TorchFunctionMode):
    """Records the innermost running module for each activation."""

    def __init__(self, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self._running = running
        self.found: dict[nn.Module, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ACTIVATIONS and self._running:
            self.found[self._running[-1]] = None
        return func(*args, **(kwargs or {}))


def _with_activations(backbone: Backbone) -> list[nn.Module]:
    """Modules that compute activations themselves, and have no experts inside."""
    work = Work(random_prompts(backbone, (3,))[0], backbone.new_cache(3))
    with active_modules(backbone.model) as running, torch.inference_mode():
        watch = _Watch(running)
        with watch:
            run_lanes(backbone.lanes([work]), stand_in)
    experts = {module for _, module in experts_modules(backbone.model)}
    return [module for module in watch.found if experts.isdisjoint(module.modules())]


def _run(mode: RowWise, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _plain.get():
        return forward(*args, **kwargs)
    with mode:
        return forward(*args, **kwargs)


def _route(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A router's or gate's output with a stride of 2, whose activations torch never vectorises."""
    routed = _run(RowWise(products=True), forward, *args, **kwargs)
    if _plain.get() or not isinstance(routed, Tensor):
        return routed
    apart = routed.new_empty(*routed.shape, 2)[..., 0]
    return apart.copy_(routed)


def _plain_top_k(
    x: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, **others: Any
) -> tuple[Tensor, int] | None:
    """The arguments of `row_top_k`, if it does what `torch.topk` is asked for."""
    last = x.dim() and dim in (-1, x.dim() - 1)
    return (x, k) if last and largest and not others and isinstance(k, int) else None


def _in_blocks(activation: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``activation(x, *args)`` by whole vectors, and no more at a time than one thread gets."""
    flat = x.reshape(-1).contiguous()
    if over := flat.numel() % _VECTOR:
        flat = pad(flat, (0, _VECTOR - over))
    blocks = flat.split(_GRAIN - _VECTOR)
    found = [activation(block, *args) for block in blocks]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole[: x.numel()].view(x.shape)
