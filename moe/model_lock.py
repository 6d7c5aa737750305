"""Whose turn it is to run the model, and what torch does meanwhile where nobody says otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """torch's own default dtype and device and no autocast, whatever the caller has chosen.

    transformers' code leaves float32 and the CPU out where it means them, and compiled kernels are
    handed addresses: tensors half the size would be written beyond their end.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class ModelLock:
    """Called for each step: threads take turns, as they use the model's one cache of experts."""

    def __init__(self) -> None:
        # Reentrant: a step may collect a stream as garbage, which cancels its groups.
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock, plain_torch():
            yield
