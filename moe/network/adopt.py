"""Finds experts that do not dispatch through transformers' registry, and proves how to serve them.

Stacked experts are found by shape: parameters with a dimension for experts in front, or with the
rows of all experts one after the other. What their block does with them is found by trying: which
parameter is which projection, what activates the gate, how the router's outputs are meant
(`moe.network.stacked`). Each guess is built into a miniature of the block, the same code with
smaller sizes and random weights, and is used only if it gives what transformers' own forward gives.
No architecture is named.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels.reference import experts_forward
from moe.errors import UnsupportedModelError
from moe.network.miniature import (
    BlockCall,
    expert_counts,
    make_miniature,
    observe_block,
    owns_stack,
    seeded,
    stacked_parameters,
)
from moe.network.seam import experts_modules, parents_of, take_weights
from moe.network.stacked import (
    BOTH,
    READINGS,
    FirstFront,
    ListedFront,
    Origin,
    RouterFront,
    RouterLink,
    RouterReading,
    RowsFront,
    StackedExperts,
)
from routing import Routing

ADOPTED = "stacked_experts"
"""Name of `StackedExperts` in its block."""

TOLERANCE = 1e-4
"""Largest difference from transformers' own forward, relative to the largest value."""

_TOKENS = (13, 1, 96)  # of the passes that a guess is tried on
_REFERENCE = "moe_reference"
_SETTINGS = (int, float, str, tuple, list, dict, FunctionType, BuiltinFunctionType)
"""Types of attributes that may change what a module computes."""


def adopt_experts(model: PreTrainedModel) -> list[str]:
    """Let stacked experts of a model on the meta device dispatch through the registry.

    Does nothing if some experts do already. Stacked parameters that cannot be served stay in the
    trunk, where transformers' own code uses them.

    Returns:
        why blocks with stacked parameters were left as they are, one sentence each.
    """
    if experts_modules(model):
        return []
    known: dict[object, Recipe | str] = {}
    reasons: dict[str, None] = {}
    for block in _blocks(model):
        if any(isinstance(module, StackedExperts) for module in block.modules()):
            continue
        key = _kind(block)
        if key not in known:
            known[key] = _recipe(block, model)
        recipe = known[key]
        if isinstance(recipe, Recipe):
            recipe.install(block, model.config.get_text_config(decoder=True))
        else:
            reasons[f"{type(block).__name__}: {recipe}"] = None
    return list(reasons)


def _kind(block: nn.Module) -> object:
    """Equal for blocks that compute alike but for their weights."""
    shapes = tuple(tuple(parameter.shape) for parameter in block.parameters())
    settings = tuple(
        (path, type(module), name, repr(value))
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _SETTINGS) and not name.startswith("_") and name != "layer_idx"
    )
    return shapes, settings


