"""Describes routers, so that decode steps can run them, and policies and drafts restrict them.

A router's matrix and rule are found by trying what a block's own tensors and numbers could mean on
rows that the router has decided, whatever the architecture. A `Selector` is used only if it gives
the decisions of an observed pass from the rows that reach the experts. If no rule fits, decode
steps call the router's own module, if it returns ids and weights by itself.
Legend: T rows, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kernels.triton import triton_status
from moe.describe.description import NotDescribed, OwnRouter, Projection, Router
from moe.describe.observe import Observation, observe_random
from moe.describe.parts import project, same
from moe.errors import ProfileError
from moe.network.backbone import Backbone
from moe.network.moe_layer import FoundSelector, MoELayers, Selector
from moe.network.seam import experts_modules, layer_of, parents_of
from routing import PolicyChain, Routing, RoutingError
from routing.routers import GroupScore, RouterRule, Score
from routing.routing import UNUSED

MOST_SCORED = 512
"""Whose scores fit into the registers of the kernel."""
_ROWS = 256
_TOLERANCE = 1e-4
_SAME_SCALE = 1e-5
_SAME_WEIGHTS = 1e-4
_ROUNDINGS = 8  # of half precision, by which scores may differ


def find_selectors(backbone: Backbone, seen: Observation | None = None) -> list[FoundSelector]:
    """One entry for each MoE layer.

    Args:
        seen: of `observe_random`; None: make one. No expert is read.
    """
    seen = seen or observe_random(backbone)
    parents = parents_of(backbone.model)
    layers = zip(experts_modules(backbone.model), layers_with_experts(backbone.model), strict=True)
    with torch.inference_mode():
        return [
            _find_looped([parents[experts], layer], experts, seen) for (_, experts), layer in layers
        ]


FindSelectors = Callable[[Backbone], list[FoundSelector]]


def enable_policies(
    chain: PolicyChain,
    backbone: Backbone,
    experts: MoELayers,
    find: FindSelectors = find_selectors,
) -> None:
    """Let a chain of policies change routings from now on.

    Args:
        find: what finds the selectors that a policy asks for.

    Raises:
        ProfileError: a policy is not made for this model, or cannot choose again in it.
    """
    for policy in chain.policies:
        try:
            policy.check(len(experts_modules(backbone.model)))
        except RoutingError as error:
            raise ProfileError(f"routing.policies: {error}") from error
    selectors: list[Selector] = []
    if "select" in chain.needs:
        selectors = _selectors(chain, backbone, find)
    experts.set_policies(chain, selectors)


def _selectors(
    chain: PolicyChain,
    backbone: Backbone,
    find: FindSelectors,
) -> list[Selector]:
    """The selector of each MoE layer; raises `ProfileError` where one is missing."""
    name = type(backbone.model).__name__
    found = find(backbone)
    selectors = [layer.selector for layer in found if layer.selector is not None]
    if len(selectors) < len(found):
        spec = next(policy.spec for policy in chain.policies if "select" in policy.needs)
        index = next(at for at, layer in enumerate(found) if layer.selector is None)
        raise ProfileError(
            f"routing.policies: '{spec}' chooses experts again by the router's own rule, and that "
            f"is not known for {name} (MoE layer {index}: {found[index].reason}); remove the policy"
        )
    return selectors


def _is_exact(module: nn.Module) -> bool:
    """Return whether a module computes with float32 in main memory."""
    return all(p.dtype == torch.float32 and p.is_cpu for p in module.parameters())


def _exact_copy(module: nn.Module) -> nn.Module:
    """The same module in float32 in main memory: half precision hides small differences of rules,
    and its ties are decided in no fixed order."""
    tensors: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().float().cpu(), requires_grad=False)
        for p in module.parameters()
    }
    tensors |= {id(buffer): buffer.detach().cpu() for buffer in module.buffers()}
    return deepcopy(module, tensors)


def layers_with_experts(model: nn.Module) -> list[nn.Module]:
    """The decoder layer of each MoE layer; the model itself if it has no list of layers."""
    parents = parents_of(model)
    return [layer_of(experts, parents) for _, experts in experts_modules(model)]


def _find_looped(places: Sequence[nn.Module], experts: Any, seen: Observation) -> FoundSelector:
    """As `_find`; where a pass comes to the layer several times, it must choose alike each time."""
    turns = max(len(seen.calls.get(experts, ())), 1)
    found = _find(places, experts, seen.turn(0, turns))
    if found.selector is None:
        return found
    for at in range(1, turns):
        rows, ids, weights = seen.turn(at, turns).only(experts).tensors
        made = Routing.from_router(ids, weights, experts.expert_seat.num_experts)
        if not _agrees(found.selector, rows, made):
            return FoundSelector(None, f"its router chooses otherwise the {at + 1}. time in a pass")
    return found


def _find(places: Sequence[nn.Module], experts: Any, seen: Observation) -> FoundSelector:
    call = seen.call(experts)
    if call is None or len(call.tensors) != 3:
        return FoundSelector(None, "its experts are not called once with rows, ids and weights")
    rows, ids, weights = call.tensors
    reason = ""
    for place in dict.fromkeys(places):
        try:
            router = describe_router(place, experts, ids, weights, seen)
        except NotDescribed as error:
            reason = str(error)
        except Exception as error:
            # A probe of an unknown architecture may fail in any way, which must not stop loading.
            reason = f"probing raised {type(error).__name__}: {error}"
        else:
            if isinstance(router, OwnRouter):
                reason = "its router follows no rule that is known here"
                continue
            selector = _selector(router)
            made = Routing.from_router(ids, weights, experts.expert_seat.num_experts)
            if _agrees(selector, rows, made):
                return FoundSelector(selector)
            return FoundSelector(None, "its router reads other rows than its experts")
    return FoundSelector(None, reason)


def _selector(router: Router) -> Selector:
    weight = router.weight.weight
    assert isinstance(weight, Tensor)
    return Selector(weight, router.weight.bias, router.rule)


def _agrees(selector: Selector, rows: Tensor, made: Routing) -> bool:
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.shape[1] != selector.weight.shape[1]:
        return False
    scores = selector.scores(rows)
    ours = selector.select(scores)
    if rows.dtype == torch.float32:
        return torch.equal(ours.expert_ids, made.expert_ids) and torch.allclose(
            ours.weights, made.weights, rtol=_SAME_WEIGHTS
        )
    return _agrees_roughly(ours, made, selector.rule.ranking(scores), torch.finfo(rows.dtype).eps)


def _agrees_roughly(ours: Routing, made: Routing, ranking: Tensor, eps: float) -> bool:
    """Return whether a rule agrees with a router that rounds to half precision: the experts that
    only the router chooses are hardly worse than ours, and weights are about equal in most rows."""
    if ours.expert_ids.shape != made.expert_ids.shape or bool((made.expert_ids == UNUSED).any()):
        return False
    near = _ROUNDINGS * eps * ranking.where(ranking.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    worst = ranking.gather(1, ours.expert_ids).amin(-1, keepdim=True)
    if bool((ranking.gather(1, made.expert_ids) < worst - near).any()):
        return False
    equal = (ours.expert_ids == made.expert_ids).all(1)
    gap = (ours.weights - made.weights).abs()[equal]
    return 2 * len(gap) > len(equal) and bool((gap <= _ROUNDINGS * eps * made.weights.max()).all())


def describe_router(
    block: nn.Module, experts: nn.Module, ids: Tensor, weights: Tensor, seen: Observation
) -> Router | OwnRouter:
    """The router in ``block`` that gave its experts these ids and weights."""
    own = _own_module(block, experts, ids, weights, seen)
    whole = seen.only(block)
    size = whole.hidden.shape[-1]
    if own is not None:
        rows = torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            ids, weights = (out.to(whole.hidden.device) for out in own(rows))
        rows = rows.to(whole.hidden.device)
    else:
        rows = whole.hidden.reshape(-1, size)
    seat: Any = experts.expert_seat
    expected = Routing.from_router(ids, weights, seat.num_experts)
    for router in _routers(block, experts, seat.num_experts, ids.shape[-1]):
        scale = _scale(router, rows.float(), expected)
        if scale is not None:
            return replace(router, rule=replace(router.rule, scale=_exact(scale, block)))
    if own is None:
        raise NotDescribed("the router follows no rule that is known here")
    return OwnRouter(own)


def route(router: Router, rows: Tensor) -> Routing:
    """The decision for float32 rows ``(T, H)``."""
    return decide(router.rule, project(router.weight, rows))


def decide(rule: RouterRule, logits: Tensor) -> Routing:
    """The rule's decision for each row of logits ``(T, E)``; on a GPU by one kernel."""
    fits = logits.is_cuda and logits.shape[-1] <= MOST_SCORED
    if fits and triton_status()["name"] == "triton":
        return by_kernel(rule, logits)
    return rule.select(rule.scores(logits))


