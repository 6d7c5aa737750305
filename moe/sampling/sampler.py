"""The next token from a row of logits, for one sequence at a time.

Each sequence owns a `Sampler` with its own penalties and its own random numbers, so that what a
request gets never depends on who else is in the batch. The order of the steps is fixed:
bias -> penalties -> structure -> temperature -> top-k -> top-p -> min-p -> draw. Each of the three
filters works on the renormalised survivors of the one before; ties go to the lower token id
everywhere.

The arithmetic is numpy's, whose calls on one row take a few microseconds: a small model has only a
few hundred for a step. Shape suffixes: T rows or tokens, V vocabulary, C candidates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.errors import MoEError
from moe.sampling.constraint import Constraint
from moe.sampling.params import SamplingParams

_FIRST_GUESS = 256  # largest scores looked at before top-p sorts more of the vocabulary


class LogitsError(MoEError, FloatingPointError):
    """No token can be drawn from the model's logits. Only their sequence fails."""


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen or given token; log-probabilities are natural, `None` where not asked for.

    They are the log-softmax of the model's own logits, before bias, penalties, structure,
    temperature and filters. `top` holds the most likely ids in falling order, the chosen one among
    them or not. `is_last`: it completes a text to which its structure lets nothing be added.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    is_last: bool = False


class Proposal(NamedTuple):
    """A drafted token, with the probabilities that it was drawn from.

    Attributes:
        token_id: one of ids_C.
        ids_C: int64, distinct, in any order.
        chances_C: float64, their probabilities.
    """

    token_id: int
    ids_C: np.ndarray
    chances_C: np.ndarray

    @property
    def chance(self) -> float:
        """Of the token."""
        return float(self.chances_C[self.ids_C == self.token_id].item())


