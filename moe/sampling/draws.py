"""The arithmetic of sampling: rows of logits of a batch, as tensor operations on any device.

Nothing here waits for the device or depends on values, so a whole batch is sampled with one
readback (`moe.sampling.sampler.sample_batch`). In main memory `host.py` draws, row by row. Scores
are float32, as logits are; weights and their sums are float64. Ties go to the lower token id
everywhere.

Shape legend: B rows, V vocabulary, C candidates in falling order of their scores.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe.sampling import host

MOST_UNIFORM = 1 - 2**-52
"""Times a sum it is less than the sum, however that is rounded."""
_BLOCK = 512  # tokens whose weights `draw` sums before it looks at single ones
_LOW = 0xFFFFFFFF
_MOST = float(torch.finfo(torch.float32).max)


def edited(logits_BV: Tensor, place_N: Tensor, edits_N3: Tensor) -> Tensor:
    """A float32 copy of the logits with some of them changed, each by float64 arithmetic.

    Args:
        place_N: int64, ``row * V + id``, each once.
        edits_N3: float64: what is added, then the factor that divides positive and multiplies
            negative scores (repetition penalty as in CTRL, 2019), then what is subtracted.
    """
    scores_BV = logits_BV.to(torch.float32, copy=True)
    flat = scores_BV.view(-1)
    added, factor, subtracted = edits_N3.unbind(1)
    old_N = flat[place_N].double() + added
    new_N = torch.where(old_N > 0, old_N / factor, old_N * factor).clamp(-_MOST, _MOST)
    new_N = torch.where(old_N == -torch.inf, old_N, new_N - subtracted)
    flat[place_N] = new_N.float()
    return scores_BV


def restricted(scores_BV: Tensor, row_M: Tensor, bits_MB: Tensor) -> Tensor:
    """Scores of some rows with -inf for tokens that are not allowed; changes `scores_BV`.

    Args:
        row_M: int64.
        bits_MB: uint8, bit ``i % 8`` of byte ``i // 8`` allows token i; ``ceil(V / 8)`` bytes.
    """
    shift = torch.arange(8, dtype=torch.uint8, device=bits_MB.device)
    allowed = ((bits_MB[:, :, None] >> shift) & 1).view(torch.bool).flatten(1)
    allowed = allowed[:, : scores_BV.shape[1]]
    if len(row_M) == len(scores_BV):
        return scores_BV.masked_fill_(~allowed, -torch.inf)
    own = scores_BV.index_select(0, row_M).masked_fill_(~allowed, -torch.inf)
    return scores_BV.index_copy_(0, row_M, own)


def weights_of(scores: Tensor, peak_B1: Tensor, temperature_B1: Tensor) -> Tensor:
    """Unnormalised float64 probabilities; the largest is 1 at any temperature."""
    # Shifting first makes every temperature safe: the largest score stays 0 however small it is.
    return (scores.double() - peak_B1).div_(temperature_B1).exp_()


def largest(scores_BV: Tensor, count: int) -> Tensor:
    """(B, count) int64 ids of the largest float32 scores in falling order."""
    if not host.on_host(scores_BV):
        return sorted_keys(scores_BV, count)
    found = np.zeros((len(scores_BV), count), np.int64)
    for row, ids in zip(scores_BV.numpy(), found, strict=True):
        own = host.largest(row, count)
        ids[: len(own)] = own
    return torch.from_numpy(found)


def sorted_keys(scores_BV: Tensor, count: int) -> Tensor:
    """`largest` on any device."""
    # Keys that differ, so that their order is the same on each device: the bits of the score, whose
    # order as whole numbers is that of the scores, above those of the id.
    bits = (scores_BV + 0.0).view(torch.int32)  # -0.0 and 0.0 are a tie
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids_V = torch.arange(scores_BV.shape[1], device=scores_BV.device)
    keys = (bits.long() << 32).bitwise_or_(_LOW - ids_V)
    return _LOW - (keys.topk(count, -1).values & _LOW)


def nucleus(
    scores_BV: Tensor,
    peak_B1: Tensor,
    temperature_B1: Tensor,
    top_k_B1: Tensor | None,
    total_B1: Tensor | None,
    top_p_B1: Tensor,
    min_p_B1: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k, then top-p, then min-p among the `size` largest scores.

    Top-p keeps the shortest run of the most likely tokens whose mass reaches it (Holtzman et al.
    2019), min-p those at least as many times as likely as the most likely one (Nguyen et al. 2024).

    Args:
        scores_BV: float32.
        top_k_B1: int64, at most `size`; None: rows keep all tokens.
        total_B1: float64 sums of the weights of all tokens; None with top-k.

    Returns:
        ids_BC: int64, C = size.
        weights_BC: float64, 0 for what is not kept.
        enough_B1: bool: no token beyond these would be kept.
    """
    ids_BC = largest(scores_BV, size)
    weights_BC = weights_of(scores_BV.gather(1, ids_BC), peak_B1, temperature_B1)
    if top_k_B1 is not None:
        beyond = torch.arange(size, device=ids_BC.device) >= top_k_B1
        weights_BC = weights_BC.masked_fill(beyond, 0.0)
    mass_BC = weights_BC.cumsum(-1)
    if total_B1 is None:
        total_B1 = mass_BC[:, -1:]
    goal_B1 = top_p_B1 * total_B1
    # The token that crosses the goal is kept, hence the mass before it decides.
    left_out = ((mass_BC - weights_BC) >= goal_B1) & (top_p_B1 < 1)
    enough_B1 = mass_BC[:, -1:] >= goal_B1
    if size == scores_BV.shape[1]:  # whatever the sum of all was rounded to
        enough_B1 = torch.ones_like(enough_B1)
    return ids_BC, weights_BC.masked_fill_(left_out | (weights_BC < min_p_B1), 0.0), enough_B1