def by_kernel(rule: RouterRule, logits: Tensor, places: Tensor | None = None) -> Routing:
    """`decide` by Triton's kernel; ``(T,)`` places are negative in rows that visit nobody."""
    from kernels.triton import router

    ids, weights = router.decide(
        logits, min(rule.top_k, logits.shape[-1]), score=rule.score,
        correction_E=rule.correction, groups=rule.groups, groups_kept=rule.groups_kept,
        by_two=rule.group_score == "top2", renormalise=rule.renormalise, scale=rule.scale,
        threshold=rule.mixer_threshold, expert_scale_E=rule.expert_scale, places_T=places,
    )  # fmt: skip
    return Routing(ids, weights)


def _scale(router: Router, rows: Tensor, expected: Routing) -> float | None:
    """The factor of the weights with which the router gives these decisions; None if none does."""
    actual = route(router, rows)
    if not torch.equal(actual.expert_ids, expected.expert_ids):
        return None
    ours, theirs = actual.weights.detach(), expected.weights.detach()
    scale = float((theirs * ours).sum() / (ours * ours).sum())
    if bool((theirs - scale * ours).abs().max() > _TOLERANCE * theirs.abs().max()):
        return None
    return scale


def _exact(scale: float, block: nn.Module) -> float:
    """The exact value of a fitted scale: 1, or a number of the modules."""
    own = [v for m in block.modules() for v in vars(m).values() if isinstance(v, float)]
    return next((v for v in (1.0, *own) if abs(scale - v) <= _SAME_SCALE * abs(v)), scale)


