"""The decode step of a model on a GPU: described on a float32 copy, recorded, and proven.

Half precision hides small differences, and a GPU makes looking at numbers slow. So the model is
described, and the description is proven, on a copy without experts on the CPU (`Shadow`). Then the
same description of the original is recorded as CUDA graphs, which must be about as near to the copy
as transformers' own forward on the GPU is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels import PlaneMatrix, reads_nothing_back
from kernels.planes import arrangement_for
from moe.decode.cuda_graph import Capture, CudaCapture, GraphStep
from moe.decode.device_prompts import DevicePrompts
from moe.decode.joined import join, with_joined
from moe.decode.proof import (
    PROMPT_LENGTHS,
    TRIES,
    caches_of,
    prove,
    read_both_ways,
    read_plainly,
    read_prompts,
)
from moe.decode.reference import reference_step
from moe.decode.step import (
    DecodeForward,
    InsideExperts,
    RoutedExperts,
    StepFunction,
    why_outside,
)
from moe.describe.decoder import describe
from moe.describe.description import Description, NotDescribed, OwnRouter
from moe.describe.extremes import check_extremes
from moe.describe.observe import observe_random
from moe.describe.probe import (
    EXACT,
    ROUNDED,
    ComparedRun,
    compare,
    difference,
    gaps,
    random_prompts,
)
from moe.kv.device_blocks import DeviceBlocks
from moe.machine import memory_available
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.network.seam import experts_modules
from moe.network.stored_embedding import StoredEmbedding, backbone_dtype
from offload.layer import OffloadedExperts
from routing import Routing, RoutingStatistics

_CPU = torch.device("cpu")


def recorded_step(
    backbone: Backbone, experts: MoELayers, capture: Callable[[], Capture] = CudaCapture
) -> tuple[DecodeForward, str]:
    """The decode step of a model on a GPU, and how well it agrees with transformers' forward.

    Args:
        experts: run inside the graphs where no kernel of theirs needs the host, else between them.
        capture: see `GraphStep`.

    Raises:
        NotDescribed: it cannot be proven to be the same.
    """
    memory = None if backbone.blocks is None else backbone.blocks.memory
    if not isinstance(memory, DeviceBlocks):
        raise NotDescribed("keys and values are not in blocks on the device")
    dtype = backbone_dtype(backbone.model)
    shadow = Shadow.of(backbone)
    copied = describe(shadow.backbone.model, observe_random(shadow.backbone))
    check_extremes(copied, shadow.backbone)
    prove(shadow.backbone, copied, partial(reference_step, copied))
    description = shadow.cast(copied)
    rows = torch.empty(1, description.norm.weight.numel(), dtype=dtype, device=backbone.device)

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        own = experts.layers[layer]
        assert not isinstance(own, OffloadedExperts)
        return experts.forward(rows, routing.expert_ids, routing.weights, own)

    step = GraphStep(description, memory, routed, capture)
    reason = _prove_recorded(shadow, description, step)
    why_not = why_outside(experts, partial(reads_nothing_back, rows))
    if not why_not and any(isinstance(layer, OffloadedExperts) for layer in experts.layers):
        why_not = "not all of them are in memory"
    if not why_not:
        try:
            _prove_inside(backbone, experts, step, routed)
        except NotDescribed as error:
            why_not = str(error)
    forward = DecodeForward(step, experts, why_not)
    prompts = DevicePrompts(description, memory)
    why_plain = _why_no_prompts(shadow, prompts)
    if not why_plain:
        backbone.prompt_forward = lambda work: prompts.in_lane(work, experts.run)
    how = f"prompts by transformers ({why_plain})" if why_plain else "prompts described"
    return forward, f"{reason}; {how}; {forward.where}"


def _why_no_prompts(shadow: Shadow, prompts: DevicePrompts) -> str:
    """Why prompts are left to transformers' modules; empty if described layers can read them."""
    if prompts.why_not:
        return prompts.why_not
    try:
        _prove_prompts(shadow, prompts)
    except Exception as error:  # an architecture may do anything
        return f"{type(error).__name__}: {error}"
    return ""


@torch.inference_mode()
def _prove_prompts(shadow: Shadow, prompts: DevicePrompts) -> None:
    """Compare prompts on the GPU with the float32 copy, as `_prove_recorded` does steps."""
    original, copy = shadow.original, shadow.backbone
    layers = caches_of(prompts.description)
    for attempt in range(TRIES):
        exact, theirs, ours = read_prompts(original, [copy, original], prompts, original, attempt)
        try:
            compare(exact, ours, layers, replace(ROUNDED, noise=gaps(exact, theirs, layers)))
            return
        except NotDescribed as error:
            failure = error
    raise failure


@torch.inference_mode()
def _prove_recorded(shadow: Shadow, description: Description, step: StepFunction) -> str:
    """Compare the step on the GPU with the float32 copy; returns how near it comes, for people.

    Args:
        description: proven on the copy.

    Raises:
        NotDescribed: transformers' own forward on the GPU comes clearly nearer.
    """
    layers = caches_of(description)
    for attempt in range(TRIES):
        exact, _, _ = read_both_ways(shadow.backbone, lambda _work, _visit: [], attempt)
        theirs, ours, _ = read_both_ways(shadow.original, step, attempt)
        noise = gaps(exact, theirs, layers)
        try:
            found = compare(exact, ours, layers, replace(ROUNDED, noise=noise))
        except NotDescribed as error:
            failure = error
            continue
        logits = noise["logits"].size
        return f"as near to float32 as transformers' forward ({found:.1e}, {logits:.1e})"
    raise failure


