"""Self-contrast (SCMoE, arXiv 2405.14507): the model's logits minus those of a weak reading.

``methods.contrast.strength: 0.5``. Each token is read twice in one pass, by the experts that its
router chose and by a single one of a lower rank, each reading with a KV cache of its own; tokens
are drawn from the difference, among those that are likely enough without it. The model's output
changes on purpose, each token is computed twice, and keys and values take twice the room.

Differs from the paper: both readings share a pass, so each expert is read once for both; the weak
expert may have any rank, also one that the router does not choose. Measured with the shipped model
(docs/reproduction.md, 19): .14 bits a token between the contrasted and the plain prediction, 3.2 %
more bits per byte and a quarter more visits. Its gain is in reasoning, which no model here can do.

    moe eval MODEL --text FILE --set lossless=false --set methods.contrast.strength=0.5
"""

from pydantic import Field

from moe.hooks import Method
from moe.section import Settings


class ContrastSettings(Settings):
    """Self-contrast: tokens are drawn from the model's logits minus those of a weak reading."""

    strength: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Strength with which the prediction of the model with one weak expert in each layer is
    subtracted from its own. 0: off; 0.5 in the paper."""

    rank: int = Field(default=2, ge=0)
    """Rank of the weak expert of a token, counted from 0 for the router's first choice."""

    floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Tokens whose probability is below this share of the most likely one's are never drawn."""


METHOD = Method(
    about="subtracts the logits of a reading by one weak expert of each layer",
    price="computes each token twice, and doubles the KV cache",
    settings=ContrastSettings,
    switch="strength",
    hooks={"alter": "moe.methods.contrast.readings:enable"},
    changes_answers="changes the model's output on purpose",
    needs={"speculation.mode": "off", "parallel.enabled": False},
    moved={
        "speculation.contrast": "methods.contrast.strength",
        "speculation.contrast_rank": "methods.contrast.rank",
        "speculation.contrast_floor": "methods.contrast.floor",
    },
    readings=2,
    files=("tests/methods/test_contrast.py",),
)