def _routers(
    block: nn.Module, experts: nn.Module, num_experts: int, top_k: int
) -> Iterator[Router]:
    """All routers that the block's own tensors and numbers could be, likely ones first."""
    inside = set(experts.modules())
    modules = [module for module in block.modules() if module not in inside]
    tensors = [
        (module, name, tensor)
        for module in modules
        for name, tensor in (*module.named_parameters(recurse=False),
                             *module.named_buffers(recurse=False))
    ]  # fmt: skip
    vectors = [t.detach().float().reshape(-1) for _, _, t in tensors if t.numel() == num_experts]
    matrices = [
        (module, t) for module, _, t in tensors if t.ndim == 2 and t.shape[0] == num_experts
    ]
    groupings = _groupings(modules, num_experts)
    scores: tuple[Score, ...] = ("softmax", "sigmoid")
    for module, matrix in matrices:
        # A vector that is there is most likely used, and too small to show if it does not.
        for correction, bias in product([*vectors, None], [*vectors, None]):
            if bias is not None and bias is correction:
                continue
            weight = Projection(matrix.detach(), bias, module)
            for renormalise, groups, score in product((False, True), groupings, scores):
                rule = RouterRule(top_k, score, correction, *groups, renormalise)
                yield Router(weight, rule)
        for number in _numbers(modules):
            weight = Projection(matrix.detach(), None, module)
            yield Router(weight, RouterRule(top_k, "mixer", mixer_threshold=2 * number))


def _groupings(modules: list[nn.Module], num_experts: int) -> list[tuple[int, int, GroupScore]]:
    """Number of groups, groups kept and how groups are scored, from the modules' attributes."""
    counts = {
        value
        for module in modules
        for name, value in vars(module).items()
        if "group" in name and type(value) is int and value >= 1
    }
    kinds: tuple[GroupScore, ...] = ("top2", "max")
    restricted = [
        (groups, kept, kind)
        for groups, kept, kind in product(counts, counts, kinds)
        if kept < groups and num_experts % groups == 0 and (kind == "max" or groups < num_experts)
    ]
    return [*restricted, (1, 1, "max")]


def _numbers(modules: list[nn.Module]) -> list[float]:
    return [v for m in modules for v in vars(m).values() if isinstance(v, float) and 0 < v < 1]


def _own_module(
    block: nn.Module, experts: nn.Module, ids: Tensor, weights: Tensor, seen: Observation
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """The module that returned these ids and weights, as a function of rows."""
    inside = set(experts.modules())
    for module in block.modules():
        call = seen.call(module)
        if module is block or module in inside or call is None or len(call.outputs) < 2:
            continue
        outputs = [value if isinstance(value, Tensor) else None for value in call.outputs]
        id_at = next((i for i, v in enumerate(outputs) if v is not None and same(v, ids)), None)
        weight_at = next(
            (i for i, v in enumerate(outputs) if v is not None and same(v, weights)), None
        )
        if id_at is None or weight_at is None or len(call.inputs) != 1 or call.kwargs:
            continue

        exact = module if _is_exact(module) else _exact_copy(module)

        def forward(
            rows: Tensor, module: nn.Module = exact, i: int = id_at, w: int = weight_at
        ) -> tuple[Tensor, Tensor]:
            given = module(rows)
            return given[i], given[w]

        return forward
    return None
