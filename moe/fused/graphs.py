"""A decode step by description, recorded: what the device does is replayed and Python stays out.

Recordings are made for certain numbers of rows, when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.fused.base import Visitor, read_by
from moe.fused.description import Description, NotDescribed
from moe.fused.inputs import Inputs
from moe.fused.means import DeviceMeans, rotary_tables
from moe.fused.recording import Capture, CudaCapture, Recording
from moe.fused.walk import Walk, walk
from moe.kv import Work
from routing import Routing

_DOUBLING = 32
"""Rows up to which recordings are made for powers of two, and for multiples of it above."""


class GraphStep:
    """Runs a described model on a device.

    Args:
        description: whose tensors are on the device (`moe.fused.shadow`).
        dtype: of the trunk, and of keys and values.
        inside: runs experts without the host: ``(layer, rows, routing) -> rows``.
        capture: makes the recorder of a recording.

    Raises:
        NotDescribed: when called, where recording fails; the sequences are as they were.
    """

    def __init__(
        self,
        description: Description,
        device: torch.device,
        dtype: torch.dtype,
        inside: Visitor,
        capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._description, self._device, self._dtype = description, device, dtype
        self._inside, self._capture = inside, capture
        self._tables = rotary_tables(description)
        self._caches = 1 + max(layer.attention.layer for layer in description.layers)
        self._idle: dict[tuple[int, bool], list[Recording]] = {}

    def __call__(self, work: Sequence[Work], visit: Visitor) -> list[Tensor]:
        """Logits as of `moe.trunk.Trunk.lanes`; ``visit`` runs the experts between segments."""
        return self._run(work, visit)[0]

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, and of each MoE layer what was visited: nobody is asked to run experts."""
        return self._run(work, None)

    @torch.inference_mode()
    def _run(
        self, work: Sequence[Work], visit: Visitor | None
    ) -> tuple[list[Tensor], list[Routing]]:
        count = sum(len(item.token_ids) for item in work)
        rows = rows_for(count)
        # A step that sleeps at a layer keeps its recording; another one gets another.
        idle = self._idle.setdefault((rows, visit is None), [])
        recording = idle.pop() if idle else self._record(rows, alone=visit is None)
        try:
            recording.inputs.fill(work)
            logits, visited = recording.play(count, visit)
        finally:
            idle.append(recording)
        return read_by(work, logits), visited

    def _record(self, rows: int, alone: bool) -> Recording:
        inside = self._inside if alone else None
        try:
            inputs = Inputs(rows, self._caches, self._tables, self._device)
            return Recording(self._start, inputs, self._dtype, inside, self._capture())
        except Exception as error:
            # Memory, a driver's limits, an operation that cannot be recorded: none can be foreseen.
            raise NotDescribed(
                f"recording {rows} rows raised {type(error).__name__}: {error}"
            ) from error

    def _start(self, inputs: Inputs) -> Walk:
        return walk(self._description, inputs.tokens, DeviceMeans(inputs, self._dtype))


def rows_for(count: int) -> int:
    """Rows of the recording that takes ``count`` of them."""
    if count <= _DOUBLING:
        return 1 << (count - 1).bit_length()
    return -(-count // _DOUBLING) * _DOUBLING
