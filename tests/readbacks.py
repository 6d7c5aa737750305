"""A mode in which what makes the host wait for a GPU raises, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique_consecutive", "_unique2",
    "equal", "repeat_interleave",
}  # fmt: skip
_METHODS = "tolist", "numpy", "cpu"  # which main memory answers without an operation


class ReadbackError(Exception):
    """The host would have waited."""


class _NoReadback(TorchDispatchMode):
    """Raises at operations whose result's shape or value the host has to know."""

    watching = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if _NoReadback.watching and (name in _WAITING or masked):
            raise ReadbackError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def unseen() -> Iterator[None]:
    """What runs in here is no part of what is watched."""
    before, _NoReadback.watching = _NoReadback.watching, False
    try:
        yield
    finally:
        _NoReadback.watching = before


def waits(function: Callable[[], object]) -> bool:
    """Whether the function makes the host wait."""
    with ExitStack() as patches:
        for name in _METHODS:
            patches.enter_context(patch.object(Tensor, name, _raising(getattr(Tensor, name))))
        try:
            with _NoReadback():
                function()
        except ReadbackError:
            return True
    return False


def _raising(true: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
        if _NoReadback.watching:
            raise ReadbackError(f"{true.__name__} waits for the device")
        return true(self, *arguments, **named)

    return method
