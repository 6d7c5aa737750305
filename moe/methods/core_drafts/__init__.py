"""Core sets in drafts (Dynamic expert sharing, DES, arXiv 2602.00879): drafts share few experts.

``methods.core_drafts.select: vote`` with ``speculation.mode: elastic`` or ``auto``. The tokens that
are drafted in one batch share a core set of a layer's experts, so a pass reads fewer of them. seq:
the two heaviest experts of each token. vote: the share of experts with the largest weights, summed
over the tokens of all passes of a draft. Answers stay the same, as every draft is verified.

Differs from the paper: its core sets serve the answer itself (`moe/methods/des`); votes are for
experts in memory only. Measured with the shipped model (lab/results/2026-11-23-speculation.md): an
eighth of the experts, chosen by votes, drafts tokens of which .85 to .92 are accepted greedily.

    moe bench MODEL --set speculation.mode=elastic --set methods.core_drafts.select=vote
"""

from typing import Literal

from pydantic import Field

from moe.hooks import Method
from moe.section import Settings


class CoreDraftsSettings(Settings):
    """Elastic drafts of a batch share few experts of each layer."""

    select: Literal["all", "seq", "vote"] = "all"
    """Which of the experts in memory a draft may use. seq: the two heaviest of each token that is
    drafted in the same batch. vote: those with the most weight over these tokens. all: every
    one."""

    share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a layer's experts that vote elects."""


METHOD = Method(
    about="tokens that are drafted together share few experts of each layer",
    price="fewer bytes a draft; drafts are accepted less often",
    hooks={"draft_rule": "moe.methods.core_drafts.rule:CoreSet.of"},
    settings=CoreDraftsSettings,
    switch="select",
    moved={
        "speculation.core": "methods.core_drafts.select",
        "speculation.core_share": "methods.core_drafts.share",
    },
    files=("tests/methods/test_core_drafts.py",),
)
