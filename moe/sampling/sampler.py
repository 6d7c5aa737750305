"""The next token from a row of logits, for one sequence at a time.

Each sequence owns a `Sampler` with its own penalties and its own random numbers, so that what a
request gets never depends on who else is in the batch. The order of the steps is fixed:
bias -> penalties -> structure -> temperature -> top-k -> top-p -> min-p -> draw. Each of the three
filters works on the renormalised survivors of the one before; ties go to the lower token id
everywhere.

Shape suffixes: V vocabulary, C candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from torch import Tensor

from moe.sampling.candidates import Proposal, candidates, draw, draw_judged, peaks, row_of
from moe.sampling.constraint import Constraint
from moe.sampling.logprobs import LogitsError, Token, check_peak, scored
from moe.sampling.params import SamplingParams


class Sampler:
    """Draws the tokens of one sequence and remembers what the penalties need.

    `index` says which of the request's `n` sequences this is. A seed fixes the output: sequence 0
    uses the seed itself, sequence i one derived from (seed, i). Python's generator is used
    because it takes all bits of the seed (torch's CPU generator drops all but 32) and documents
    that its stream stays the same over versions; a token costs one uniform number. Without a seed
    the numbers follow from that generator's global state: other ones in each process, unless the
    caller seeds it.
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
        self._random = _unforeseen()
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

    def sample(self, logits_V: Tensor, proposal: Proposal | None = None) -> Token:
        """Choose the next token from (V,) logits of any float dtype and device.

        -inf masks a token. A proposal (see `propose`) changes no token's chances; its own is chosen
        as often as they allow. Raises `LogitsError` on NaN, +inf and where every token is masked,
        and `StructureError` (see `Constraint`).
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
                token_id = draw_judged(ids_C, weights_C, proposal, self._random.random)
        self._remember(token_id)
        token = Token(token_id)
        if self.params.logprobs is not None:
            token = scored(token_id, raw_V, self.params.logprobs)
        return replace(token, is_last=True) if self._is_over else token

    def replay(self, token_ids: Sequence[int]) -> None:
        """Be as after drawing these tokens: their sequence goes on in another process."""
        for token_id in token_ids:
            if self.params.temperature > 0:
                self._random.random()
            self._remember(token_id)

    def fork(self) -> Sampler:
        """A copy that guesses what this one will draw, and leaves it as it is.

        With a seed it draws by the same random numbers, else by some of its own.
        """
        twin = copy(self)
        twin._counts_V = None if self._counts_V is None else self._counts_V.copy()
        twin._seen_V = None if self._seen_V is None else self._seen_V.copy()
        twin._constraint = None if self._constraint is None else self._constraint.fork()
        if self.params.temperature > 0:
            twin._random = _unforeseen()
            if self.params.seed is not None:
                twin._random.setstate(self._random.getstate())
        return twin

    def propose(self, logits_V: Tensor) -> tuple[int, Proposal | None]:
        """Of a fork: a guess at the next token, from (V,) logits that may be less than the model's.

        Returns the token and what it was drawn from, which `sample` wants to hear of; None where
        nothing is left to chance, so that a right guess is what `sample` comes to by itself.
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


def _unforeseen() -> random.Random:
    """Random numbers of its own; who has seeded Python's generator, gets the same again."""
    return random.Random(random.getrandbits(128))
