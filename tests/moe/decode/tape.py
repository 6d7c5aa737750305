"""A stand-in for CUDA graphs on the CPU: what is recorded is replayed at the same addresses.

Every operation of torch and every launch of a Triton kernel is put on a tape with its tensors; to
replay is to run them again and to write each result where the first one went. Python does not run,
so that whatever was not in a recorded tensor is as it was when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

Result = TypeVar("Result")

_LAUNCH = InterpretedFunction.run
_READS = (
    "item",
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique",
)
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Tape(TorchDispatchMode):
    """As `moe.decode.cuda_graph.CudaCapture`."""

    def __call__(self, function: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
        self._steps: list[Callable[[], object]] = []

        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            def run() -> None:
                with _disable_current_modes():
                    _LAUNCH(kernel, *args, **options)

            run()
            self._steps.append(run)

        InterpretedFunction.run = launch
        try:
            with self:
                result = function()
        finally:
            InterpretedFunction.run = _LAUNCH
        steps = self._steps
        return lambda: [step() for step in steps], result

    def beside(self, function: Callable[[], object]) -> Callable[[], Callable[[], object]]:
        """As late as may be: only what is joined has happened."""
        replay, _ = self(function)
        return lambda: replay

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in _READS or (name == "copy_" and len({a.device for a in args[:2]}) > 1):
            raise RuntimeError(f"{name} waits for the device, which no graph can hold")
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if name not in _EMPTY:
            self._steps.append(lambda: _again(function, args, kwargs, made))
        return made


def _again(function: Any, args: Any, kwargs: Any, made: Any) -> None:
    for before, now in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
            before.copy_(now)
