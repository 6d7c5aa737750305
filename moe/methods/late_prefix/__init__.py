"""Late prefixes (HOBBIT, arXiv 2411.01433): missing experts of little weight come with fewer bits.

``offload.late: prefix``. The heaviest experts of a token, up to ``share`` of its router weight, are
read whole; for the others a step waits for the first ``bits`` of their codes only, and keeps these
until the expert is evicted or chosen with more weight. Answers then depend on what was in memory.

Differs from the paper: a prefix of nested bit planes in place of a second copy at fewer bits, and
two widths, of which none is skipped. Measured with the shipped model
(lab/results/2026-11-22-late.md).

    python -m lab.offload.late
"""

from typing import Literal

from pydantic import Field

from moe.hooks import Method
from moe.section import Settings


class LatePrefixSettings(Settings):
    """Missing experts with little of their token's weight are read with fewer bits."""

    bits: Literal[2, 3, 4] = 2
    """Bits of an expert that are read and kept, until it is evicted or chosen with more weight."""

    share: float = Field(default=0.6, ge=0.0, le=1.0)
    """The heaviest experts of a token, up to this share of its router weight, are read whole; the
    others as a prefix. 0: all as a prefix."""


METHOD = Method(
    about="a step waits for the first bits only of missing experts that have little weight",
    price="fewer bytes from disk; fewer bits of some experts, by what was in memory",
    settings=LatePrefixSettings,
    choices={"offload.late": {"prefix": "moe.methods.late_prefix.policy:LatePrefix.of"}},
    changes_answers="computes experts that come late with fewer bits",
    moved={
        "offload.late_bits": "methods.late_prefix.bits",
        "offload.late_share": "methods.late_prefix.share",
    },
    files=("tests/methods/test_late_prefix.py", "lab/offload/late.py"),
)
