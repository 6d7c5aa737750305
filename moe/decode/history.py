"""Follows what a traced layer makes of its whole history before it attends.

A step's program has no place for tensors of all tokens so far: attention reads the caches itself.
`Histories` follows such tensors through the recorded token, and remembers which caches they come
from and which tensors of the token they have met. What attention gets is then proven by numbers:
keys and values that are expanded latents, keys that an indexer chose, biases by distance.
Legend: L tokens so far, H heads, D size of an indexer's keys, E distances that have a bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from math import gcd
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from moe.describe.attention import expansion_of, halved
from moe.describe.description import Norm, NotDescribed, RotaryTable, Rotation, Style
from moe.describe.observe import AttentionCall
from moe.describe.parts import apply_norm, close, describe_norm, rotate
from moe.kv.layout import LayerKey

_CLOSE, _QUANTIZED = 1e-4, 5e-2  # of expanded latents; the latter where a layer rounds its input
SPARE = 16
"""Tokens that a history needs beyond what limits a choice or a bias, so that the limit shows."""


class HistoryTooShort(NotDescribed):
    """A limit of what a layer sees cannot be told from the end of the history."""


class Met(NamedTuple):
    """A tensor of the token that a history has met, in an operation of this name."""

    name: str
    tensor: Tensor


class Lineage(NamedTuple):
    """The origin of a tensor of the whole history.

    Attributes:
        caches: where its rows are kept.
        met: in order.
        chosen: these are the positions that an indexer chose; the same as a tensor of the token.
        last: the last row of a table of all tokens, as a tensor of the token.
        scores: of the last choice that was made by them.
    """

    caches: tuple[LayerKey, ...] = ()
    met: tuple[Met, ...] = ()
    chosen: Tensor | None = None
    last: Tensor | None = None
    scores: Tensor | None = None

    def floats(self) -> list[Met]:
        return [each for each in self.met if each.tensor.is_floating_point()]


class Histories:
    """The tensors of all tokens so far, found by their memory."""

    def __init__(self) -> None:
        self._lineages: dict[int, Lineage] = {}
        self._kept: list[Tensor] = []  # so that no memory is given out twice

    def add(self, tensors: Iterable[Tensor], lineage: Lineage) -> None:
        for tensor in tensors:
            before = self.lineage(tensor)  # of what it is a view of
            last = before.last if lineage.last is None else lineage.last
            self._lineages[_place(tensor)] = lineage._replace(last=last)
            self._kept.append(tensor)

    def has(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of them is of a whole history."""
        return any(_place(tensor) in self._lineages for tensor in tensors)

    def lineage(self, tensor: Tensor) -> Lineage:
        return self._lineages.get(_place(tensor), Lineage())

    def joined(self, name: str, tensors: Sequence[Tensor], met: Iterable[Tensor]) -> Lineage:
        """The lineage of an operation's result, from these tensors and others of the token that it
        meets."""
        caches = dict[LayerKey, None]()
        so_far: list[Met] = []
        chosen, scores = list[Tensor](), None
        for lineage in map(self.lineage, tensors):
            caches |= dict.fromkeys(lineage.caches)
            so_far += [each for each in lineage.met if not _among(each, so_far)]
            own = lineage.chosen
            chosen += [] if own is None or any(own is each for each in chosen) else [own]
            scores = lineage.scores if scores is None else scores
        so_far += [Met(name, tensor) for tensor in met]
        only = chosen[0] if len(chosen) == 1 else None
        return Lineage(tuple(caches), tuple(so_far), only, scores=scores)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _among(met: Met, others: Iterable[Met]) -> bool:
    return any(met.tensor is other.tensor and met.name == other.name for other in others)


class Latents(NamedTuple):
    """The expansion of an attention layer's cached rows, latents and rotated keys, to heads.

    Attributes:
        leaf: the module that expands latents.
        expansion: its weight, ``(heads, plain + value, R)`` float32.
    """

    leaf: nn.Module
    expansion: Tensor


def latents_of(call: AttentionCall, latent: Tensor, turned: Tensor) -> Latents:
    """Find how keys and values come from ``(1, 1, L, R)`` latents and ``(1, 1, L, T)`` rotated
    keys.

    Raises:
        NotDescribed: in no way that is known here.
    """
    heads, key_size, value_size = call.key.shape[1], call.key.shape[3], call.value.shape[3]
    if latent.shape[1] != 1 or turned.shape[1] != 1:
        raise NotDescribed("attention expands a history that is no latent")
    plain, size = key_size - turned.shape[3], latent.shape[3]
    for leaf in call.module.children():
        weight = getattr(leaf, "weight", None)
        if weight is None or weight.shape != (heads * (plain + value_size), size):
            continue
        expansion = expansion_of(leaf, heads, plain + value_size, size)
        made = torch.einsum("htr,lr->hlt", expansion, latent[0, 0].float())
        keys = torch.cat([made[..., :plain], turned[0].expand(heads, -1, -1).float()], -1)
        tolerance = _QUANTIZED if isinstance(leaf, QuantizedLinear) else _CLOSE
        if close(keys, call.key, tolerance) and close(made[..., plain:], call.value, tolerance):
            return Latents(leaf, halved(expansion, leaf))
    raise NotDescribed("attention expands its history in a way that is not known here")


