"""A model's trunk copied to the CPU in float32, and what is said of it said of the original.

Half precision hides small differences and a GPU makes looking at numbers slow, so a model there is
described, and its description proven, on a copy. No weight stays copied: what is a view of a copied
tensor becomes the same view of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moe.embeddings import StoredEmbedding
from moe.fused.description import Description, NotDescribed, OwnRouter
from moe.machine import memory_available
from moe.seam import experts_modules
from moe.trunk import Trunk


@dataclass(frozen=True)
class Shadow:
    """A float32 copy of a trunk on the CPU, whose experts are left out.

    Attributes:
        trunk: the copy.
        original: what it is a copy of.
    """

    trunk: Trunk
    original: Trunk

    @classmethod
    def of(cls, original: Trunk) -> Shadow:
        """Raises `NotDescribed` where the copy does not fit into memory."""
        network = original.model
        size = sum(4 * parameter.numel() for parameter in network.parameters())
        free = memory_available()
        if free is not None and size > free:
            raise NotDescribed(f"a float32 copy of the trunk takes {size} of {free} bytes left")
        # Whoever serves the experts is no part of the copy: found here, it is not copied.
        shared = [module.expert_seat for _, module in experts_modules(network)]
        tensors = {id(t): _copied(t) for t in chain(network.parameters(), network.buffers())}
        copy = deepcopy(network, {id(seat): seat for seat in shared} | tensors)
        for module in copy.modules():
            if isinstance(module, StoredEmbedding):
                module.given = torch.float32
        trunk = Trunk(copy)
        trunk.set_packed(original.packed)
        return cls(trunk, original)

    def cast(self, description: Description) -> Description:
        """A description of the copy as one of the original.

        Raises:
            NotDescribed: a router is called itself, and might read from the device.
        """
        for layer in description.layers:
            if isinstance(getattr(layer.feed, "router", None), OwnRouter):
                raise NotDescribed("a router follows no rule that is known here")
        copy, network = self.trunk.model, self.original.model
        modules = dict(zip(copy.modules(), network.modules(), strict=True))
        mine = chain(copy.parameters(), copy.buffers())
        theirs = chain(network.parameters(), network.buffers())
        homes = {
            copied.untyped_storage().data_ptr(): (copied, tensor.detach())
            for copied, tensor in zip(mine, theirs, strict=True)
        }
        at_home: Description = moved(description, modules, homes, self.original.device)
        return at_home


def _copied(tensor: Tensor) -> Tensor:
    """Parameters become float32; buffers stay as they are (scales of bit planes are halves)."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.cpu()
    return nn.Parameter(tensor.detach().float().cpu(), requires_grad=False)


def moved(
    part: Any,
    modules: Mapping[nn.Module, nn.Module],
    homes: Mapping[int, tuple[Tensor, Tensor]],
    device: torch.device,
) -> Any:
    """A description, or a part of one, with its modules and tensors replaced.

    Args:
        modules: what takes the place of each.
        homes: by the address of their memory, tensors and those whose views take their place.
        device: of all tensors.
    """
    if isinstance(part, nn.Module):
        return modules[part]
    if isinstance(part, Tensor):
        return _at_home(part, homes).to(device)
    if isinstance(part, tuple):
        return tuple(moved(item, modules, homes, device) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        return replace(
            part, **{name: moved(value, modules, homes, device) for name, value in own.items()}
        )
    return part


def _at_home(view: Tensor, homes: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
    """The same view of the original of a copied tensor; vectors, and anything else, themselves."""
    copied, original = homes.get(view.untyped_storage().data_ptr(), (None, view))
    if copied is None or view.ndim < 2 or copied.stride() != original.stride():
        return view
    offset = view.storage_offset() - copied.storage_offset() + original.storage_offset()
    return original.as_strided(view.shape, view.stride(), offset)