def draw(weights_BC: Tensor, uniform_B1: Tensor) -> Tensor:
    """(B, 1) int64 positions drawn by inverting the cumulative weights.

    Args:
        weights_BC: float64, not all 0 in a row.
        uniform_B1: float64 in [0, MOST_UNIFORM].
    """
    size = weights_BC.shape[1]
    if size <= 2 * _BLOCK:
        mass_BC = weights_BC.cumsum(-1)
        return _first_above(mass_BC, mass_BC[:, -1:] * uniform_B1)
    whole = size // _BLOCK * _BLOCK
    sums = weights_BC[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < size:
        sums = torch.cat((sums, weights_BC[:, whole:].sum(-1, keepdim=True)), 1)
    mass = sums.cumsum(-1)
    goal_B1 = mass[:, -1:] * uniform_B1
    block_B1 = _first_above(mass, goal_B1)
    before_B1 = mass.gather(1, (block_B1 - 1).clamp_(min=0)).masked_fill_(block_B1 == 0, 0.0)
    inside = block_B1 * _BLOCK + torch.arange(_BLOCK, device=weights_BC.device)
    own = weights_BC.gather(1, inside.clamp(max=size - 1)).masked_fill_(inside >= size, 0.0)
    mass, left_B1 = own.cumsum(-1), goal_B1 - before_B1
    # A block's sum is rounded in another order: what is left may not lie below it.
    below_B1 = torch.nextafter(mass[:, -1:], torch.zeros_like(left_B1))
    return block_B1 * _BLOCK + _first_above(mass, torch.minimum(left_B1, below_B1))


def _first_above(mass_BC: Tensor, goal_B1: Tensor) -> Tensor:
    """The first position where the mass exceeds the goal, which lies below the last; so its weight
    is positive. Any position in a row of NaN."""
    position_B1 = torch.searchsorted(mass_BC, goal_B1, right=True)
    return position_B1.clamp_(max=mass_BC.shape[1] - 1)


def accepted(
    ids_BC: Tensor | None,
    weights_BC: Tensor,
    offered_BV: Tensor,
    proposed_B1: Tensor,
    uniform_B1: Tensor,
    again_B1: Tensor,
) -> Tensor:
    """(B, 1) int64 ids drawn by the weights, which are the proposed ones as often as possible.

    Rejection sampling (Leviathan et al. 2023): accept the proposed token with probability
    ``min(1, p / q)``, else draw one from the positive part of ``p - q``.

    Args:
        ids_BC: distinct; None: 0 to C - 1.
        weights_BC: float64, of p, not all 0 in a row.
        offered_BV: float64, q.
        proposed_B1: int64, drawn from q.
        uniform_B1, again_B1: float64 in [0, MOST_UNIFORM].
    """
    chances_BC = weights_BC / weights_BC.sum(-1, keepdim=True)
    given_BC = offered_BV if ids_BC is None else offered_BV.gather(1, ids_BC)
    if ids_BC is None:
        wanted_B1 = chances_BC.gather(1, proposed_B1)
    else:
        wanted_B1 = chances_BC.where(ids_BC == proposed_B1, 0.0).sum(-1, keepdim=True)
    rest_BC = (chances_BC - given_BC).clamp_(min=0.0)
    # Nothing is left where p and q are the same up to rounding.
    rest_BC = torch.where(rest_BC.sum(-1, keepdim=True) > 0, rest_BC, chances_BC)
    other_B1 = draw(rest_BC, again_B1)
    if ids_BC is not None:
        other_B1 = ids_BC.gather(1, other_B1)
    takes_B1 = uniform_B1 * offered_BV.gather(1, proposed_B1) < wanted_B1
    return torch.where(takes_B1, proposed_B1, other_B1)


def logprobs(logits_BV: Tensor, ids_B1: Tensor, count: int) -> Tensor:
    """(B, 1 + 2 * count) float64: the natural log-probability of the ids, then the ids of the most
    likely tokens in falling order, then their log-probabilities."""
    raw_BV = logits_BV.float()
    normaliser_B1 = raw_BV.double().logsumexp(-1, keepdim=True)
    top_BN = largest(raw_BV, count) if count else ids_B1[:, :0]
    values = raw_BV.gather(1, torch.cat((ids_B1, top_BN), 1)).double() - normaliser_B1
    return torch.cat((values[:, :1], top_BN.double(), values[:, 1:]), 1)