def heads_by_key(call: AttentionCall, keys: Tensor, values: Tensor) -> Tensor | None:
    """The heads ``(heads,)`` in the order of the cached keys and values ``(1, N, L, D)`` that they
    read, where a layer repeats these over heads; None if it does not, or some more often."""
    if call.key.shape[2:] != keys.shape[2:] or call.value.shape[2:] != values.shape[2:]:
        return None
    own, stored = torch.cat([call.key, call.value], 3)[0], torch.cat([keys, values], 3)[0]
    reads = torch.stack([(own == rows).flatten(1).all(1) for rows in stored])
    if not bool((reads.sum(0) == 1).all()) or len(set(reads.sum(1).tolist())) > 1:
        return None
    of_head = reads.int().argmax(0).repeat_interleave(call.query.shape[1] // len(own))
    return of_head.argsort(stable=True)


class Indexer(NamedTuple):
    """Chooses the ``top_k`` keys with the largest sum over its heads of weight relu(query . key).

    Attributes:
        cache: of its keys.
        pool: tokens of a pool. If it is not 1, pools are chosen in place of tokens, and all tokens
            that follow the last whole pool. A pool's key is the mean of its tokens'.
        bias: ``(pool, D)``; rows have a gate behind the key, and the mean weighs each number by the
            softmax of its gates with this bias added. None: all weigh the same.
        norm, rotation: of a pool's key behind the mean, to the pool's first position.
        rate: tokens that a cached key stands for; positions are those of such keys.
    """

    cache: LayerKey
    top_k: int
    pool: int = 1
    bias: Tensor | None = None
    norm: Norm | None = None
    rotation: Rotation | None = None
    rate: int = 1

    @property
    def most(self) -> int:
        """Most positions that it chooses."""
        return self.top_k * self.pool + self.pool - 1

    def pool_keys(self, rows: Tensor) -> Tensor:
        """``(P, D)``: the keys of the whole pools of ``(L, W)`` rows."""
        count = len(rows) // self.pool
        parts = rows[: count * self.pool].view(count, self.pool, -1)
        if self.bias is None:
            keys = parts.mean(1)
        else:
            size = self.bias.shape[1]
            shares = (parts[..., size : 2 * size] + self.bias).softmax(1)
            keys = (shares * parts[..., :size]).sum(1)
        if self.norm is not None:
            keys = apply_norm(self.norm, keys)
        if self.rotation is not None:
            table, starts = self.rotation.table, torch.arange(count) * self.pool
            table.reserve(len(rows))
            keys = rotate(self.rotation, keys[:, None], table.cos[starts], table.sin[starts])[:, 0]
        return keys


def scored_by(lineage: Lineage, scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """The queries ``(H, D)`` and head weights ``(H,)`` of an indexer that has made these scores.

    Args:
        scores: of all L keys, up to a positive factor.
        keys: ``(L, D)``.

    Returns:
        None if no two tensors that the keys have met make these scores.
    """
    floats = [each.tensor for each in lineage.floats()]
    if len(floats) != 2 or scores.numel() != len(keys):
        return None
    for query, weights in (floats, floats[::-1]):
        heads = weights.numel()
        if query.numel() != heads * keys.shape[1] or query.shape[-1] != keys.shape[1]:
            continue
        by_head = (query.reshape(heads, -1) @ keys.T).relu()
        if _proportional(weights.reshape(-1) @ by_head, scores.reshape(-1)):
            return query, weights
    return None


def _proportional(made: Tensor, given: Tensor) -> bool:
    """They are the same scores up to a positive factor."""
    factor = (made @ given) / (made @ made).clamp_min(1e-30)
    return bool(factor > 0) and close(made * factor, given, _CLOSE)


def pools_chosen(
    lineage: Lineage, mask: Tensor, rows: Tensor, module: nn.Module, tables: Iterable[RotaryTable]
) -> tuple[Indexer, Tensor, Tensor] | None:
    """An indexer that chooses the pools of keys which a mask shows, its queries and the weights of
    its heads; None if no tensors that the rows have met make that choice.

    Args:
        mask: ``(1, 1, 1, L)``, true or 0 where a key is seen.
        rows: ``(L, W)``.
        module: has the bias of gates among its parameters, or the norm of pools' keys among its
            modules.
        tables: by which keys may be rotated.

    Raises:
        HistoryTooShort: all pools are seen.
    """
    floats = [each.tensor for each in lineage.floats()]
    if not 1 <= len(floats) <= 2 or mask.numel() != len(rows):
        return None
    seen = (mask if mask.dtype == torch.bool else mask == 0).reshape(-1)
    if len(floats) == 2:
        pairs = (floats, floats[::-1])
        found = [(q, w, _gated(lineage, q, w, rows, module)) for q, w in pairs]
    else:
        (query,) = floats
        heads = query.numel() // query.shape[-1]
        means = _means(lineage, query, rows, seen, module, tables)
        found = [(query, torch.ones(heads), means)]
    for query, weights, indexers in found:
        for indexer in indexers:
            scored = _chosen_pools(indexer, query, weights, rows, seen, lineage.scores)
            if scored is not None:
                return scored, query, weights
    return None


def _gated(
    lineage: Lineage, query: Tensor, weights: Tensor, rows: Tensor, module: nn.Module
) -> Iterator[Indexer]:
    """Indexers of pools whose keys have gates."""
    size = query.shape[-1]
    if query.numel() != weights.numel() * size or rows.shape[1] < 2 * size:
        return
    for bias in module.parameters():
        if bias.ndim == 2 and bias.shape[1] == size and 1 < bias.shape[0] <= len(rows):
            yield Indexer(lineage.caches[0], 0, pool=bias.shape[0], bias=bias.detach())


def _means(
    lineage: Lineage,
    query: Tensor,
    rows: Tensor,
    seen: Tensor,
    module: nn.Module,
    tables: Iterable[RotaryTable],
) -> Iterator[Indexer]:
    """Indexers of pools whose keys are means, which may be normed and rotated."""
    size = query.shape[-1]
    if rows.shape[1] != size:
        return
    if bool(seen.all()):
        raise HistoryTooShort("all keys are seen")
    pool = gcd(*(seen[1:] != seen[:-1]).nonzero().flatten().add(1).tolist())
    if pool == 1:
        return
    norms: list[Norm | None] = [None]
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (size,):
            with suppress(NotDescribed):
                norms.append(describe_norm(child, size))
    rotations: list[Rotation | None] = [None]
    for table in tables:
        turned = 2 * table.cos.shape[1]
        begins = dict.fromkeys((0, size - turned)) if turned <= size else ()
        rotations += [
            Rotation(style, at, turned, table) for at in begins for style in get_args(Style)
        ]
    for norm, rotation in product(norms, rotations):
        yield Indexer(lineage.caches[0], 0, pool=pool, norm=norm, rotation=rotation)


def _chosen_pools(
    indexer: Indexer,
    query: Tensor,
    weights: Tensor,
    rows: Tensor,
    seen: Tensor,
    given: Tensor | None,
) -> Indexer | None:
    """The indexer with the number of pools that it chooses, if these are what is seen, chosen by
    its scores.

    Args:
        given: the scores that a choice was made by.
    """
    pool, count = indexer.pool, len(rows) // indexer.pool
    keys = indexer.pool_keys(rows)
    scores = weights.reshape(-1) @ (query.reshape(weights.numel(), -1) @ keys.T).relu()
    if given is None or given.numel() != count or not _proportional(scores, given.reshape(-1)):
        return None
    own = seen[: count * pool].view(count, pool)
    top_k = int(own.all(1).sum())
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[scores.topk(top_k).indices] = True
    if not torch.equal(own, chosen[:, None].expand_as(own)) or not bool(seen[count * pool :].all()):
        return None
    if count < top_k + SPARE:
        raise HistoryTooShort(f"an indexer chooses {top_k} pools of keys or more")
    if count * pool == len(rows):
        raise HistoryTooShort("a history of whole pools")
    return indexer._replace(top_k=top_k)


def biases_of(lineage: Lineage, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The biases of E distances ``(H, E)``, and the factors of one number each that they are
    multiplied with, that give these biases ``(1, H, 1, L)``: 0 from distance E on.

    Raises:
        NotDescribed: no tensor that the positions have met gives them.
        HistoryTooShort: all distances so far have one.
    """
    heads, tokens = bias.shape[1], bias.shape[3]
    wide = [each.tensor for each in lineage.floats() if each.tensor.numel() > 1]
    single = [each for each in lineage.floats() if each.tensor.numel() == 1]
    if bias.shape[0] == bias.shape[2] == len(wide) == 1 and wide[0].numel() % heads == 0:
        (own,), back = wide, torch.arange(tokens - 1, -1, -1)
        own = own.reshape(heads, -1)
        reach = own.shape[1]
        made = own[:, back.clamp(max=reach - 1)].masked_fill(back >= reach, 0.0)
        for each in single:
            made = made * each.tensor.reshape(())
        if all(each.name == "mul" for each in single) and close(made, bias, _CLOSE):
            if tokens < reach + SPARE:
                raise HistoryTooShort(f"biases of {reach} distances")
            return own, [each.tensor for each in single]
    raise NotDescribed("attention adds biases that are not known here")


def positions_chosen(indices: Tensor, lineage: Lineage) -> Tensor:
    """The positions that an indexer chose, as a tensor of the token.

    Raises:
        NotDescribed: the choice is not known to be one.
    """
    chosen = lineage.chosen
    if chosen is None or not torch.equal(
        indices.reshape(-1).long().sort().values, chosen.sort().values
    ):
        raise NotDescribed("attention reads keys that are chosen in a way that is not known here")
    return chosen


def lengths() -> Iterator[int]:
    """Tokens of the histories to try, one after the other, while one is too short; with one more
    each is a prime, so that none ends with a whole pool of keys."""
    yield from (0, 66, 2308, 16410)
