"""Which rotary module made the position embeddings that a layer was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe.fused.description import NotDescribed
from moe.fused.observe import Call, Observation
from moe.fused.parts import same
from moe.fused.rotary_table import RotaryTable


class Rotaries:
    """The rotary modules of a model: tables by the embeddings that one observed pass made."""

    def __init__(self, seen: Observation) -> None:
        self._made = []
        for module, calls in seen.calls.items():
            if any(True for _ in module.children()) or any(True for _ in module.parameters()):
                continue
            for call in calls:
                if any(_is_positions(value, seen.positions) for value in call.tensors):
                    self._made.append((module, call))
        self._tables: dict[int, RotaryTable] = {}
        self._positions = seen.positions

    def table(self, embeddings: Any) -> RotaryTable | None:
        """The table of position embeddings that a layer was given; None if it was given none."""
        wanted = _tensors(embeddings)
        if not wanted:
            return None
        for index, (module, call) in enumerate(self._made):
            made = _tensors(call.outputs)
            if len(made) == len(wanted) and all(map(same, made, wanted)):
                if index not in self._tables:
                    self._tables[index] = RotaryTable(self._again(module, call))
                return self._tables[index]
        raise NotDescribed("position embeddings come from no rotary module of the model")

    def _again(self, module: nn.Module, call: Call) -> Callable[[Tensor], Any]:
        observed = self._positions

        def rotate(positions: Tensor) -> Any:
            def put(value: Any) -> Any:
                return positions if _is_positions(value, observed) else value

            kwargs = {name: put(value) for name, value in call.kwargs.items()}
            with torch.inference_mode():
                return module(*map(put, call.inputs), **kwargs)

        return rotate


def _is_positions(value: Any, positions: Tensor) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and same(value, positions)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