@torch.inference_mode()
def _prove_inside(
    backbone: Backbone, experts: MoELayers, step: GraphStep, routed: RoutedExperts
) -> None:
    """Raises `NotDescribed` if a step with experts inside gives other logits than one that has them
    run by the host."""
    tokens = random_prompts(backbone, [1] * len(PROMPT_LENGTHS))
    room = max(PROMPT_LENGTHS) + 1
    run = ComparedRun([backbone.new_cache(room).kv for _ in tokens])
    read_plainly(backbone, [t * n for t, n in zip(tokens, PROMPT_LENGTHS, strict=True)], run)
    work = [Work(t, cache) for t, cache in zip(tokens, run.caches, strict=True)]
    again = [replace(item, cache=item.cache.kv.fork(room, item.cache.length)) for item in work]
    unused = RoutingStatistics([layer.num_experts for layer in experts.layers])
    actual = step.inside(again, InsideExperts(unused, "decode", ()))
    expected, dtype = torch.cat(step(work, routed)), backbone_dtype(backbone.model)
    gap = difference(torch.cat(actual), expected)
    if not gap <= max(EXACT.values, 8 * torch.finfo(dtype).eps):
        raise NotDescribed(f"logits differ by {gap:.1e} with experts inside")


@dataclass(frozen=True)
class Shadow:
    """A float32 copy of a backbone on the CPU, for the time of the proof.

    Attributes:
        backbone: the copy.
        original: the backbone on the GPU.
    """

    backbone: Backbone
    original: Backbone

    @classmethod
    def of(cls, original: Backbone) -> Shadow:
        """Copy a backbone; raises `NotDescribed` if the copy does not fit into memory."""
        network = original.model
        size = sum(4 * parameter.numel() for parameter in network.parameters())
        free = memory_available()
        if free is not None and size > free:
            raise NotDescribed(f"a float32 copy of the trunk takes {size} of {free} bytes left")
        # Seats lead to the experts, which are no part of the copy: given here, they are not copied.
        shared = [module.expert_seat for _, module in experts_modules(network)]
        tensors = {id(t): _copied(t) for t in chain(network.parameters(), network.buffers())}
        copy = deepcopy(network, {id(seat): seat for seat in shared} | tensors)
        for mine, theirs in zip(copy.modules(), network.modules(), strict=True):
            if isinstance(mine, StoredEmbedding):
                mine.give(torch.float32)
            if isinstance(mine, QuantizedLinear) and isinstance(theirs, QuantizedLinear):
                matrix = theirs.matrix.for_device(_CPU)  # faster there than here
                planes = tuple(plane.to(_CPU) for plane in matrix.planes)
                mine.layout = matrix.layout
                mine.hold(replace(matrix, planes=planes, scales=mine.scales))
        backbone = Backbone(copy)
        backbone.set_packed(original.packed)
        return cls(backbone, original)

    def cast(self, description: Description) -> Description:
        """Turn a description of the copy into one of the original: views of copied tensors become
        the same views of the original's, whose weights are joined (`moe.decode.joined`).

        Raises:
            NotDescribed: a router has no known rule; calling its module might read from the device.
        """
        for layer in description.layers:
            if isinstance(getattr(layer.feed, "router", None), OwnRouter):
                raise NotDescribed("a router follows no rule that is known here")
        copy, network = self.backbone.model, self.original.model
        modules = dict(zip(copy.modules(), network.modules(), strict=True))
        join(description, modules)
        at_home: Description = moved(description, modules, self.homes(), self.original.device)
        return with_joined(at_home)

    def homes(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By storage address, each tensor of the copy and its original."""
        copy, network = self.backbone.model, self.original.model
        mine = chain(copy.parameters(), copy.buffers())
        theirs = chain(network.parameters(), network.buffers())
        return {
            copied.untyped_storage().data_ptr(): (copied, tensor.detach())
            for copied, tensor in zip(mine, theirs, strict=True)
        }


def _copied(tensor: Tensor) -> Tensor:
    """In main memory. Parameters become float32 there, as the device may have no room for that;
    buffers stay as they are (scales of bit planes are halves)."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.cpu()
    return nn.Parameter(tensor.detach().cpu().float(), requires_grad=False)


def moved(
    part: Any,
    modules: Mapping[nn.Module, nn.Module],
    homes: Mapping[int, tuple[Tensor, Tensor]],
    device: torch.device,
) -> Any:
    """A description, or a part of one, with its modules and tensors replaced.

    Args:
        modules: what takes the place of each.
        homes: by storage address, a copied tensor and its original, whose views replace its views.
        device: where all tensors go.
    """
    if isinstance(part, nn.Module):
        return modules[part]
    if isinstance(part, Tensor):
        return _at_home(part, homes).to(device)
    if isinstance(part, PlaneMatrix):
        # An arrangement moves bytes within blocks of rows, so the same views have the same rows.
        *planes, scales = (_at_home(blob, homes, 1) for blob in (*part.planes, part.scales))
        layout = replace(part.layout, arrangement=arrangement_for(device))
        bias = None if part.bias is None else part.bias.to(device)
        return PlaneMatrix(layout, tuple(planes), scales, bias)
    if isinstance(part, tuple):
        return tuple(moved(item, modules, homes, device) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        return replace(
            part, **{name: moved(value, modules, homes, device) for name, value in own.items()}
        )
    return part


def _at_home(
    view: Tensor, homes: Mapping[int, tuple[Tensor, Tensor]], least_dim: int = 2
) -> Tensor:
    """The same view of a copied tensor's original; vectors, which stay float32, and other tensors
    stay themselves."""
    copied, original = homes.get(view.untyped_storage().data_ptr(), (None, view))
    if copied is None or view.ndim < least_dim or copied.stride() != original.stride():
        return view
    offset = view.storage_offset() - copied.storage_offset() + original.storage_offset()
    return original.as_strided(view.shape, view.stride(), offset)
