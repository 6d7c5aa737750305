"""What makes the host wait for a GPU, found on any device.

    assert readbacks(lambda: step(rows)) == []

Main memory stands for the device's: to read a tensor counts as waiting for it. Only what a function
makes without naming a device is the host's, and what follows from that alone. Between the two, each
copy counts that does not say ``non_blocking=True`` (`moe.settings.device.to_device` does): of
tensors, of lists that become tensors or indices, of indices of the host. Not found: events that the
host waits for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import local
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

_WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique_consecutive", "_unique2",
    "equal", "repeat_interleave",
}  # fmt: skip
_METHODS = "tolist", "numpy", "cpu", "to", "new_tensor"
"""Of tensors: what main memory answers without an operation, or by one that shows no copy."""
_ITEMS = "__getitem__", "__setitem__"
_MAKERS = "tensor", "as_tensor", "from_numpy", "empty", "zeros", "ones", "full", "arange"
_INDEXING = "index", "index_put", "index_put_"
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
        kwargs = kwargs or {}
        with self:  # in inference mode, torch shows some operations whole, `item` among them
            whole = func.decompose(*args, **kwargs)
        if whole is not NotImplemented:
            return whole
        if _watch.found is None:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = [getattr(each, "on_host", False) for each in given]
        apart = any(on_host) and not all(on_host)
        masked = name in _INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        waits = name == "copy_" and True not in (*args[2:], kwargs.get("non_blocking"))
        copied = apart and (name in _INDEXING or waits)
        read = (name in _WAITING or masked) and not all(on_host)
        if copied or read:
            _watch.note(name)
        made = func(*args, **kwargs)
        if given and all(on_host):
            _give_to_host(made)
        return made


class _Items(TorchFunctionMode):
    """Notes lists as indices. Not by a patch: a type whose items were patched counts as a sequence
    from then on, and numpy asks tensors without dimensions for their length."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = _noting(func) if getattr(func, "__name__", "") in _ITEMS else func
        return own(*args, **(kwargs or {}))


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
        for name in _MAKERS:
            patches.enter_context(patch.object(torch, name, _making(getattr(torch, name))))
        with _Items(), _Readbacks():
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
    name = true.__name__

    def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
        on_host, to = getattr(self, "on_host", False), _target(name, arguments, named)
        if _watch.found is None or to is None or on_host == (to == "cpu"):
            return true(self, *arguments, **named)
        waits = not named.get("non_blocking")
        if waits:
            _watch.note(name)
        with unseen():
            made = true(self, *arguments, **named)
            if isinstance(made, Tensor):
                made = made.detach()  # main memory has copied nothing: another object
        if waits and to == "cpu":
            _give_to_host(made)
        return made

    return method


def _target(
    name: str, arguments: Sequence[Any], named: dict[str, Any]
) -> str | torch.device | None:
    """Where a method of a tensor brings numbers: "cpu", a device, or None: they stay."""
    if name == "to":
        given = named.get("device", *arguments[:1])
        return given if isinstance(given, str | torch.device) else None
    if name in _ITEMS:
        index = arguments[0] if isinstance(arguments[0], tuple) else arguments[:1]
        listed = any(isinstance(own, Sequence | np.ndarray) for own in index)
        return "cpu" if listed else None  # the other way, where it counts as much
    return "cpu"


def _making(true: Callable[..., Any]) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        if _watch.found is None:
            return true(*arguments, **named)
        with unseen():
            made = true(*arguments, **named)
        if named.get("device") is None:
            if not _place().startswith("kernels/cpu/"):  # these stand for a device's kernels
                _give_to_host(made)
        elif true.__name__ in ("tensor", "as_tensor"):
            _watch.note(true.__name__)
        return made

    return function


def _give_to_host(made: Any) -> None:
    for each in tree_leaves(made):
        if isinstance(each, Tensor):
            each.on_host = True  # type: ignore[attr-defined]


def _place() -> str:
    """The innermost line of this repository that is running, but for this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_ROOT) and file != Path(__file__):
            return f"{file.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
