"""Which drafted tokens stand: those that the model itself would have chosen, and one more.

Where nothing is left to chance (temperature 0, a seed, a draft by rule) the model's token is chosen
as if there were no draft, and the draft is right as far as it says the same. Where a draft was
drawn from chances of its own, rejection sampling keeps the model's chances exact. Penalties see
each accepted token, and log-probabilities are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe.errors import StructureError
from moe.sampling.candidates import peaks
from moe.sampling.logprobs import LogitsError, Token, check_peak
from moe.sampling.sampler import Sampler
from moe.speculate.draft import Draft


def verify(sampler: Sampler, draft: Draft, logits_TV: Tensor) -> list[Token]:
    """The next tokens of a sequence: accepted ones, and one that the draft did not foresee.

    Args:
        sampler: of the sequence; it goes on by these tokens.
        logits_TV: of the sequence's last token and of each drafted one, T = drafted tokens + 1.

    Raises:
        LogitsError, StructureError: no token can be drawn from the first row. A later row like that
            ends what is accepted before it, and is met again as the first one.
    """
    assert len(logits_TV) == len(draft.tokens) + 1, (logits_TV.shape, len(draft.tokens))
    if sampler.is_argmax:
        return _likeliest(draft.tokens, logits_TV)
    tokens: list[Token] = []
    guesses, proposals = (*draft.tokens, None), (*draft.proposals, None)
    for row, guess, proposal in zip(logits_TV, guesses, proposals, strict=True):
        try:
            tokens.append(sampler.sample(row, proposal))
        except (LogitsError, StructureError):
            if not tokens:
                raise
            break
        if tokens[-1].id != guess:
            break
    return tokens


def _likeliest(guesses: Sequence[int], logits_TV: Tensor) -> list[Token]:
    """The same where tokens are largest logits: of all rows at once."""
    tokens: list[Token] = []
    best, values = peaks(logits_TV)
    for token, peak, guess in zip(best, values, (*guesses, None), strict=True):
        try:
            check_peak(peak)
        except LogitsError:
            if not tokens:
                raise
            break
        tokens.append(Token(token))
        if token != guess:
            break
    return tokens
