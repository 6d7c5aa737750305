"""Projections that read the same rows, as one matrix: one product takes the place of several.

`join` moves the weights of a model's layers so that those of such projections lie one behind the
other. They are still each layer's own tensors, and no byte is held twice. `as_one` finds weights
that lie so, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels import PlaneMatrix
from kernels.scales import BLOCK_ROWS
from moe.describe.description import (
    Attention,
    Description,
    Experts,
    FeedForward,
    LatentAttention,
    Projection,
)

Weight = Tensor | PlaneMatrix
_Part = TypeVar("_Part")


def join(description: Description, modules: Mapping[nn.Module, nn.Module]) -> None:
    """Move the weights of modules, one group at a time.

    Args:
        modules: what takes the place of each module of the description.
    """
    done = set[nn.Module]()  # layers may share modules
    for layer in description.layers:
        for part in (layer.attention, *_feeds(layer.feed)):
            leaves = [modules[projection.leaf] for projection in readers_of(part)]
            if done.isdisjoint(leaves) and len(set(leaves)) == len(leaves):
                _move(leaves)
            done.update(leaves)


def with_joined(description: Description) -> Description:
    """The description with `joined` of its parts, where their weights lie so."""
    layers = []
    for layer in description.layers:
        feed = layer.feed
        if isinstance(feed, FeedForward):
            feed = _with_joined(feed)
        elif feed.shared is not None:
            feed = replace(feed, shared=_with_joined(feed.shared))
        layers.append(replace(layer, attention=_with_joined(layer.attention), feed=feed))
    return replace(description, layers=tuple(layers))


def readers_of(part: Attention | LatentAttention | FeedForward) -> list[Projection]:
    """The projections of a part that read its rows, in the order in which they are joined."""
    if isinstance(part, FeedForward):
        return [part.gate, part.up]
    if isinstance(part, LatentAttention):
        return [part.q if part.q_a is None else part.q_a, part.kv_a]
    return [part.q, part.k, part.v]


def as_one(weights: Sequence[Weight]) -> Weight | None:
    """One matrix that has the rows of all weights and shares their memory; None where they do not
    lie one behind the other."""
    whole = [weight for weight in weights if isinstance(weight, Tensor)]
    planes = [weight for weight in weights if isinstance(weight, PlaneMatrix)]
    if len(whole) == len(weights):
        return _behind(whole)
    if len(planes) < len(weights) or not _alike(planes):
        return None
    found = [_behind(blobs) for blobs in zip(*map(_blobs, planes), strict=True)]
    known = [blob for blob in found if blob is not None]
    if len(known) < len(found):
        return None
    layout = replace(planes[0].layout, rows=sum(matrix.layout.rows for matrix in planes))
    return PlaneMatrix(layout, tuple(known[:-1]), known[-1])


def _feeds(feed: FeedForward | Experts) -> list[FeedForward]:
    if isinstance(feed, FeedForward):
        return [feed]
    return [] if feed.shared is None else [feed.shared]


def _with_joined(part: _Part) -> _Part:
    assert isinstance(part, (Attention, LatentAttention, FeedForward))
    joined = as_one([projection.weight for projection in readers_of(part)])
    return replace(part, joined=joined)


def _move(leaves: Sequence[nn.Module]) -> None:
    quantized = [leaf for leaf in leaves if isinstance(leaf, QuantizedLinear)]
    if len(quantized) == len(leaves):
        matrices = [leaf.matrix for leaf in quantized]
        if not _alike(matrices):
            return
        moved = [_side_by_side(blobs) for blobs in zip(*map(_blobs, matrices), strict=True)]
        for leaf, (*planes, scales) in zip(quantized, zip(*moved, strict=True), strict=True):
            leaf.hold(PlaneMatrix(leaf.layout, tuple(planes), scales))
        return
    weights = [getattr(leaf, "weight", None) for leaf in leaves]
    own = [weight for weight in weights if isinstance(weight, nn.Parameter)]
    if not quantized and len(own) == len(leaves) and len({_kind(weight) for weight in own}) == 1:
        for weight, part in zip(own, _side_by_side([w.detach() for w in own]), strict=True):
            weight.data = part


def _kind(weight: Tensor) -> tuple[object, ...]:
    return weight.dtype, weight.device, weight.shape[1:]


def _blobs(matrix: PlaneMatrix) -> tuple[Tensor, ...]:
    return *matrix.planes, matrix.scales


def _alike(matrices: Sequence[PlaneMatrix]) -> bool:
    """Return whether the blobs of such matrices, one behind the other, are those of one matrix."""
    kinds = {(replace(m.layout, rows=1), len(m.planes), m.scales.device) for m in matrices}
    whole = all(matrix.layout.rows % BLOCK_ROWS == 0 for matrix in matrices[:-1])
    return len(kinds) == 1 and whole


def _side_by_side(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of tensors that lie one behind the other."""
    return torch.cat(list(parts)).split([len(part) for part in parts])


def _behind(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that has the rows of all parts, if they lie one behind the other."""
    first, rows, end = parts[0], 0, parts[0].storage_offset()
    for part in parts:
        alike = _kind(part) == _kind(first) and part.is_contiguous()
        here = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not here or part.storage_offset() != end:
            return None
        rows, end = rows + len(part), end + part.numel()
    return first.as_strided((rows, *first.shape[1:]), first.stride())
