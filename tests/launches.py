"""What a GPU would be asked for: operations of torch, counted on a CPU or on meta tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Names what a device would launch: operations of torch that are no views, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with self:  # in inference mode, torch shows some operations whole, casts among them
            whole = function.decompose(*args, **(kwargs or {}))
        if whole is not NotImplemented:
            return whole
        name = function._schema.name.removeprefix("aten::")
        made = function(*args, **(kwargs or {}))
        # Some give a view or a copy, as it turns out: `to`, `contiguous`, `flatten`.
        is_view = function.is_view and (not isinstance(made, Tensor) or _same_memory(made, args[0]))
        if not is_view and "empty" not in name and name not in _FREE:
            self.names.append(name)
        return made


_FREE = ("_unsafe_view", "detach", "lift_fresh", "_reshape_alias", "promote_types")


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
