"""A compressed model reads a recorded text with its tokens sent where the original sent them.

What its routers read then differs from the original's rows by the experts' errors alone, not by
earlier routers' other choices: what routers that choose as the original's did will have to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moe.calibrate.trace import Trace
from moe.visit import ExpertsRunner, Visit
from offload.experts import LayerExperts
from routing import Routing


class Forced:
    """Experts behind recorded choices; takes the place of `MoELayers` in `record`.

    Args:
        layers: experts of each layer, for their numbers.
        trace: whose windows are read, each once and in order.
        run: what runs the experts.
    """

    def __init__(self, layers: Sequence[LayerExperts], trace: Trace, run: ExpertsRunner) -> None:
        self.layers = list(layers)
        self._trace, self._run = trace, run
        self._read = [0] * len(self.layers)

    def run(self, layer: int, visits: Sequence[Visit]) -> Sequence[Tensor | Exception]:
        (visit,) = visits  # one lane a pass
        start = self._read[layer]
        end = self._read[layer] = start + visit.routing.num_tokens
        ids, weights = (
            own[layer][start:end] for own in (self._trace.expert_ids, self._trace.weights)
        )
        device = visit.routing.weights.device
        chosen = Routing(ids.to(device).long(), weights.to(visit.routing.weights))
        return self._run(layer, [replace(visit, routing=chosen)])
