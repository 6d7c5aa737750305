"""Measures how well a model predicts the tokens of noisy canvases, and what policies cost there.

A text is cut into a beginning that is read, and a canvas behind it, of whose tokens a share is
replaced by uniform noise; one pass, without a pass before it, predicts all of the canvas' clean
tokens. Shares take turns. One pass does not show what fewer passes cost: `python -m lab.diffusion`
writes text with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from moe.commands.evaluate.policy_costs import (
    PolicyCost,
    distinct_experts,
    routed_by,
)
from moe.commands.evaluate.scoring import divergence
from moe.errors import RequestError
from moe.methods.diffusion.driver import CanvasDriver
from moe.methods.diffusion.writer import CanvasWriter
from moe.model import MoE
from routing import PolicyChain

LEVELS = (1.0, 0.75, 0.5, 0.25)
"""Shares of a canvas that are noise."""
BEFORE = 128
"""Tokens read before each canvas."""


@dataclass(frozen=True)
class CanvasQuality:
    """The quality of predictions on canvases.

    Attributes:
        tokens: on the canvases.
        bits: a token of a canvas, by its share of noise.
        policies: the costs of the profile's routing policies; runs are canvases.
        window: tokens of a canvas.
    """

    tokens: int
    bits: dict[float, float]
    policies: tuple[PolicyCost, ...]
    window: int

    def as_json(self) -> dict[str, Any]:
        return {
            "canvas_tokens": self.tokens,
            "bits_per_token": {f"{level:g}": bits for level, bits in self.bits.items()},
        } | ({"policies": [asdict(cost) for cost in self.policies]} if self.policies else {})

    def table(self) -> Table:
        table = Table(show_header=False)
        table.add_row("tokens on canvases", f"{self.tokens:,}")
        for level, bits in self.bits.items():
            table.add_row(f"bits a token, {level:.0%} of them noise", f"{bits:.4f}")
        return table


@torch.inference_mode()
def evaluate_canvases(
    model: MoE, text: str, tokens: int | None = None, against: str | None = None
) -> CanvasQuality:
    """Score the canvases of a text; then with each routing policy of the profile, and with all.

    Args:
        tokens: of the text, how many to take at most; None for all.
        against: another model to compare with, which is refused.

    Raises:
        RequestError: the text is shorter than the beginning and one canvas for each share, or a
            model to compare with was given.
    """
    if against is not None:
        raise RequestError("--against is not possible with models that write canvases")
    driver, ids = driver_of(model), model.codec.encode(text)[:tokens]
    size = driver.canvas_length
    step = BEFORE + size
    windows = [ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
    if len(windows) < len(LEVELS):
        raise RequestError(
            f"the text has {len(ids)} tokens, and {len(LEVELS) * step} are needed: {BEFORE} before "
            f"each of {len(LEVELS)} canvases of {size}; give more text or raise --tokens"
        )
    chain = model.experts.policies
    single = [PolicyChain((policy,)) for policy in chain.policies if not policy.lossless]
    chains = [*single, *([chain] if len(chain.policies) > 1 else [])]
    plain, variants = _Sums(), [(own, _Sums()) for own in chains]
    for number, window in enumerate(windows):
        level, clean = LEVELS[number % len(LEVELS)], torch.tensor(window[BEFORE:])
        canvas = _noisy(clean, level, model.config.get_text_config().vocab_size, number)
        read = plain.add(model, PolicyChain(), window[:BEFORE], canvas, clean, level, None)
        for own, sums in variants:
            sums.add(model, own, window[:BEFORE], canvas, clean, level, read)
    num_bytes = sum(len(model.codec.decode(list(window[BEFORE:])).encode()) for window in windows)
    return CanvasQuality(
        tokens=size * len(windows),
        bits={level: sum(plain.bits[level]) / len(plain.bits[level]) / size for level in LEVELS},
        policies=tuple(sums.cost(own, plain, num_bytes) for own, sums in variants),
        window=size,
    )


def driver_of(model: MoE) -> CanvasDriver:
    """What runs the generation code of a loaded model that writes canvases."""
    assert isinstance(model.writer, CanvasWriter)
    return model.writer.driver


def _noisy(clean_C: Tensor, level: float, vocabulary: int, seed: int) -> Tensor:
    """The canvas with a share of its tokens replaced, at places and by tokens of the seed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(vocabulary, clean_C.shape, generator=generator)
    places = torch.randperm(len(clean_C), generator=generator)[: round(level * len(clean_C))]
    return clean_C.scatter(0, places, noise[places])


class _Sums:
    """Sums over the canvases read with one chain of policies."""

    def __init__(self) -> None:
        self.bits: dict[float, list[float]] = {level: [] for level in LEVELS}
        self._kl, self._same, self._tokens = 0.0, 0, 0
        self._distinct: list[float] = []
        self._visits = 0

    def add(
        self,
        model: MoE,
        chain: PolicyChain,
        before: Sequence[int],
        canvas_C: Tensor,
        clean_C: Tensor,
        level: float,
        plain_CV: Tensor | None,
    ) -> Tensor:
        """Read one canvas; its ``(C, V)`` log probabilities."""
        with routed_by(model, chain) as visited:
            logits = driver_of(model).logits(before, canvas_C.tolist(), model.experts.run)
        found = logits.float().cpu().log_softmax(-1)
        taken = found.gather(1, clean_C[:, None])
        self.bits[level].append(float(-taken.double().sum()) / math.log(2))
        experts_LTK = visited.of_tokens(len(canvas_C))[:, : len(canvas_C)]
        self._visits += int((experts_LTK >= 0).sum())
        self._distinct += distinct_experts(experts_LTK, len(canvas_C)).flatten().tolist()
        if plain_CV is not None:
            self._kl += divergence(plain_CV, found)
            self._same += int((plain_CV.argmax(-1) == found.argmax(-1)).sum())
            self._tokens += len(clean_C)
        return found

    @property
    def total(self) -> float:
        return sum(sum(bits) for bits in self.bits.values())

    @property
    def distinct(self) -> float:
        """Mean distinct experts of a layer for a canvas."""
        return sum(self._distinct) / len(self._distinct)

    def cost(self, chain: PolicyChain, plain: _Sums, num_bytes: int) -> PolicyCost:
        return PolicyCost(
            policy=" + ".join(policy.spec for policy in chain.policies),
            phase="decode",
            bits_per_byte=self.total / num_bytes,
            without=plain.total / num_bytes,
            kl_bits=max(self._kl / self._tokens, 0.0),
            top1_agreement=self._same / self._tokens,
            distinct=self.distinct,
            distinct_without=plain.distinct,
            dropped=1 - self._visits / plain._visits,
        )
