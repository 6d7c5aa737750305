"""The next tokens of a batch, from rows of logits.

Each sequence owns a `Sampler` with its own penalties and its own random numbers, so that what a
request gets never depends on who else is in the batch. `sample_batch` draws the next token of many
at once, on the device where their logits are: everything that a step's draws depend on is copied
there, and one readback brings tokens and log-probabilities.

The order of the steps is fixed: bias -> penalties -> structure -> temperature -> top-k -> top-p ->
min-p -> draw. Each of the three filters works on the renormalised survivors of the one before; ties
go to the lower token id everywhere. `draws.py` has the arithmetic. Shape suffixes: B rows of a
batch, T rows or tokens of a sequence, V vocabulary, C candidates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.sampling import draws
from moe.sampling.batch import LogitsError as LogitsError
from moe.sampling.batch import Row, candidates, draw_batch, score, scores_of
from moe.sampling.batch import Token as Token
from moe.sampling.batch import check_peak as check_peak
from moe.sampling.batch import peaks as peaks
from moe.sampling.constraint import Constraint
from moe.sampling.params import SamplingParams


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
    """The parameters of one sequence's tokens, and the state of its penalties and random numbers.

    `index` is the sequence's number among the request's `n`. A seed fixes the output: sequence 0
    uses the seed itself, sequence i one derived from (seed, i). Python's generator is used because
    it takes all bits of the seed (torch's CPU generator drops all but 32) and documents that its
    stream stays the same in later versions; each token takes one number, so a token's draw depends
    on the seed and its position only, on any device. Without a seed, the numbers derive from that
    generator's global state: they differ in each process unless the caller seeds it.
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
        self._uniform: float | None = None
        self._edits = _Edits(params, prompt_token_ids) if _Edits.needed(params) else None

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the position of the largest logit and nothing else."""
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and self._edits is None
            and self._constraint is None
        )

    def begin_mask(self) -> None:
        """Begin to find out, in another thread, what the structure lets follow; if there is one."""
        if self._constraint is not None:
            self._constraint.begin_mask()

    def wait_until(self, until: float) -> None:
        """How long sampling waits for that: until this time of `time.monotonic`."""
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
        if proposal is None or self.params.temperature == 0:
            (outcome,) = sample_batch([self], [logits_V])
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        ids_C, weights_C = self._candidates(logits_V)
        token = Token(rejection_sample(ids_C, weights_C, proposal, self._random.random))
        if self.params.logprobs is not None:
            (token,) = score([token.id], logits_V[None], self.params.logprobs)
        return self.accept(token)

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
        twin._edits = None if self._edits is None else self._edits.fork()
        twin._constraint = None if self._constraint is None else self._constraint.fork()
        if self.params.temperature > 0:
            twin._random = _new_random()
            if self.params.seed is not None:
                twin._random.setstate(self._random.getstate())
            else:
                twin._uniform = None
        return twin

    def propose(self, logits_V: Tensor) -> tuple[int, Proposal | None]:
        """Draft the next token, with a fork, from (V,) logits that approximate the model's.

        Returns the token, and the `Proposal` to pass to `sample`. The proposal is None if sampling
        is deterministic: then `sample` chooses a correct draft by itself.
        """
        if self.params.temperature == 0 or self.params.seed is not None:
            return self.sample(logits_V).id, None
        ids_C, weights_C = self._candidates(logits_V)
        token_id = int(ids_C[_position(weights_C, self._random.random())])
        self._remember(token_id)
        return token_id, Proposal(token_id, ids_C, weights_C / weights_C.sum())

    def row(self) -> Row:
        """What decides the next token beside its logits; the same until that is accepted.

        Raises `StructureError`, `MaskLateError`, and `LogitsError` if nothing may follow.
        """
        bits = None
        if self._constraint is not None:
            if self._constraint.is_over:  # a draft asks for more
                raise LogitsError("the text is complete, and its structure lets nothing follow")
            bits = self._constraint.allowed_bits()
        if self.params.temperature > 0 and self._uniform is None:
            self._uniform = self._random.random()
        edits = None if self._edits is None else self._edits.arrays
        return Row(self.params, self._uniform or 0.0, edits, bits)

    def accept(self, token: Token) -> Token:
        """Take the state after this token; returns it, marked if it ends its structure."""
        self._remember(token.id)
        is_over = self._constraint is not None and self._constraint.is_over
        return replace(token, is_last=True) if is_over else token

    def _candidates(self, logits_V: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """As `candidates`, after bias, penalties and structure."""
        scores_BV = scores_of(logits_V.detach()[None], [self.row()])
        for peak in (logits_V.max(), scores_BV.max()):
            check_peak(float(peak))
        return candidates(scores_BV[0], self.params)

    def _remember(self, token_id: int) -> None:
        self._uniform = None
        if self._edits is not None:
            self._edits.add(token_id)
        if self._constraint is not None:
            self._constraint.take(token_id)


class _Edits:
    """The scores that a sequence's bias and penalties change: an entry for each such token."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        seen = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()
        ids = sorted(seen | params.logit_bias.keys())
        self._places = {token_id: place for place, token_id in enumerate(ids)}
        self._counts: dict[int, int] = {}
        self._ids, self._numbers = np.array(ids, np.int64), np.empty((len(ids), 3))
        self._numbers[:] = 0.0, 1.0, 0.0
        for token_id, bias in params.logit_bias.items():
            self._numbers[self._places[token_id], 0] = bias
        for token_id in seen:
            self._numbers[self._places[token_id], 1] = params.repetition_penalty

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a sequence with these parameters ever has an entry."""
        penalties = params.presence_penalty, params.frequency_penalty
        return bool(params.logit_bias) or any(penalties) or params.repetition_penalty != 1.0

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 ``(N,)`` distinct ids, and float64 ``(N, 3)`` as of `moe.sampling.draws.edited`."""
        count = len(self._places)
        return self._ids[:count], self._numbers[:count]

    def add(self, token_id: int) -> None:
        """The token was generated."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                more = max(64, place // 4)
                self._ids = np.append(self._ids, np.zeros(more, np.int64))
                self._numbers = np.append(self._numbers, np.zeros((more, 3)), axis=0)
            self._ids[place] = token_id
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        params = self._params
        self._numbers[place, 1] = params.repetition_penalty
        self._numbers[place, 2] = params.frequency_penalty * count + params.presence_penalty

    def fork(self) -> _Edits:
        """An independent copy."""
        twin = copy(self)
        twin._places, twin._counts = self._places.copy(), self._counts.copy()
        twin._ids, twin._numbers = self._ids.copy(), self._numbers.copy()
        return twin


def sample_batch(samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> list[Token | Exception]:
    """The next token of each sequence, or what `Sampler.sample` would raise for it.

    Args:
        samplers: each once; they advance by their tokens.
        logits: (V,) of each, of one dtype and device.
    """
    made: dict[int, Token | Exception] = {}
    rows: dict[int, Row] = {}
    for place, sampler in enumerate(samplers):
        try:
            rows[place] = sampler.row()
        except Exception as error:  # of its structure
            made[place] = error
    drawn = draw_batch([logits[place] for place in rows], list(rows.values()))
    for place, token in zip(rows, drawn, strict=True):
        try:
            made[place] = samplers[place].accept(token) if isinstance(token, Token) else token
        except Exception as error:  # of its structure
            made[place] = error
    return [made[place] for place in range(len(samplers))]


def _position(weights_C: np.ndarray, uniform: float) -> int:
    """Position drawn by inverting the cumulative weights; `uniform` lies in [0, 1)."""
    given = torch.tensor([[min(uniform, draws.MOST_UNIFORM)]], dtype=torch.float64)
    return int(draws.draw(torch.from_numpy(weights_C)[None], given))


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
    return int(ids_C[_position(rest_C, uniform())])


def _new_random() -> random.Random:
    """A new generator, seeded from Python's global one."""
    return random.Random(random.getrandbits(128))
