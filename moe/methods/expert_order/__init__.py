"""Expert-aware request order (ExpertFlow, arXiv 2410.17954; Read-ME, 2410.19123): requests that
need the experts of the running ones go first.

``methods.expert_order.patience: 4``. A step reads each expert once for all sequences, so sequences
that need the same experts cost less together. The token table of `moe calibrate` predicts from a
prompt which experts its request will need. The queue changes its order only where that is expected
to save 2 % of the expert reads, and patience bounds how often a request is overtaken.

Differs from the papers: no trained predictor of sequences; the token table is a count. Key and
value caches are not merged, as each sequence has its own. Tokens are the same in any order.
Measured with the shipped model (docs/reproduction.md, 8): 1.2 % fewer experts a step with 8
sequences, .15 % with 64, which need nearly all; the future itself would save 2.8 and 1.0 %. The
unluckiest request in a hundred waits 7 batches in place of 4.

    python -m lab.expert_order
"""

from pydantic import Field

from moe.hooks import Method
from moe.section import Settings


class ExpertOrderSettings(Settings):
    """Waiting requests that share experts with the running ones go first."""

    patience: int = Field(default=0, ge=0)
    """Times that a waiting request may be overtaken by later ones that need the same experts as the
    running ones. Needs a calibration beside the model (``moe calibrate``). 0: requests keep their
    order."""


METHOD = Method(
    about="waiting requests that need the experts of the running ones go first",
    price="about 1 % fewer experts a step; a request may be overtaken",
    hooks={"request_order": "moe.methods.expert_order.order:make_order"},
    settings=ExpertOrderSettings,
    switch="patience",
    moved={"engine.overlap_patience": "methods.expert_order.patience"},
    files=("tests/methods/test_expert_order.py", "lab/expert_order.py"),
)
