"""Describes a decoder model from one observed pass.

The wiring of a layer is not read off names. Its norms, attention and feed-forward are the modules
that were called; comparing tensors shows what each of them read and where its output went.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from moe.describe.attention import describe_attention, describe_latent, is_latent
from moe.describe.description import (
    Description,
    Experts,
    FeedForward,
    Layer,
    Norm,
    NotDescribed,
    Projection,
)
from moe.describe.observe import AttentionCall, Observation, ObservedCall, RotaryModules
from moe.describe.parts import (
    ACTIVATIONS,
    child_of,
    close,
    describe_activation,
    describe_norm,
    describe_projection,
    halves,
    same,
)
from moe.describe.routers import describe_router
from moe.network.seam import layer_of, parents_of


@torch.inference_mode()
def describe(model: nn.Module, seen: Observation) -> Description:
    """The model, as far as one pass shows it; `moe.describe.extremes` and `moe.decode.proof`
    have to confirm it.

    Raises:
        NotDescribed: the message says which part is not known, and why.
    """
    modules = decoder_layers(model, seen)
    rotaries = RotaryModules(seen)
    layers = []
    for index, (module, attention) in enumerate(modules):
        try:
            layers.append(_describe_layer(module, attention, seen, rotaries))
        except NotDescribed as error:
            raise NotDescribed(f"layer {index}: {error}") from error
    first, last = (seen.only(modules[i][0]) for i in (0, -1))
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    embedded = ratio(first.hidden, seen.only(embedding).output)
    if embedded is None:
        raise NotDescribed("the first layer reads something else than scaled embeddings")
    head = model.get_output_embeddings()  # type: ignore[operator]
    scale, softcap = _logits(model, seen.only(head), seen.logits)
    return Description(
        embedding=embedding,
        embedding_scale=embedded,
        layers=tuple(layers),
        norm=_final_norm(seen, last.output, seen.only(head).hidden),
        head=describe_projection(head),
        logit_scale=scale,
        logit_softcap=softcap,
    )


def decoder_layers(model: nn.Module, seen: Observation) -> list[tuple[nn.Module, AttentionCall]]:
    """Decoder layers in order, each with its attention."""
    parents = parents_of(model)
    found = [(layer_of(call.module, parents), call) for call in seen.attention]
    stacks = {parents.get(module) for module, _ in found}
    stack = next(iter(stacks)) if len(stacks) == 1 else None
    if not isinstance(stack, nn.ModuleList):
        raise NotDescribed("the layers with attention are no single stack")
    for index, layer in enumerate(stack):
        if index >= len(found) or found[index][0] is not layer:
            raise NotDescribed(f"layer {index} has no attention, or more than one")
    if any(
        not same(seen.only(a).output, seen.only(b).hidden) for (a, _), (b, _) in pairwise(found)
    ):
        raise NotDescribed("something lies between the layers")
    return found


def _describe_layer(
    layer: nn.Module, attention: AttentionCall, seen: Observation, rotaries: RotaryModules
) -> Layer:
    whole = seen.only(layer)
    children = [child for child in layer.children() if seen.call(child) is not None]
    norms = [child for child in children if is_norm(child)]
    attentions = [child for child in children if attention.module in child.modules()]
    blocks = [child for child in children if child not in norms and child not in attentions]
    if len(attentions) != 1 or not blocks:
        raise NotDescribed("no attention and feed-forward block side by side")
    attend = seen.only(attentions[0])
    attention_norm = _before(seen, norms, whole.hidden, attend.hidden)
    feed_calls = [seen.only(block) for block in blocks]
    if not all(same(call.hidden, feed_calls[0].hidden) for call in feed_calls):
        raise NotDescribed("its feed-forward blocks read different rows")
    middle, feed_norm = _source(seen, norms, feed_calls[0].hidden)
    attention_scale, attention_post_norm = _added(
        seen, norms, whole.hidden, attend.output, middle, "attention"
    )
    made = torch.stack([call.output.float().reshape(-1) for call in feed_calls]).sum(0)
    if len(feed_calls) == 1:
        made = feed_calls[0].output
    feed_scale, feed_post_norm = _added(seen, norms, middle, made, whole.output, "feed-forward")
    describe = describe_latent if is_latent(attention.module) else describe_attention
    return Layer(
        attention=describe(attention, seen, rotaries),
        feed=describe_feed(blocks, seen),
        attention_norm=attention_norm,
        attention_post_norm=attention_post_norm,
        feed_norm=feed_norm,
        feed_post_norm=feed_post_norm,
        attention_scale=attention_scale,
        feed_scale=feed_scale,
    )


def _before(seen: Observation, norms: Sequence[nn.Module], x: Tensor, read: Tensor) -> Norm | None:
    """The norm between ``x`` and the rows that a block read; None if it read ``x`` itself."""
    source, norm = _source(seen, norms, read)
    if not same(source, x):
        raise NotDescribed("its attention reads something else than the layer's normed input")
    return norm


def _source(
    seen: Observation, norms: Sequence[nn.Module], read: Tensor
) -> tuple[Tensor, Norm | None]:
    """The source of ``read``: the input of the norm that returned it, or ``read`` itself."""
    for module in norms:
        call = seen.only(module)
        if same(call.output, read):
            return call.hidden, describe_norm(module, call.hidden.shape[-1])
    return read, None


def _added(
    seen: Observation, norms: Sequence[nn.Module], x: Tensor, branch: Tensor, total: Tensor,
    what: str,
) -> tuple[float, Norm | None]:  # fmt: skip
    """Scale and norm with which ``branch`` was added to ``x`` to give ``total``."""
    norm = None
    for module in norms:
        call = seen.only(module)
        if same(call.hidden, branch) or close(call.hidden, branch, 1e-6):
            branch, norm = call.output, describe_norm(module, call.hidden.shape[-1])
            break
    added = total.float().reshape(-1) - x.float().reshape(-1)
    scale = ratio(added, branch.float(), total.float())
    if scale is None:
        raise NotDescribed(f"its {what} is not simply added to what it read")
    return scale, norm


def _final_norm(seen: Observation, x: Tensor, read: Tensor) -> Norm:
    for module, calls in seen.calls.items():
        made = calls[0].output if is_norm(module) and same(calls[0].hidden, x) else None
        if made is not None and same(made, read):
            return describe_norm(module, x.shape[-1])
    raise NotDescribed("the head reads something else than the normed output of the last layer")


def _logits(model: nn.Module, head: ObservedCall, logits: Tensor) -> tuple[float, float | None]:
    """Scale and soft cap between the head's rows and the logits."""
    config: Any = model.config
    softcap = getattr(config.get_text_config(decoder=True), "final_logit_softcapping", None)
    if softcap and close(softcap * torch.tanh(head.output.float() / softcap), logits, 1e-5):
        return 1.0, float(softcap)  # tried first, as small logits hardly show it
    scale = ratio(logits, head.output.float())
    if scale is not None:
        return scale, None
    raise NotDescribed("logits are not what the head gives, scaled or capped")


