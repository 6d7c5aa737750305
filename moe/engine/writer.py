"""`Writer`: writes the sequences of a model that is not autoregressive.

Without a writer a sequence reads its last token, and the sampler draws the next one from the logits
(`moe.engine.runner.ModelRunner`). A method brings a writer for the models that it serves
(`WRITER`). The writer then says what a sequence reads next and which of its tokens are final; the
scheduler, prefill batches, the prefix cache and the ranks stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from moe.engine.runner import ModelRunner
from moe.hooks import ModelHook
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.network.backbone import Backbone
from moe.network.lanes import Lane
from moe.network.moe_layer import FoundSelector, MoELayers
from moe.network.packed_pass import Work
from moe.sampling.params import SamplingParams
from moe.settings import Profile


class Writer(Protocol):
    """Writes the sequences of one loaded model."""

    @property
    def why(self) -> str:
        """Why the model goes none of the faster ways of autoregressive ones, for the status."""
        ...

    @property
    def unit(self) -> int:
        """Tokens that become final together; answers are cut from whole units."""
        ...

    def reading(self, work: Work) -> Lane[list[Tensor]]:
        """A lane that reads tokens of a sequence, and gives an empty row in place of logits."""
        ...

    def windows(self, form: KVFormat) -> Windows:
        """The layers of which a sequence keeps no more than the last tokens.

        Args:
            form: how keys and values will be stored.
        """
        ...

    def selectors(self, backbone: Backbone) -> list[FoundSelector]:
        """One entry for each MoE layer, for policies that choose experts again."""
        ...

    def checked(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request, with what the writer fills in.

        Raises:
            RequestError: one of them is not possible here.
        """
        ...

    def runner(self, backbone: Backbone, experts: MoELayers) -> ModelRunner:
        """Computes the steps of an engine."""
        ...

    def status(self) -> dict[str, Any]:
        """Return what `MoE.status` shows of it, ready for JSON."""
        ...


WRITER = ModelHook[Callable[[Backbone, Profile], Writer]]("writer")
"""Makes the writer of a loaded model; raises `ProfileError` or `UnsupportedModelError`."""
REFUSE = ModelHook[Callable[[PreTrainedModel, Profile], None]]("refuse")
"""Raises `ProfileError` for what a profile asks and the method cannot do, before weights are
read."""
