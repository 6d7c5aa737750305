"""The next token from a row of logits, for one sequence at a time.

Each sequence owns a `Sampler` with its own penalties and its own random numbers, so that what a
request gets never depends on who else is in the batch. The order of the steps is fixed:
penalties -> temperature -> top-k -> top-p -> min-p -> draw. Each of the three filters works on
the renormalised survivors of the one before; ties go to the lower token id everywhere.

Shape suffixes: V vocabulary, C candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.sampling_params import SamplingParams

__all__ = ["LogitsError", "Sampler", "SamplingParams", "Token", "candidates"]

_FIRST_GUESS = 256  # largest logits looked at before top-p sorts more of the vocabulary


class LogitsError(FloatingPointError):
    """The model produced logits that no token can be drawn from; only their sequence fails."""


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen token; log-probabilities are natural logarithms, `None` where not asked for.

    They are the log-softmax of the model's own logits, before penalties, temperature and
    filters. `top` holds the most likely ids in falling order, the chosen one among them or not.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """Draws the tokens of one sequence and remembers what the penalties need.

    `index` says which of the request's `n` sequences this is. A seed fixes the output: sequence 0
    uses the seed itself, sequence i one derived from (seed, i). Python's generator is used
    because it takes all bits of the seed (torch's CPU generator drops all but 32) and documents
    that its stream stays the same over versions; a token costs one uniform number.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        index: int = 0,
    ) -> None:
        assert 0 <= index < params.n, (index, params.n)
        self.params = params
        self._vocab_size = vocab_size
        seed = params.seed
        self._random = random.Random(seed if seed is None or index == 0 else f"{seed}:{index}")
        self._counts_V: Tensor | None = None
        self._seen_V: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        if params.repetition_penalty != 1.0:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen_V[torch.tensor(list(prompt_token_ids), dtype=torch.int64)] = True

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the position of the largest logit and nothing else."""
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and self._counts_V is None
            and self._seen_V is None
        )

    @torch.no_grad()
    def sample(self, logits_V: Tensor) -> Token:
        """Choose the next token from (V,) logits of any float dtype and device.

        -inf masks a token. Raises `LogitsError` on NaN, on +inf and where every token is masked.
        """
        assert logits_V.shape == (self._vocab_size,), (logits_V.shape, self._vocab_size)
        if self.is_argmax:
            best = logits_V.argmax()
            _check_peak(float(logits_V[best]))
            return Token(int(best))
        raw_V = logits_V.to("cpu", torch.float64)
        _check_peak(float(raw_V.max()))
        scores_V = self._penalise(raw_V)
        if self.params.temperature == 0:
            token_id = int(scores_V.argmax())
        else:
            ids_C, weights_C = candidates(scores_V, self.params)
            token_id = int(ids_C[_draw(weights_C, self._random.random())])
        self._remember(token_id)
        return self._token(token_id, raw_V)

    def _penalise(self, scores_V: Tensor) -> Tensor:
        """Repetition as in CTRL (Keskar et al. 2019), presence and frequency as in OpenAI's API."""
        params = self.params
        if self._seen_V is not None:
            factor = params.repetition_penalty
            punished_V = torch.where(scores_V > 0, scores_V / factor, scores_V * factor)
            punished_V = punished_V.clamp(max=torch.finfo(torch.float64).max)
            scores_V = torch.where(self._seen_V, punished_V, scores_V)
        if self._counts_V is not None:
            scores_V = scores_V - params.frequency_penalty * self._counts_V
            scores_V = scores_V - params.presence_penalty * (self._counts_V > 0)
        return scores_V

    def _remember(self, token_id: int) -> None:
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
        if self._seen_V is not None:
            self._seen_V[token_id] = True

    def _token(self, token_id: int, raw_V: Tensor) -> Token:
        count = self.params.logprobs
        if count is None:
            return Token(token_id)
        normaliser = torch.logsumexp(raw_V, dim=0)
        top_ids = _largest(raw_V, min(count, len(raw_V))) if count else raw_V.new_empty(0).long()
        top_logprobs = (raw_V[top_ids] - normaliser).tolist()
        top = tuple(zip(top_ids.tolist(), top_logprobs, strict=True))
        return Token(token_id, float(raw_V[token_id] - normaliser), top)


def candidates(scores_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn and their unnormalised weights (float64, largest = 1).

    `scores_V` is float64 with a finite maximum. Top-p keeps the shortest run of the most likely
    tokens whose mass reaches `top_p` (Holtzman et al. 2019), min-p those at least `min_p` times
    as likely as the most likely one (Nguyen et al. 2024). Returns ids_C int64 and weights_C.
    """
    # Shifting first makes every temperature safe: the largest score stays 0 however small it is.
    weights_V = ((scores_V - scores_V.max()) / params.temperature).exp()
    vocab_size = len(scores_V)
    top_k = min(params.top_k, vocab_size) or vocab_size
    if top_k == vocab_size and params.top_p == 1.0:
        if params.min_p == 0.0:
            return torch.arange(vocab_size), weights_V
        ids_C = (weights_V >= params.min_p).nonzero().flatten()
        return ids_C, weights_V[ids_C]
    ids_C = _nucleus(scores_V, weights_V, top_k, params.top_p)
    ids_C = ids_C[weights_V[ids_C] >= params.min_p]
    return ids_C, weights_V[ids_C]


def _nucleus(scores_V: Tensor, weights_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids of the top-p set within the `top_k` largest scores, in falling order."""
    if top_p == 1.0:
        return _largest(scores_V, top_k)
    whole = top_k == len(scores_V)
    size = min(_FIRST_GUESS, top_k) if whole else top_k
    total = weights_V.sum() if whole else None
    while True:
        ids_C = _largest(scores_V, size)
        mass_C = weights_V[ids_C].cumsum(0)
        goal = top_p * (mass_C[-1] if total is None else total)
        if size == top_k or mass_C[-1] >= goal:
            # The token that crosses the goal is kept, hence the mass before it decides.
            return ids_C[(mass_C - weights_V[ids_C]) < goal]
        size = min(16 * size, top_k)


def _largest(scores_V: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest scores in falling order; equal scores by rising id."""
    if count == len(scores_V):
        return scores_V.sort(descending=True, stable=True).indices
    # topk leaves the order of ties open, so it only finds the threshold.
    ids = (scores_V >= scores_V.topk(count).values[-1]).nonzero().flatten()
    return ids[scores_V[ids].sort(descending=True, stable=True).indices[:count]]


def _draw(weights_C: Tensor, uniform: float) -> int:
    """Position drawn by inverting the cumulative weights; `uniform` lies in [0, 1)."""
    mass_C = weights_C.cumsum(0)
    position = torch.searchsorted(mass_C, uniform * mass_C[-1], right=True)
    # Rounding can carry the product up to the total: the last position of positive weight.
    return int(torch.minimum(position, torch.searchsorted(mass_C, mass_C[-1])))


def _check_peak(peak: float) -> None:
    # max and argmax hand a NaN on, so that the largest logit answers for the whole row.
    if peak != peak:
        raise LogitsError("the logits hold NaN")
    if peak == float("inf"):
        raise LogitsError("the logits hold +inf")
    if peak == float("-inf"):
        raise LogitsError("every token is masked: all logits are -inf")
