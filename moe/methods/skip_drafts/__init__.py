"""Drafts that skip layers (SWIFT, arXiv 2410.06916; FFN-SkipLLM, 2404.03865): fewer MoE layers.

``methods.skip_drafts.share: 0.25`` with ``speculation.mode: elastic`` or ``auto``. Drafts leave out
the experts of the middle MoE layers, which a model needs least, never those of the first and the
last. Attention still runs, so keys and values are complete. Answers stay the same, as every draft
is verified.

Differs from the papers: attention is not skipped, and nothing searches for the best layers; the
share is given. The first command measures drafts of every kind, the second those of one setting:

    python -m benchmarks.speculation
    moe bench MODEL --set speculation.mode=elastic --set methods.skip_drafts.share=0.25
"""

from pydantic import Field

from moe.hooks import Method
from moe.section import Settings


class SkipDraftsSettings(Settings):
    """Elastic drafts leave out the experts of the middle MoE layers."""

    share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the MoE layers, from the middle, whose experts a draft leaves out. 0: off."""


METHOD = Method(
    about="elastic drafts leave out the experts of the middle layers",
    price="fewer bytes a draft; drafts are accepted less often",
    hooks={"draft_rule": "moe.methods.skip_drafts.rule:Skip.of"},
    settings=SkipDraftsSettings,
    switch="share",
    moved={"speculation.skip_layers": "methods.skip_drafts.share"},
    files=("tests/methods/test_skip_drafts.py",),
)
