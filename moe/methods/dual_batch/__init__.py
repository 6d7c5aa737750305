"""Dual batch overlap (DeepSeek-V3, arXiv 2412.19437; TokenWeave, 2505.11329): a step in two halves.

``methods.dual_batch.enabled: true``, on several ranks. All ranks visit the layers of a pass in the
same order, with both halves at each layer: one half computes while rows of the other are between
ranks. A half without tokens still takes part. Tokens are the same bits.

Differs from the papers: sequences are halved, and no operator of one device is split between
streams; nothing measures while serving whether halves pay. Measured on the ranks of one machine
(docs/results/2026-11-21-expert-parallel.md): steps take 1.06 to 1.9 times as long, as two halves
read more experts than the whole and there is little to hide. It is here for networks where the
exchange outweighs that, and has not run on one.

    python -m benchmarks.expert_parallel --set methods.dual_batch.enabled=true
"""

from moe.hooks import Method
from moe.section import Settings


class DualBatchSettings(Settings):
    """Steps on several ranks run in two halves."""

    enabled: bool = False
    """Run each step in two halves, one of which computes while rows of the other are sent."""


METHOD = Method(
    about="one half of a step computes while rows of the other are between ranks",
    price="hides exchanges; reads more experts a step: slower on one machine",
    hooks={"run_halves": "moe.methods.dual_batch.halves:run_halves"},
    settings=DualBatchSettings,
    switch="enabled",
    moved={"parallel.overlap": "methods.dual_batch.enabled"},
    files=("tests/methods/test_dual_batch.py",),
)