class Sampler:
    """Draws the tokens of one sequence, and keeps the state of its penalties.

    `index` is the sequence's number among the request's `n`. A seed fixes the output: sequence 0
    uses the seed itself, sequence i one derived from (seed, i). Python's generator is used because
    it takes all bits of the seed (torch's CPU generator drops all but 32) and documents that its
    stream stays the same in later versions; each token takes one number. Without a seed, the
    numbers derive from that generator's global state: they differ in each process unless the caller
    seeds it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        assert 0 <= index < params.n, (index, params.n)
        self.params, self.index = params, index
        self._constraint = constraint
        self._vocab_size = vocab_size
        seed = params.seed
        self._random = _new_random()
        if seed is not None:
            self._random.seed(f"{seed}:{index}" if index else seed)
        self._counts_V: np.ndarray | None = None
        self._seen_V: np.ndarray | None = None
        self._bias_V: np.ndarray | None = None
        if params.logit_bias:
            self._bias_V = np.zeros(vocab_size)
            self._bias_V[list(params.logit_bias)] = list(params.logit_bias.values())
        if params.presence_penalty or params.frequency_penalty:
            self._counts_V = np.zeros(vocab_size)
        if params.repetition_penalty != 1.0:
            self._seen_V = np.zeros(vocab_size, dtype=bool)
            self._seen_V[list(prompt_token_ids)] = True

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the position of the largest logit and nothing else."""
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and self._bias_V is None
            and self._counts_V is None
            and self._seen_V is None
            and self._constraint is None
        )

    def begin_mask(self) -> None:
        """Begin to find out, in another thread, what the structure lets follow; if there is one."""
        if self._constraint is not None:
            self._constraint.begin_mask()

    def wait_until(self, until: float) -> None:
        """How long `sample` waits for that: until this time of `time.monotonic`."""
        if self._constraint is not None:
            self._constraint.wait_until(until)

    def sample(self, logits_V: Tensor, proposal: Proposal | None = None) -> Token:
        """Choose the next token from (V,) logits of any float dtype and device.

        -inf masks a token. A proposal (see `propose`) changes no token's probability; its own token
        is chosen as often as that allows. Raises `LogitsError` on NaN, on +inf and if every token
        is masked, and `StructureError` and `MaskLateError` (see `Constraint`); after the last the
        call can be repeated.
        """
        assert logits_V.shape == (self._vocab_size,), (logits_V.shape, self._vocab_size)
        if self.is_argmax:
            (best,), (peak,) = peaks(logits_V[None])
            check_peak(peak)
            return Token(best)
        raw_V = row_of(logits_V)
        check_peak(float(raw_V.max()))
        scores_V = self._penalise(raw_V)
        if self.params.temperature == 0:
            token_id = int(scores_V.argmax())
        else:
            ids_C, weights_C = candidates(scores_V, self.params)
            if proposal is None:
                token_id = int(ids_C[draw(weights_C, self._random.random())])
            else:
                token_id = rejection_sample(ids_C, weights_C, proposal, self._random.random)
        self._remember(token_id)
        token = Token(token_id)
        if self.params.logprobs is not None:
            token = scored(token_id, raw_V, self.params.logprobs)
        return replace(token, is_last=True) if self._is_over else token

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take the state after drawing these tokens, to continue a sequence of another process."""
        for token_id in token_ids:
            if self.params.temperature > 0:
                self._random.random()
            self._remember(token_id)

    def fork(self) -> Sampler:
        """A copy for drafting, which predicts what this sampler will draw without changing it.

        With a seed it draws by the same random numbers, else by numbers of its own.
        """
        twin = copy(self)
        twin._counts_V = None if self._counts_V is None else self._counts_V.copy()
        twin._seen_V = None if self._seen_V is None else self._seen_V.copy()
        twin._constraint = None if self._constraint is None else self._constraint.fork()
        if self.params.temperature > 0:
            twin._random = _new_random()
            if self.params.seed is not None:
                twin._random.setstate(self._random.getstate())
        return twin

    def propose(self, logits_V: Tensor) -> tuple[int, Proposal | None]:
        """Draft the next token, with a fork, from (V,) logits that approximate the model's.

        Returns the token, and the `Proposal` to pass to `sample`. The proposal is None if sampling
        is deterministic: then `sample` chooses a correct draft by itself.
        """
        if self.params.temperature == 0 or self.params.seed is not None:
            return self.sample(logits_V).id, None
        raw_V = row_of(logits_V)
        check_peak(float(raw_V.max()))
        ids_C, weights_C = candidates(self._penalise(raw_V), self.params)
        token_id = int(ids_C[draw(weights_C, self._random.random())])
        self._remember(token_id)
        return token_id, Proposal(token_id, ids_C, weights_C / weights_C.sum())

    @property
    def _is_over(self) -> bool:
        return self._constraint is not None and self._constraint.is_over

    def _penalise(self, scores_V: np.ndarray) -> np.ndarray:
        """Bias, presence and frequency as in OpenAI's API, repetition as in CTRL (2019), and -inf
        for what the structure does not allow."""
        params = self.params
        if self._bias_V is not None:
            scores_V = scores_V + self._bias_V
        if self._seen_V is not None:
            factor = params.repetition_penalty
            with np.errstate(over="ignore"):
                punished_V = np.where(scores_V > 0, scores_V / factor, scores_V * factor)
            punished_V = punished_V.clip(max=np.finfo(np.float64).max)
            scores_V = np.where(self._seen_V, punished_V, scores_V)
        if self._counts_V is not None:
            scores_V = scores_V - params.frequency_penalty * self._counts_V
            scores_V = scores_V - params.presence_penalty * (self._counts_V > 0)
        if self._constraint is not None:
            if self._constraint.is_over:  # a draft asks for more
                raise LogitsError("the text is complete, and its structure lets nothing follow")
            scores_V = np.where(self._constraint.allowed_V(), scores_V, -np.inf)
            check_peak(float(scores_V.max()))
        return scores_V

    def _remember(self, token_id: int) -> None:
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
        if self._seen_V is not None:
            self._seen_V[token_id] = True
        if self._constraint is not None:
            self._constraint.take(token_id)


def row_of(logits_V: Tensor) -> np.ndarray:
    """Logits of any float dtype and device in float64."""
    row: np.ndarray = logits_V.detach().to("cpu", torch.float64).numpy()
    return row


def peaks(logits_TV: Tensor) -> tuple[list[int], list[float]]:
    """The id and the value of each row's largest logit; NaN counts as the largest."""
    if not logits_TV.is_cpu:
        values, ids = logits_TV.max(-1)
        return ids.tolist(), values.tolist()
    rows = (logits_TV.float() if logits_TV.dtype == torch.bfloat16 else logits_TV).detach().numpy()
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()


