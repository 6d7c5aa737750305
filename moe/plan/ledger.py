"""Counting the memory of tensors: those that an object holds, and those that come and go.

Works on the meta device, where tensors have sizes and take no memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, for as long as they live.

    Attributes:
        peak: most bytes alive after an operation.
        operations: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.operations = 0
        self._total = 0  # with those that are gone since the last look
        # A weak reference keeps the address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._total += storage.nbytes()
        if self._total > self.peak:
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes alive now."""
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        self._total -= sum(self._storages.pop(key)[1] for key in gone)
        return self._total


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object holds, each storage counted once."""
    sizes: dict[int, int] = {}
    seen: dict[int, object] = {}
    left = [root]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            sizes[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple | set):
            left += item
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            left += vars(item).values()
    return sum(sizes.values())