def check_experts(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if there are no experts to take over."""
    if experts_modules(model):
        return
    reasons = adopt_experts(model) or _embedded(model)
    raise UnsupportedModelError(
        f"{type(model).__name__} has no experts that dispatch through transformers' experts "
        "interface, so there is nothing for this engine to take over; dense models are not "
        "supported, and expert modules of an architecture's own only where a load-time proof shows "
        "that they can be served" + "".join(f" ({reason})" for reason in reasons[:3])
    )


def _embedded(model: nn.Module) -> list[str]:
    """Blocks whose experts are rows of embeddings: nothing there can be replaced. (Doge's, the only
    such block in transformers, could not be served right anyhow: it splits its router's output so
    that the experts of a prompt's token depend on the tokens behind it, and no prompt can be cut,
    continued or packed with another.)"""
    found: dict[str, None] = {}
    for module in model.modules():
        tables = [name for name, m in module.named_children() if type(m) is nn.Embedding]
        if len(tables) >= 2:
            rows = module.get_submodule(tables[0]).num_embeddings
            found[
                f"{type(module).__name__}: it reads its experts as rows of {' and '.join(tables)} "
                f"({rows} rows each) inside its own forward, which no module can stand in for"
            ] = None
    return list(found)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that may be blocks of stacked experts: parents and grandparents of the owners of
    stacked parameters, once each."""
    parents, seen = parents_of(model), set()
    for module in list(model.modules()):
        if not owns_stack(module):
            continue
        place: nn.Module | None = module
        for _ in range(2):
            place = parents.get(place) if place is not None else None
            if place is None or isinstance(place, (nn.ModuleList, PreTrainedModel)):
                break
            if place not in seen:
                seen.add(place)
                yield place


@dataclass(frozen=True)
class Projections:
    """Which stacked parameters are which projections.

    Attributes:
        num_experts: E.
        first, second: names below the block, and whether each is swapped (`Origin`).
        gate_place, interleaved: see `StackedExperts`.
    """

    num_experts: int
    first: tuple[tuple[str, bool], ...]
    second: tuple[str, bool]
    gate_place: int | None
    interleaved: bool


@dataclass(frozen=True)
class Listed:
    """Experts that are called with rows, ids and weights: see `ListedFront`."""

    experts: str
    places: tuple[int | str, int | str, int | str]
    scales_input: bool
    returns_input: bool


@dataclass(frozen=True)
class Routed:
    """Experts that are called with rows alone.

    Attributes:
        router: name of the router.
        experts: names of the module with all projections, or of the two with one each, in the
            order of their calls.
        scales_input: see `moe.network.stacked.serve`.
    """

    router: str
    reading: RouterReading
    experts: tuple[str, ...]
    scales_input: bool


@dataclass(frozen=True)
class Recipe:
    """The way in which a block's experts are served; names are those of the block's parts.

    Attributes:
        activation: name of the module that has it as an attribute, and of the attribute.
    """

    projections: Projections
    activation: tuple[str, str]
    calls: Listed | Routed

    def install(self, block: nn.Module, config: Any) -> StackedExperts:
        """Put `StackedExperts` and fronts into the block, with its weights."""
        experts = self._experts(block, config)
        calls, link = self.calls, RouterLink()
        names = (calls.experts,) if isinstance(calls, Listed) else calls.experts
        for name in names:
            del block._modules[name]
        block.add_module(ADOPTED, experts)
        if isinstance(calls, Listed):
            block.__dict__[calls.experts] = ListedFront(
                experts, calls.places, calls.scales_input, calls.returns_input
            )
            return experts
        router = block.get_submodule(calls.router)
        router.forward = RouterFront(router.forward, calls.reading, link)
        if len(names) > 1:
            width = next(experts.parameters()).shape[1]
            block.__dict__[names[0]] = FirstFront(width, link)
        block.__dict__[names[-1]] = RowsFront(experts, link, calls.scales_input)
        return experts

    def _experts(self, block: nn.Module, config: Any) -> StackedExperts:
        found = self.projections
        count = found.num_experts

        def origin(name: str, swapped: bool) -> tuple[Origin, Tensor]:
            tensor = block.get_parameter(name)
            size = tensor.shape[0]
            kept = tensor[:count] if tensor.ndim == 3 else tensor
            made = Origin(name, kept.shape, swapped)
            spares.append(size - count if tensor.ndim == 3 else 0)
            return made, made.part(kept.detach(), count)

        spares: list[int] = []
        first = [origin(*part) for part in found.first]
        second = origin(*found.second)
        place, name = self.activation
        return StackedExperts(
            config,
            torch.cat([part for _, part in first], 1),
            second[1].contiguous(),
            getattr(block.get_submodule(place), name),
            found.gate_place,
            found.interleaved,
            ([made for made, _ in first], [second[0]]),
            max(spares),
        )


def _recipe(block: nn.Module, model: PreTrainedModel) -> Recipe | str:
    """Return the recipe of a block on meta; else why its experts cannot be served."""
    hidden = model.config.get_text_config(decoder=True).hidden_size
    try:
        mini, size = make_miniature(block, hidden)
        calls = observe_block(mini, torch.randn(1, _TOKENS[0], size, generator=seeded()))
    except Exception as error:  # the block of an unknown architecture may want anything
        return f"it cannot be tried by itself: {type(error).__name__}: {error}"
    projections = list(_projections(mini, size))
    if not projections:
        names = ", ".join(stacked_parameters(mini))
        return f"its stacked parameters ({names}) are no gate, up and down projections of experts"
    forms, tried = list(_call_forms(mini, calls, size)), 0
    for found in projections:
        whole = found.gate_place == BOTH
        activations = _gates(mini) if whole else _activations(mini)
        for activation, form in product(activations, forms):
            tried += 1
            if _is_proven(recipe := Recipe(found, activation, form), mini, size):
                return recipe
    return f"none of {tried} ways to compute its experts gives what transformers' own forward gives"


def _projections(block: nn.Module, hidden: int) -> Iterator[Projections]:
    """Which projections a block's stacked parameters may be, by their shapes."""
    stacked, both = stacked_parameters(block), (False, True)
    for count in expert_counts(block):

        def shape(name: str, swapped: bool, count: int = count) -> tuple[int, int]:
            tensor = stacked[name]
            own = tensor.shape[-2] if tensor.ndim == 3 else tensor.shape[0] // count
            return (tensor.shape[-1], own) if swapped else (own, tensor.shape[-1])

        for names in permutations(stacked):
            for swapped in product(both, repeat=len(names)):
                *first, second = zip(names, swapped, strict=True)
                rows, width = shape(*second)
                if rows != hidden or any(shape(*part)[1] != hidden for part in first):
                    continue
                heights = [shape(*part)[0] for part in first]
                if heights == [2 * width]:
                    yield Projections(count, tuple(first), second, BOTH, False)
                    for place, interleaved in product((0, 1), both):
                        yield Projections(count, tuple(first), second, place, interleaved)
                elif heights == [width]:
                    yield Projections(count, tuple(first), second, None, False)
                elif heights == [width, width]:
                    yield Projections(count, tuple(first), second, 0, False)


def _activations(block: nn.Module) -> list[tuple[str, str]]:
    """Attributes that are functions without weights and keep a tensor's shape: where, and name."""
    found: dict[object, tuple[str, str]] = {}
    for path, module in block.named_modules():
        if type(module).__module__.startswith("torch."):
            continue
        for name, value in (*module._modules.items(), *vars(module).items()):
            if name.startswith("_") or not callable(value) or isinstance(value, type):
                continue
            if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
                continue
            try:
                moved = value(torch.linspace(-2.0, 2.0, 8))
            except Exception:  # a function of something else
                continue
            if isinstance(moved, Tensor) and moved.shape == (8,):
                found.setdefault(tuple(moved.tolist()), (path, name))
    return list(found.values())


def _gates(block: nn.Module) -> list[tuple[str, str]]:
    """Methods that make one row of F values from 2F, of modules with stacked parameters."""
    found = []
    for path, module in block.named_modules():
        for name, value in vars(type(module)).items() if owns_stack(module) else ():
            if not callable(value) or name.startswith("__"):
                continue
            try:
                made = getattr(module, name)(torch.linspace(-2.0, 2.0, 12).view(1, 12))
            except Exception:  # a method for something else
                continue
            if isinstance(made, Tensor) and made.shape == (1, 6):
                found.append((path, name))
    return found


def _call_forms(
    block: nn.Module, calls: Sequence[BlockCall], hidden: int
) -> Iterator[Listed | Routed]:
    """Yield ways in which the block may hand tokens to its experts."""
    owners = {name.partition(".")[0] for name in stacked_parameters(block)}
    called = [call for call in calls if call.name in owners]
    if {call.name for call in called} != owners or len(called) > 2:
        return
    if len(called) == 1:
        for places in _listed_places(called[0], hidden):
            for scales, returns in product((False, True), (False, True)):
                yield Listed(called[0].name, places, scales, returns)
    for call in calls:
        if call.name.partition(".")[0] in owners:
            continue
        for find, count in product(READINGS, expert_counts(block)):
            for reading in find(call.outputs, _TOKENS[0], count):
                names = tuple(each.name for each in called)
                yield from (Routed(call.name, reading, names, way) for way in (False, True))


def _listed_places(
    call: BlockCall, hidden: int
) -> Iterator[tuple[int | str, int | str, int | str]]:
    """Which arguments of a call may be rows, ids and weights."""
    given: dict[int | str, Any] = dict(enumerate(call.args))
    given.update(call.kwargs)
    tensors = {place: value for place, value in given.items() if isinstance(value, Tensor)}
    for rows, ids, weights in permutations(tensors, 3):
        values = tensors[rows], tensors[ids], tensors[weights]
        if (
            values[0].is_floating_point()
            and values[0].shape[-1] == hidden
            and not values[1].is_floating_point()
            and values[2].is_floating_point()
            and values[1].shape == values[2].shape
            and values[1].ndim == 2
        ):
            yield rows, ids, weights


@torch.no_grad()
def _is_proven(recipe: Recipe, block: nn.Module, hidden: int) -> bool:
    """Return whether a block with the recipe gives the same results as by itself."""
    served = copy.deepcopy(block)
    try:
        recipe.install(served, SimpleNamespace(_experts_implementation=_REFERENCE))
        for tokens in _TOKENS:
            rows = torch.randn(1, tokens, hidden, generator=seeded())
            pairs = zip(_tensors(served(rows.clone())), _tensors(block(rows.clone())), strict=True)
            if not all(_close(ours, theirs) for ours, theirs in pairs):
                return False
    except Exception:  # a wrong guess may fail in any way
        return False
    return True


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    most = theirs.abs().max().clamp_min(1e-6)
    return bool((ours - theirs).abs().max() <= TOLERANCE * most)


def _run_reference(
    module: StackedExperts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    routing = Routing.from_router(top_k_index, top_k_weights, module.num_experts)
    weights = take_weights(copy.deepcopy(module))
    return experts_forward(hidden, routing.expert_ids, routing.weights, weights)


ALL_EXPERTS_FUNCTIONS.register(_REFERENCE, _run_reference)
