"""Rows of pictures are kept by the pictures, whatever the text around them is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe.images.tower_rows import _KEPT, TowerRows


class Inner(nn.Module):
    calls = 0

    def get_image_features(self, pixels: Tensor, grid: Tensor | None = None, **_: Any) -> Tensor:
        self.calls += 1
        return pixels * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def get_image_features(self, *given: Any, **named: Any) -> Tensor:
        return self.model.get_image_features(*given, **named)


def test_the_same_pictures_are_encoded_once() -> None:
    whole = Outer()
    rows = TowerRows(whole)
    pixels, grid = torch.rand(3, 4).bfloat16(), torch.tensor([[1, 2, 3]])
    first = whole.get_image_features(pixels, grid=grid)
    again = whole.get_image_features(pixels.clone(), grid=grid.clone())
    assert torch.equal(first, again)
    assert (rows.encoded, rows.reused, whole.model.calls) == (1, 1, 1)


def test_other_pictures_shapes_types_and_options_are_told_apart() -> None:
    whole = Outer()
    rows = TowerRows(whole)
    pixels = torch.zeros(2, 2)
    for given, named in (
        ((pixels,), {}),
        ((pixels + 1,), {}),
        ((pixels.reshape(4, 1),), {}),
        ((pixels.int(),), {}),
        ((pixels,), {"grid": torch.tensor([1])}),
        ((pixels,), {"layer": -1}),
        ((pixels,), {"layer": -2}),
    ):
        whole.get_image_features(*given, **named)
    assert (rows.encoded, rows.reused) == (7, 0)


def test_only_so_many_are_kept() -> None:
    whole = Outer()
    rows = TowerRows(whole)
    for number in [*range(_KEPT + 1), 1, 0]:
        whole.get_image_features(torch.tensor([number]))
    assert (rows.encoded, rows.reused) == (_KEPT + 2, 1)