def candidates(scores_V: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn and their unnormalised weights (float64, largest = 1).

    `scores_V` is float64 with a finite maximum. Top-p keeps the shortest run of the most likely
    tokens whose mass reaches `top_p` (Holtzman et al. 2019), min-p those at least `min_p` times
    as likely as the most likely one (Nguyen et al. 2024). Returns ids_C int64 and weights_C.
    """
    # Shifting first makes every temperature safe: the largest score stays 0 however small it is.
    with np.errstate(over="ignore"):
        weights_V = np.exp((scores_V - scores_V.max()) / params.temperature)
    vocab_size = len(scores_V)
    top_k = min(params.top_k, vocab_size) or vocab_size
    if top_k == vocab_size and params.top_p == 1.0:
        if params.min_p == 0.0:
            return np.arange(vocab_size), weights_V
        ids_C = (weights_V >= params.min_p).nonzero()[0]
        return ids_C, weights_V[ids_C]
    ids_C = _nucleus(scores_V, weights_V, top_k, params.top_p)
    ids_C = ids_C[weights_V[ids_C] >= params.min_p]
    return ids_C, weights_V[ids_C]


def _nucleus(scores_V: np.ndarray, weights_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids of the top-p set within the `top_k` largest scores, in falling order."""
    if top_p == 1.0:
        return largest(scores_V, top_k)
    whole = top_k == len(scores_V)
    size = min(_FIRST_GUESS, top_k) if whole else top_k
    total = weights_V.sum() if whole else None
    while True:
        ids_C = largest(scores_V, size)
        mass_C = weights_V[ids_C].cumsum()
        goal = top_p * (mass_C[-1] if total is None else total)
        if size == top_k or mass_C[-1] >= goal:
            # The token that crosses the goal is kept, hence the mass before it decides.
            return ids_C[(mass_C - weights_V[ids_C]) < goal]
        size = min(16 * size, top_k)


def largest(scores_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest scores in falling order; equal scores by rising id."""
    if count == len(scores_V):
        return (-scores_V).argsort(kind="stable")
    # A partition leaves the order of ties open, so it only finds the threshold.
    ids = (scores_V >= np.partition(scores_V, -count)[-count]).nonzero()[0]
    return ids[(-scores_V[ids]).argsort(kind="stable")[:count]]


def draw(weights_C: np.ndarray, uniform: float) -> int:
    """Position drawn by inverting the cumulative weights; `uniform` lies in [0, 1)."""
    mass_C = weights_C.cumsum()
    position = mass_C.searchsorted(uniform * mass_C[-1], side="right")
    # Rounding can carry the product up to the total: the last position of positive weight.
    return int(min(position, mass_C.searchsorted(mass_C[-1])))


def rejection_sample(
    ids_C: np.ndarray, weights_C: np.ndarray, proposal: Proposal, uniform: Callable[[], float]
) -> int:
    """An id of ids_C drawn by the weights, which is the proposed one as often as possible.

    Rejection sampling (Leviathan et al. 2023): accept the proposed token with probability
    ``min(1, p / q)``, else draw one from the positive part of ``p - q``.

    Args:
        ids_C, weights_C: as of `candidates`.
        uniform: gives numbers in [0, 1).
    """
    chances_C = weights_C / weights_C.sum()
    wanted = float(chances_C[ids_C == proposal.token_id].sum())
    if uniform() * proposal.chance < wanted:
        return proposal.token_id
    order = proposal.ids_C.argsort()
    known = proposal.ids_C[order]
    place_C = known.searchsorted(ids_C).clip(max=len(known) - 1)
    offered_C = np.where(known[place_C] == ids_C, proposal.chances_C[order][place_C], 0.0)
    rest_C = (chances_C - offered_C).clip(min=0.0)
    if not rest_C.sum() > 0:  # the same up to rounding
        rest_C = chances_C
    return int(ids_C[draw(rest_C, uniform())])


def scored(token_id: int, raw_V: np.ndarray, count: int) -> Token:
    """A token with its log-probability and those of the ``count`` most likely ones."""
    peak = raw_V.max()
    normaliser = peak + np.log(np.exp(raw_V - peak).sum())
    top_ids = largest(raw_V, min(count, len(raw_V))) if count else np.empty(0, dtype=np.int64)
    top_logprobs = (raw_V[top_ids] - normaliser).tolist()
    top = tuple(zip(top_ids.tolist(), top_logprobs, strict=True))
    return Token(token_id, float(raw_V[token_id] - normaliser), top)


def score(token_ids: Sequence[int], logits_TV: Tensor, count: int) -> list[Token]:
    """Given tokens with their log-probabilities and those of the ``count`` most likely ones.

    Token i follows row i of ``(T, V)`` logits of any float dtype and device. Raises `LogitsError`
    if a row has no finite largest logit.
    """
    tokens = []
    for token_id, logits_V in zip(token_ids, logits_TV, strict=True):
        raw_V = row_of(logits_V)
        check_peak(float(raw_V.max()))
        tokens.append(scored(token_id, raw_V, count))
    return tokens


def check_peak(peak: float) -> None:
    """Raise `LogitsError` if the largest logit of a row is not finite."""
    # max and argmax propagate NaN, so the largest logit stands for the whole row.
    if peak != peak:
        raise LogitsError(
            "the logits hold NaN: weights of the model are damaged, or its numbers overflow"
        )
    if peak == float("inf"):
        raise LogitsError("the logits hold +inf")
    if peak == float("-inf"):
        raise LogitsError("every token is masked: all logits are -inf")


def _new_random() -> random.Random:
    """A new generator, seeded from Python's global one."""
    return random.Random(random.getrandbits(128))