def is_norm(module: nn.Module) -> bool:
    """Return whether a module may be a norm: it has nothing but vectors."""
    own = list(module.parameters())
    return (
        not any(True for _ in module.children())
        and len(own) <= 2
        and all(parameter.ndim == 1 for parameter in own)
    )


def describe_feed(blocks: Sequence[nn.Module], seen: Observation) -> FeedForward | Experts:
    """One block, or routed experts with a shared one beside them (all read the same rows)."""
    routed = [block for block in blocks if _experts(block) is not None]
    if len(blocks) == 1 and not routed:
        return describe_mlp(blocks[0], seen)
    if len(routed) != 1 or len(blocks) > 2:
        raise NotDescribed("a layer with several feed-forward blocks")
    beside = [block for block in blocks if block is not routed[0]]
    return _describe_experts(routed[0], beside[0] if beside else None, seen)


def describe_mlp(module: nn.Module, seen: Observation) -> FeedForward:
    """Raises `NotDescribed` where the module does more than its three projections."""
    last = child_of(module, ("down_proj", "output_linear"))
    (gate, up), rows = _first_projections(module, seen)
    if last is None:
        raise NotDescribed(f"{type(module).__name__} has no down_proj")
    made = seen.only(last)
    if not same(made.output, seen.only(module).output):
        raise NotDescribed(f"{type(module).__name__} does more than its three projections")
    activation = describe_activation(rows[0], rows[1], made.hidden)
    return FeedForward(gate, up, describe_projection(last), activation)


def check_feed(feed: FeedForward | Experts, seen: Observation) -> None:
    """Raise `NotDescribed` where dense or shared experts of another pass are not as described."""
    dense = feed.shared if isinstance(feed, Experts) else feed
    if dense is None:
        return
    made = [seen.only(part.leaf).output for part in (dense.gate, dense.up)]
    if dense.gate.leaf is dense.up.leaf:
        made = list(made[0].chunk(2, -1))
    inner = ACTIVATIONS[dense.activation](made[0].float()) * made[1].float()
    if not close(inner, seen.only(dense.down.leaf).hidden):
        raise NotDescribed("the feed-forward does more than multiply by an activation")


