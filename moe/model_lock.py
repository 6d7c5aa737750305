"""One thread runs the model at a time, with torch's own defaults whatever the caller has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """torch's own default dtype and device, and no autocast, inside the block.

    transformers' code relies on the defaults where it means float32 and the CPU, and compiled
    kernels get addresses: they would write beyond the end of tensors half the size.
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


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The device as this thread's current one, inside the block.

    Kernels and graphs go to the current device, wherever their tensors are; each thread has its
    own, GPU 0 at first, and another model that it loads may change it.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class ModelLock:
    """Called for each step: threads share the model's one expert cache, so one steps at a time.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Reentrant: a step may collect a stream as garbage, which cancels its groups.
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock, plain_torch(), on_device(self._device):
            yield
