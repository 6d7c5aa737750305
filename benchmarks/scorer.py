"""Scores held-out text under any experts, and how far they move a model's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kernels import ExpertWeights, QuantizedExperts
from moe import MoE
from moe.network.lanes import ExpertCall

ROOT = Path(__file__).parents[1]
TEXTS = ("prose", "python", "cpp")
WINDOW = 512
Experts = ExpertWeights | QuantizedExperts


class Scorer:
    """Scores the same windows of held-out text under any experts.

    Attributes:
        original: the model's own experts.
        bits_per_byte: under them.
    """

    def __init__(self, model: MoE, bytes_a_text: int) -> None:
        self.model = model
        layers = model.experts.layers
        self.original = [layer for layer in layers if isinstance(layer, ExpertWeights)]
        assert len(self.original) == len(layers), "the model is quantised already"
        self._windows: list[list[int]] = []
        self._num_bytes = 0
        for name in TEXTS:
            text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()[:bytes_a_text]
            self._num_bytes += len(text.encode())
            ids = model.codec.encode(text)
            # Windows overlap by one token, so that every token but the first is predicted once.
            self._windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW - 1)]
        self._logprobs = [_logprobs(model, window) for window in self._windows]
        own = zip(self._logprobs, self._windows, strict=True)
        self._bits = -sum(float(_taken(logprobs, window).sum()) for logprobs, window in own)
        self.bits_per_byte = self._bits / self._num_bytes
        self._choices = self._chosen(self.original)

    def score(self, layers: Sequence[Experts]) -> dict[str, float]:
        """Return how good a model with these experts is.

        Returns:
            Bits per byte; how many per cent worse that is, and the standard error of the
            difference (over tokens); the Kullback-Leibler divergence from the original's
            predictions in bits a token; the share of the original's chosen experts that are
            chosen still.
        """
        gains, divergence = [], 0.0
        with self._using(layers):
            for window, before in zip(self._windows, self._logprobs, strict=True):
                now = _logprobs(self.model, window)
                gains.append(_taken(now, window) - _taken(before, window))
                divergence += float((before.exp() * (before - now)).double().sum()) / math.log(2)
        gain = torch.cat(gains)
        chosen = self._chosen(layers)[..., :, None] == self._choices[..., None, :]
        return {
            "bits_per_byte": round((self._bits - float(gain.sum())) / self._num_bytes, 5),
            "worse_percent": round(-100 * float(gain.sum()) / self._bits, 3),
            "error_percent": round(100 * float(gain.std()) * len(gain) ** 0.5 / self._bits, 3),
            "divergence": round(divergence / len(gain), 5),
            "routing_agreement": round(float(chosen.any(-1).double().mean()), 4),
        }

    def _chosen(self, layers: Sequence[Experts]) -> Tensor:
        """Sorted experts of each layer for the first windows: ``(layers, tokens, top_k)``."""
        with self._using(layers), _recorded(self.model) as ids:
            for window in self._windows[:24]:
                self.model.logits(window)
        return torch.stack([torch.cat(layer).sort(-1).values for layer in ids])

    @contextmanager
    def _using(self, layers: Sequence[Experts]) -> Iterator[None]:
        self.model.experts.layers[:] = layers
        try:
            yield
        finally:
            self.model.experts.layers[:] = self.original


def _logprobs(model: MoE, window: list[int]) -> Tensor:
    """(T - 1, V) natural logarithms for the tokens after the first."""
    return model.logits(window)[:-1].log_softmax(-1)


def _taken(logprobs: Tensor, window: list[int]) -> Tensor:
    """(T - 1,) float64 logarithms to base 2 of the tokens that came."""
    return logprobs.gather(1, torch.tensor(window[1:])[:, None])[:, 0].double() / math.log(2)


@contextmanager
def _recorded(model: MoE) -> Iterator[list[list[Tensor]]]:
    """Expert ids that pass by while it is open, by layer."""
    layers = model.experts
    ids: list[list[Tensor]] = [[] for _ in layers.layers]
    run = layers.run

    def spy(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
        ids[layer] += [call.routing.expert_ids for call in calls]
        return run(layer, calls)

    layers.run = spy  # type: ignore[method-assign]
    try:
        yield ids
    finally:
        del layers.run