def check_logits(description: Description, model: nn.Module, seen: Observation) -> None:
    """Raise `NotDescribed` where the logits of another pass are not as described."""
    head = seen.only(model.get_output_embeddings())  # type: ignore[operator]
    scale, softcap = _logits(model, head, seen.logits)
    if softcap != description.logit_softcap or abs(scale / description.logit_scale - 1) > 1e-4:
        raise NotDescribed("logits are not what the head gives, scaled or capped")


def _first_projections(
    module: nn.Module, seen: Observation
) -> tuple[tuple[Projection, Projection], list[Tensor]]:
    """The gate and up projections, and the rows that they returned."""
    gate, up = (child_of(module, (name,)) for name in ("gate_proj", "up_proj"))
    if gate is not None and up is not None:
        rows = [seen.only(gate).output, seen.only(up).output]
        return (describe_projection(gate), describe_projection(up)), rows
    both = child_of(module, ("gate_up_proj", "input_linear"))
    if both is None:
        raise NotDescribed(f"{type(module).__name__} has no gate_proj, up_proj and down_proj")
    return halves(describe_projection(both)), list(seen.only(both).output.chunk(2, -1))


def _describe_experts(block: nn.Module, beside: nn.Module | None, seen: Observation) -> Experts:
    module = _experts(block)
    assert module is not None
    whole, call = seen.only(block), seen.only(module)
    if not same(call.hidden, whole.hidden):
        raise NotDescribed("experts read something else than the layer's feed-forward rows")
    if len(call.tensors) != 3:
        raise NotDescribed("an experts module takes something else than rows, ids and weights")
    _, ids, weights = call.tensors
    others = [child for child in block.modules() if child is not block and seen.call(child)]
    router = describe_router(block, module, ids, weights, seen)
    seat: Any = module.expert_seat
    if beside is not None:
        if not same(whole.output, call.output):
            raise NotDescribed("routed experts have two shared experts beside them")
        shared = describe_mlp(beside, seen)
        return Experts(seat.layer, seat.num_experts, router, shared, None, 1.0)
    return Experts(seat.layer, seat.num_experts, router, *_combination(whole, call, others, seen))


def _combination(
    whole: ObservedCall, call: ObservedCall, others: Sequence[nn.Module], seen: Observation
) -> tuple[FeedForward | None, Projection | None, float]:
    """``whole = scale * experts + sigmoid(gate) * shared``; the last two may be absent."""
    routed, total = _float(call.output), _float(whole.output)
    scale = ratio(total, routed)
    if scale is not None:
        return None, None, scale
    for child in others:
        mlp = seen.call(child)
        if not _is_mlp(child) or mlp is None or not same(mlp.hidden, whole.hidden):
            continue
        output = _float(mlp.output)
        for gate in [None, *(c for c in others if getattr(c, "out_features", 0) == 1)]:
            gated = output
            if gate is not None:
                made = seen.call(gate)
                gated = output * torch.sigmoid(_float(made.output, 1)) if made else output
            scale = ratio(total - gated, routed, total)
            if scale is not None:
                projection = describe_projection(gate) if gate is not None else None
                return describe_mlp(child, seen), projection, scale
    raise NotDescribed("what is added to the routed experts is no shared expert that is known here")


def ratio(total: Tensor, part: Tensor, size: Tensor | None = None) -> float | None:
    """The constant c with ``c * part = total``, exact if it is 1; None if there is none."""
    total, part = total.reshape(-1).double(), part.reshape(-1).double()
    if total.shape != part.shape or not bool(part.any()):
        return None
    constant = float((total @ part) / (part @ part))
    constant = 1.0 if abs(constant - 1) < 1e-5 else constant
    scale = (total if size is None else size.reshape(-1)).abs().max().clamp_min(1e-30)
    return constant if bool((total - constant * part).abs().max() <= 2e-5 * scale) else None


def _is_mlp(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and hasattr(module, "down_proj")


def _experts(block: nn.Module) -> nn.Module | None:
    return next((m for m in block.modules() if hasattr(m, "expert_seat")), None)


def _float(states: Tensor, size: int | None = None) -> Tensor:
    return states.float().reshape(-1, states.shape[-1] if size is None else size)
