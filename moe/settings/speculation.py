"""How tokens are drafted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.settings.base import Off, Settings


class SpeculationSettings(Settings):
    """How the next tokens are drafted, for the model to verify several in one pass."""

    mode: Annotated[Literal["off", "auto", "elastic", "ngram", "recycling"], Off] = "off"
    """elastic: by the model itself with less of its experts. ngram: what followed the last tokens
    before. recycling: what the model last thought follows a token. auto: whichever of elastic and
    ngram is predicted to pay, where one does. off: one token at a time."""

    max_depth: int = Field(default=4, ge=1, le=15)
    """Most tokens of a draft."""

    bits: Literal[2, 3, 4, 8] = 4
    """Most bits of an expert in an elastic draft."""

    experts: int | None = Field(default=None, ge=1)
    """Most experts of a token in an elastic draft. null: as many as the model takes."""

    core: Literal["all", "seq", "vote"] = "all"
    """Which of the experts in memory an elastic draft may use. seq: the two heaviest of each token
    that is drafted beside it. vote: those that these tokens weigh most. all: each of them."""

    core_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a layer's experts that a vote elects."""

    skip_layers: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the MoE layers, from the middle, whose experts an elastic draft leaves out."""

    contrast: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Self-contrast: how much is taken off of what the model would say with one weak expert a
    layer. It changes what the model says, so ``lossless: true`` refuses it, and each token is read
    twice. 0: off; 0.5 in the paper."""

    contrast_rank: int = Field(default=2, ge=0)
    """Which expert of a token is the weak one, from 0 for the router's first choice."""

    contrast_floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Tokens below this share of the likeliest one's probability are not drawn under contrast."""
