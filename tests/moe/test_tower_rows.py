"""Rows of pictures are kept by the picture, whatever the text and the pictures around it are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from moe.images.tower_rows import TowerRows


class Patches(nn.Module):
    """Pictures as transformers' Qwen towers take them: all patches in a row, and their grids."""

    calls = 0

    def get_image_features(self, pixels: Tensor, grid: Tensor, layer: int = -1) -> Any:
        self.calls += 1
        sizes = grid.prod(1).tolist()
        means = [part.mean(0).expand_as(part) for part in pixels.split(sizes)]
        rows = pixels * 2 + torch.cat(means) + layer
        found: Any = BaseModelOutputWithPooling(rows, rows.split(sizes))
        found.deep = [rows + 1]
        found.hidden_states = [(pixels * 3).split(sizes), (pixels * 4).split(sizes)]
        return found


class Mixing(nn.Module):
    """Its pictures see each other."""

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return pixels + pixels.sum()


class Whole(nn.Module):
    """It takes two pictures at least."""

    def get_image_features(self, pixels: Tensor) -> Tensor:
        if len(pixels) == 1:
            raise ValueError("one")
        return pixels * 2


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def get_image_features(self, *given: Any, **named: Any) -> Any:
        return self.model.get_image_features(*given, **named)


GRIDS = [torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4, 1]]), torch.tensor([[2, 1, 1]])]
PIXELS = [torch.linspace(-1, n, int(g.prod()) * 5).reshape(-1, 5) for n, g in enumerate(GRIDS)]


def ask(whole: Outer, *pictures: int) -> Any:
    pixels, grids = ([part[n] for n in pictures] for part in (PIXELS, GRIDS))
    return whole.get_image_features(torch.cat(pixels), grid=torch.cat(grids))


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = vars(value).values() if isinstance(value, dict) else value
    return [leaf for part in parts if part is not None for leaf in leaves(part)]


def equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and all(map(torch.equal, leaves(one), leaves(other)))


@pytest.mark.parametrize("learned", [True, False])
def test_each_picture_is_encoded_once(learned: bool) -> None:
    whole, plain = Outer(Patches()), Outer(Patches())
    rows = TowerRows(whole)
    if learned:
        assert equal(ask(whole, 0, 1), ask(plain, 0, 1))
        rows.reset()
    assert equal(ask(whole, 2), ask(plain, 2))
    for pictures in [(2, 2), (2, 0), (2, 0, 1), (2, 0, 1), (1, 2)]:
        assert equal(ask(whole, *pictures), ask(plain, *pictures))
    # Until it knows, the pictures of a call are encoded together as well: the first (2, 2).
    assert (rows.encoded, rows.reused) == ((1, 12) if learned else (4, 10))


@pytest.mark.parametrize(("tower", "tried"), [(Mixing, 2), (Whole, 0)])
def test_pictures_that_cannot_be_encoded_alone_are_kept_together(
    tower: type[nn.Module], tried: int
) -> None:
    whole, plain = Outer(tower()), Outer(tower())
    rows = TowerRows(whole)
    pixels = torch.arange(12.0).reshape(3, 4)
    for given in (pixels[:2], pixels, pixels[:2].clone(), pixels):
        assert torch.equal(whole.get_image_features(given), plain.get_image_features(given))
    assert (rows.encoded, rows.reused) == (2 + tried, 2)


def test_other_pictures_shapes_types_and_options_are_told_apart() -> None:
    whole = Outer(Patches())
    rows = TowerRows(whole)
    pixels, grid = torch.zeros(4, 2), torch.tensor([[1, 2, 2]])
    for given, named in (
        ((pixels, grid), {}),
        ((pixels + 1, grid), {}),
        ((pixels.reshape(4, 1, 2), grid), {}),
        ((pixels.double(), grid), {}),
        ((pixels, torch.tensor([[1, 4, 1]])), {}),
        ((pixels, grid), {"layer": -1}),
        ((pixels, grid), {"layer": -2}),
    ):
        whole.get_image_features(*given, **named)
    assert (rows.encoded, rows.reused) == (7, 0)


def test_only_so_many_bytes_are_kept() -> None:
    whole = Outer(Patches())
    rows = TowerRows(whole, most_bytes=1000)
    each = 5 * 4 * PIXELS[0].numel()  # five results of 4-byte numbers
    ask(whole, 0)
    assert rows.kept_bytes == each < 1000
    ask(whole, 1)
    ask(whole, 0)
    ask(whole, 2)
    assert rows.kept_bytes <= 1000
    assert (rows.encoded, rows.reused) == (3, 1)
    ask(whole, 0)
    assert (rows.encoded, rows.reused) == (3, 2)
    ask(whole, 1)
    assert (rows.encoded, rows.reused) == (4, 2)
    large = torch.ones(400, 5), torch.tensor([[1, 20, 20]])
    assert whole.get_image_features(*large) is not None
    assert rows.kept_bytes <= 1000
