"""Cosines and sines by position, taken from a model's own rotary module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FIRST_POSITIONS = 1024


def cos_sin(output: Any) -> tuple[Tensor, Tensor]:
    """``(P, size / 2)`` float32 cosines and sines of what a rotary module returned for P positions.

    Modules return complex numbers, or cosines and sines of each angle once or twice.
    Raises ValueError for anything else.
    """
    if isinstance(output, Tensor) and output.is_complex():
        table = output.reshape(-1, output.shape[-1])
        return table.real.float().contiguous(), table.imag.float().contiguous()
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError("the rotary module returns neither complex numbers nor a pair")
    cos, sin = (part.reshape(-1, part.shape[-1]).float() for part in output)
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()
    if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        return cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
    return cos.contiguous(), sin.contiguous()


class RotaryTable:
    """Cosines and sines of all positions so far, made by the module and grown by doubling.

    What was there before stays where it is: others may have its address, and read it so far.

    Args:
        rotate: what the module returns for ``(1, P)`` int64 positions.
    """

    def __init__(self, rotate: Callable[[Tensor], Any]) -> None:
        self._rotate = rotate
        self._before: list[tuple[Tensor, Tensor]] = []
        self.cos, self.sin = cos_sin(rotate(torch.arange(_FIRST_POSITIONS)[None]))

    def reserve(self, positions: int) -> None:
        """Make the tables hold at least so many positions."""
        have = self.cos.shape[0]
        if positions <= have:
            return
        more = torch.arange(have, max(positions, 2 * have))[None]
        cos, sin = cos_sin(self._rotate(more))
        self._before.append((self.cos, self.sin))
        self.cos, self.sin = torch.cat([self.cos, cos]), torch.cat([self.sin, sin])
