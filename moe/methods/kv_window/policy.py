"""`Window` and `HeadWindow`: the rules of StreamingLLM and RazorAttention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from kernels.cpu.kv import BLOCK
from moe.errors import ProfileError
from moe.kv.host_blocks import kept_share
from moe.kv.layout import KVFormat, Shape
from moe.kv.visibility import HeadScores, HeadsOfLayers, RowVisibility, SeenRow


class Window(RowVisibility):
    """Tokens see the first block and the last ones, `tokens` in all."""

    name: ClassVar[str] = "window"

    def row(self, prompt: int, position: int) -> SeenRow:
        return _row(self.tokens, position // BLOCK)

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        return _between(self.tokens, position // BLOCK)

    def read(self, length: int) -> int:
        return self._left(length, self.tokens)

    def held(self, length: int) -> int:
        return self._left(length, self.tokens + BLOCK)

    def most_held(self, prompt: int, length: int) -> int:
        return self._left(length, max(prompt, self.tokens) + 3 * BLOCK)

    def _left(self, length: int, whole: int) -> int:
        """Tokens of memory of a sequence that has at most so many tokens whole."""
        whole = min(length, whole)
        return whole + math.ceil(self.share * (length - whole))


def _between(tokens: int, own: int) -> np.ndarray:
    """The blocks that the tokens of block ``own`` do not see."""
    return np.arange(1, max(1, own + 2 - tokens // BLOCK), dtype=np.int32)


@lru_cache(maxsize=1024)
def _row(tokens: int, own: int) -> SeenRow:
    blocks = np.delete(np.arange(own + 1, dtype=np.int32), _between(tokens, own))
    return SeenRow(blocks, len(blocks))


@dataclass(frozen=True)
class HeadWindow(Window):
    """A window for all key heads but some.

    Attributes:
        num_whole: key heads of the model that see all.
        scores: of the key heads: those with the highest ones see all.
    """

    name: ClassVar[str] = "heads"
    by_heads: ClassVar[bool] = True
    num_whole: int = 0
    scores: HeadScores = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, tokens: int, more: Sequence[int]) -> HeadWindow:
        if len(more) != 1:
            raise ProfileError(
                "memory.kv_policy: heads takes TOKENS and COUNT, the key heads that keep all, as "
                f"in heads:{tokens}:8, and got {':'.join(map(str, (tokens, *more)))}"
            )
        return cls(tokens, num_whole=more[0])

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}:{self.num_whole}"

    def scored(self, scores: HeadScores) -> HeadWindow:
        return replace(self, scores=scores)

    def for_layers(self, shapes: Mapping[int, Shape], form: KVFormat) -> HeadWindow:
        """The rule of a model whose layers of attention have these shapes.

        Raises:
            ProfileError: the scores are of another model, or too few.
        """
        wanted, total = f"memory.kv_policy is {self}", sum(map(len, self.scores.values()))
        if not self.scores:
            raise ProfileError(
                f"{wanted}, and the model's calibration has not measured its key heads: run moe "
                "calibrate again, or set memory.kv_policy: null"
            )
        for layer, own in self.scores.items():
            if layer in shapes and shapes[layer].heads < len(own):
                raise ProfileError(
                    f"{wanted}, and layer {layer} attends with {len(own)} key heads but keeps rows "
                    f"of {shapes[layer].heads}, so that none can keep its own; set "
                    "memory.kv_policy: null"
                )
        seeing = {layer: shape for layer, shape in shapes.items() if layer in self.scores}
        if {layer: shape.heads for layer, shape in seeing.items()} != {
            layer: len(own) for layer, own in self.scores.items()
        }:
            raise ProfileError(
                f"{wanted}, and the calibration is of other layers than the model's: run moe "
                "calibrate again, or set memory.kv_policy: null"
            )
        if self.num_whole >= total:
            raise ProfileError(
                f"{wanted}, and {total} key heads see all tokens: let fewer of them keep all"
            )
        heads = heads_without(self.scores, self.num_whole)
        return replace(self, heads=heads, share=kept_share(form, seeing, heads))


def heads_without(scores: HeadScores, count: int) -> HeadsOfLayers:
    """The key heads of each layer but the ``count`` ones that look up the most."""
    order = sorted(
        (-score, layer, head) for layer, own in scores.items() for head, score in enumerate(own)
    )
    kept = {(layer, head) for _, layer, head in order[:count]}
    heads = (
        (layer, tuple(head for head in range(len(own)) if (layer, head) not in kept))
        for layer, own in sorted(scores.items())
    )
    return tuple((layer, own) for layer, own in heads if own)
