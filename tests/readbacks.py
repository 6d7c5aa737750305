"""What makes the host wait for a GPU, found on any device.

    assert readbacks(lambda: step(rows)) == []

Main memory stands for the device's, so a host's own arrays have to be numpy's: reading a tensor
counts as waiting for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import local
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

_WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique_consecutive", "_unique2",
    "equal", "repeat_interleave",
}  # fmt: skip
_METHODS = "tolist", "numpy", "cpu"  # which main memory answers without an operation
_ROOT = Path(__file__).parents[1]


class _Watch(local):
    """Of a thread: what was found; None while nobody looks."""

    found: list[str] | None = None

    def note(self, what: str) -> None:
        if self.found is not None:
            self.found.append(f"{what} at {_place()}")


_watch = _Watch()


class _Readbacks(TorchDispatchMode):
    """Notes operations whose result's shape or value the host has to know."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with self:  # in inference mode, torch shows some operations whole, `item` among them
            whole = func.decompose(*args, **(kwargs or {}))
        if whole is not NotImplemented:
            return whole
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _WAITING or masked:
            _watch.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def unseen() -> Iterator[None]:
    """What this thread runs in here is no part of what is watched."""
    before, _watch.found = _watch.found, None
    try:
        yield
    finally:
        _watch.found = before


def readbacks(function: Callable[[], object]) -> list[str]:
    """What made this thread wait, in turn, and where. Triton's interpreter, which reads what a
    device would, is not seen."""
    found: list[str] = []
    _watch.found = found
    with ExitStack() as patches:
        patches.callback(setattr, _watch, "found", None)
        for name in _METHODS:
            patches.enter_context(patch.object(Tensor, name, _noting(getattr(Tensor, name))))
        patches.enter_context(patch.object(GridExecutor, "__call__", _unseen_launch))
        with _Readbacks():
            function()
    return found


def waits(function: Callable[[], object]) -> bool:
    """Whether the function makes the host wait."""
    return bool(readbacks(function))


_launch = GridExecutor.__call__


def _unseen_launch(executor: GridExecutor, *arguments: object, **named: object) -> object:
    with unseen():
        return _launch(executor, *arguments, **named)


def _noting(true: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
        _watch.note(true.__name__)
        with unseen():
            return true(self, *arguments, **named)

    return method


def _place() -> str:
    """The innermost line of this repository that is running, but for this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_ROOT) and file != Path(__file__):
            return f"{file.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
