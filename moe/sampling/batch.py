"""Tokens drawn for a batch of rows of logits, with one readback.

`Draws` gets the logits of many sequences and a `Row` of each: its parameters, its random number,
and what bias, penalties and structure do to its scores. All of it is copied to the device where
the logits are, the arithmetic of `draws.py` runs there, and one copy brings tokens and
log-probabilities back. Until that is read, a next step may read the tokens where they are. Rows in
main memory are drawn one by one (`host.py`).

Shape suffixes: B rows of a batch, T rows or tokens of a sequence, N edited scores, V vocabulary, C
candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.backends import triton_kernels
from moe.errors import MoEError
from moe.sampling import draws, host
from moe.sampling.params import SamplingParams
from moe.settings.device import to_device

_logger = logging.getLogger("moe")

_FIRST_GUESS = 1024
"""Largest scores looked at before top-p sorts more of the vocabulary: another readback."""
_CACHED = 1 << 18  # scores that a CPU takes at once: what its caches hold, with their weights
_HEADS = 5  # numbers of each row that `_outcome` reads
_AT_ONCE = 1 << 26  # scores that another device takes at once: it needs some 30 bytes for each


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
    """A drafted token, with the probabilities that it was drawn from, where its logits were.

    Attributes:
        token_id: one of ids_C.
        ids_C: int64, distinct, in any order.
        chances_C: float64, their probabilities.
    """

    token_id: int
    ids_C: Tensor
    chances_C: Tensor


class Row(NamedTuple):
    """The facts that decide a row's token beside its logits.

    Attributes:
        uniform: random, in [0, 1); not used at temperature 0.
        edits: int64 ``(N,)`` distinct ids, and float64 ``(N, 3)`` as of `draws.edited`; None: none.
        bits: of `Constraint.allowed_bits`; None: everything is allowed.
        proposal: to be the token as often as the row's own probabilities allow; None: none, as at
            temperature 0.
        again: random, in [0, 1): draws the token where the proposal is refused.
    """

    params: SamplingParams
    uniform: float
    edits: tuple[np.ndarray, np.ndarray] | None = None
    bits: np.ndarray | None = None
    proposal: Proposal | None = None
    again: float = 0.0

    @property
    def is_argmax(self) -> bool:
        """Return whether the token is the position of the largest logit and nothing else."""
        plain = self.edits is None and self.bits is None
        return plain and self.params.temperature == 0 and self.params.logprobs is None


class Drawn(NamedTuple):
    """The outcome of a row.

    Attributes:
        token: or why there is none.
        likeliest: the position of the largest logit.
    """

    token: Token | LogitsError
    likeliest: int


class Draws:
    """The token of each row, which a device goes on to draw while the host does something else.

    One readback for the whole batch; two or three where top-p alone keeps very many tokens.

    Args:
        logits: ``(T, V)`` each, one for all rows in their order; of one dtype and device.
    """

    def __init__(self, logits: Sequence[Tensor], rows: Sequence[Row]) -> None:
        self._parts: list[tuple[int, _Part]] = []  # each with its first row
        if not rows:
            return
        logits_RV = joined(logits).detach()
        for part in parts_of(len(rows), logits_RV[0]):
            logits_BV, given = logits_RV[part.start : part.stop], rows[part.start : part.stop]
            self._parts.append((part.start, _part_of(logits_BV, given)))

    @property
    def ids_B(self) -> Tensor:
        """``(B,)`` int64 where the logits are: the tokens, but for `redrawn` rows and those without
        a token."""
        parts = [part.ids_B for _, part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self) -> list[Drawn]:
        """The outcome of each row; waits for the device."""
        return [drawn for _, part in self._parts for drawn in part.read()]

    @property
    def redrawn(self) -> set[int]:
        """Rows that `read` had to draw again, as top-p keeps more tokens than were looked at."""
        return {begin + row for begin, part in self._parts for row in part.redrawn}


def draw_batch(logits: Sequence[Tensor], rows: Sequence[Row]) -> list[Drawn]:
    """The token of each row; see `Draws`."""
    return Draws(logits, rows).read()


class _Part(Protocol):
    """Some rows of `Draws`."""

    @property
    def ids_B(self) -> Tensor: ...
    @property
    def redrawn(self) -> Collection[int]: ...
    def read(self) -> list[Drawn]: ...


def _part_of(logits_BV: Tensor, rows: Sequence[Row]) -> _Part:
    likeliest = all(row.is_argmax for row in rows)
    if host.on_host(logits_BV):
        return _OnHost(_likeliest(logits_BV) if likeliest else _one_by_one(logits_BV, rows))
    kernels = _kernels_for(logits_BV)
    return _Peaks(logits_BV, kernels) if likeliest else _Batch(logits_BV, rows, kernels)


class _OnHost:
    """Rows that have been drawn."""

    redrawn: Collection[int] = ()

    def __init__(self, drawn: list[Drawn]) -> None:
        self._drawn = drawn

    @property
    def ids_B(self) -> Tensor:
        found = [d.token.id if isinstance(d.token, Token) else d.likeliest for d in self._drawn]
        return torch.tensor(found)

    def read(self) -> list[Drawn]:
        return self._drawn


class _Peaks:
    """Rows of which the largest logit is wanted, on a device.

    Args:
        logits_BV: any float dtype.
        kernels: `kernels.triton.draw`; None: torch looks for them.
    """

    redrawn: Collection[int] = ()

    def __init__(self, logits_BV: Tensor, kernels: ModuleType | None) -> None:
        if kernels is not None and logits_BV.dtype.itemsize <= 4:
            found_2B = kernels.peaks_of(logits_BV)
        else:
            values, ids = logits_BV.max(-1)
            found_2B = torch.stack((ids, values.double().view(torch.int64)))
        self.ids_B = found_2B[0]
        self._sent = _Sent(found_2B)

    def found(self) -> tuple[list[int], list[float]]:
        """As `peaks`."""
        ids, values = self._sent.read()
        return ids.tolist(), values.view(np.float64).tolist()

    def read(self) -> list[Drawn]:
        return _at_peaks(*self.found())


def joined(logits: Sequence[Tensor]) -> Tensor:
    """Rows below each other; not a copy if they follow each other in memory, as after a step."""
    first = logits[0]
    if len(logits) == 1:
        return first
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for own in logits:
        if own.data_ptr() != place or not own.is_contiguous():
            return torch.cat(list(logits))
        place += own.nbytes
    if logits[-1].untyped_storage().data_ptr() != storage:
        return torch.cat(list(logits))
    rows = sum(own.shape[0] for own in logits)  # a tensor's len() takes five times as long
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def parts_of(count: int, logits_V: Tensor) -> Iterator[range]:
    """So many rows, in parts that are computed together: on a CPU few enough for its caches."""
    size = max(1, (_CACHED if logits_V.is_cpu else _AT_ONCE) // logits_V.shape[-1])
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _one_by_one(logits_BV: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """The same in main memory."""
    drawn, scores_BV = list[Drawn](), scores_of(logits_BV, rows).numpy()
    for at, (row, best, peak) in enumerate(zip(rows, *peaks(logits_BV), strict=True)):
        scores_V, params = scores_BV[at], row.params
        token_id, highest = best, peak
        if row.edits is not None or row.bits is not None:
            token_id = int(scores_V.argmax())
            highest = float(scores_V[token_id])
        if error := _usable(peak) or _usable(highest):
            drawn.append(Drawn(error, best))
            continue
        if params.temperature:
            token_id = _drawn_of(row, *host.candidates(scores_V, params, highest))
        token = Token(token_id)
        if params.logprobs is not None:
            most = min(params.logprobs, logits_BV.shape[1])
            numbers = draws.logprobs(logits_BV[at : at + 1], torch.tensor([[token_id]]), most)
            token = _scored(token_id, numbers[0].numpy(), most)
        drawn.append(Drawn(token, best))
    return drawn


def _drawn_of(row: Row, ids_C: np.ndarray | None, weights_C: np.ndarray) -> int:
    """A token drawn by weights of candidates; with a proposal, by rejection sampling."""
    uniform, proposal = min(row.uniform, draws.MOST_UNIFORM), row.proposal
    if proposal is not None:
        offered = proposal.ids_C.numpy(), proposal.chances_C.numpy()
        again = min(row.again, draws.MOST_UNIFORM)
        return host.accepted(ids_C, weights_C, offered, proposal.token_id, uniform, again)
    place = host.position(weights_C, uniform)
    return place if ids_C is None else int(ids_C[place])


class _Drawing(NamedTuple):
    """Rows of a `_Batch` on their way.

    Attributes:
        rows: which.
        ids_B1: int64, on the device.
        scored: those of them whose log-probabilities are wanted.
        sent: what is known of all of them.
    """

    rows: Sequence[int]
    ids_B1: Tensor
    scored: Sequence[int]
    sent: _Sent


class _Batch:
    """A batch whose tokens are drawn together, on a device.

    Args:
        logits_BV: any float dtype.
        rows: one for each.
        kernels: `kernels.triton.draw`; None: torch draws.
    """

    def __init__(self, logits_BV: Tensor, rows: Sequence[Row], kernels: ModuleType | None) -> None:
        self._logits_BV, self._rows, self._kernels = logits_BV, rows, kernels
        self._scores_BV = scores_of(logits_BV, rows)
        self._raw_peak_B1, self._likeliest_B1 = logits_BV.max(-1, keepdim=True)
        self._peak_B1 = self._raw_peak_B1
        if any(row.edits is not None or row.bits is not None for row in rows):
            self._peak_B1 = self._scores_BV.amax(-1, keepdim=True)
        most = draws.MOST_UNIFORM
        own = [
            (row.params.temperature, min(row.uniform, most), row.params.kept_mass, row.params.min_p)
            for row in rows
        ]
        self._numbers_4B1 = to_device(np.array(own).T[..., None].copy(), logits_BV.device)
        self._totals_B1: Tensor | None = None
        self._keys_BV: Tensor | None = None
        self._size = min(_FIRST_GUESS, logits_BV.shape[1])
        self._first = self._begin(range(len(rows)), self._size)
        self.redrawn = set[int]()

    @property
    def ids_B(self) -> Tensor:
        """See `Draws`."""
        return self._first.ids_B1[:, 0]

    def read(self) -> list[Drawn]:
        """The outcome of each row."""
        made, drawing = dict[int, Drawn](), self._first
        while True:
            found = zip(drawing.rows, self._finish(drawing), strict=True)
            made |= {row: drawn for row, drawn in found if drawn is not None}
            left = [row for row in drawing.rows if row not in made]
            if not left:
                return [made[row] for row in range(len(made))]
            self.redrawn |= set(left)
            self._size = min(16 * self._size, self._logits_BV.shape[1])
            drawing = self._begin(left, self._size)

    def _begin(self, rows: Sequence[int], size: int) -> _Drawing:
        """Draw some rows by their ``size`` largest scores."""
        every = len(rows) == len(self._rows)
        at = None if every else to_device(np.array(rows), self._logits_BV.device)
        logits_BV, peak_B1 = _of(self._logits_BV, at), _of(self._peak_B1, at)
        kinds = _kinds([self._rows[row].params for row in rows], size, logits_BV.shape[1])
        if len(kinds) == 1:
            ids_B1, enough_B1 = self._group(next(iter(kinds)), at, rows)
        else:
            ids_B1 = torch.empty_like(peak_B1, dtype=torch.int64)
            enough_B1 = torch.empty_like(peak_B1, dtype=torch.bool)
            for kind, members in kinds.items():
                own = to_device(np.array(members), logits_BV.device)
                given = own if at is None else at[own]
                ids, enough = self._group(kind, given, [rows[member] for member in members])
                ids_B1.index_copy_(0, own, ids)
                enough_B1.index_copy_(0, own, enough)
        raw_peak_B1, likeliest_B1 = _of(self._raw_peak_B1, at), _of(self._likeliest_B1, at)
        heads = ids_B1.double(), raw_peak_B1, peak_B1, enough_B1, likeliest_B1.double()
        parts = [torch.cat(heads, 1)]
        counts = [self._rows[row].params.logprobs for row in rows]
        scored = [place for place, count in enumerate(counts) if count is not None]
        if scored:
            most = min(max(count or 0 for count in counts), logits_BV.shape[1])
            own = to_device(np.array(scored), logits_BV.device)
            parts.append(draws.logprobs(logits_BV[own], ids_B1[own], most))
            parts = [torch.cat([part.flatten() for part in parts])]
        return _Drawing(rows, ids_B1, scored, _Sent(parts[0]))

    def _finish(self, drawing: _Drawing) -> list[Drawn | None]:
        """The outcome of these rows; None where top-p needs more than were looked at."""
        rows, numbers = drawing.rows, drawing.sent.read()
        if not drawing.scored:
            return [_outcome(*row) for row in numbers.tolist()]
        head_end = _HEADS * len(rows)
        head, tail = numbers[:head_end], numbers[head_end:].reshape(len(drawing.scored), -1)
        found = [_outcome(*row) for row in head.reshape(len(rows), -1).tolist()]
        for place, row in zip(drawing.scored, tail, strict=True):
            drawn, count = found[place], self._rows[rows[place]].params.logprobs
            if drawn is not None and isinstance(drawn.token, Token):
                token = _scored(drawn.token.id, row, count or 0)
                found[place] = drawn._replace(token=token)
        return found

    def _group(
        self, kind: tuple[int, bool] | None, at: Tensor | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(B, 1) ids and whether enough scores were looked at, of rows of one kind."""
        scores_BV, peak_B1 = _of(self._scores_BV, at), _of(self._peak_B1, at)
        if kind is None:
            return scores_BV.argmax(-1, keepdim=True), torch.ones_like(peak_B1, dtype=torch.bool)
        numbers = self._numbers_4B1 if at is None else self._numbers_4B1[:, at]
        temperature = numbers[0]
        size, bounded = kind
        if not size:
            weights_BV = draws.weights_of(scores_BV, peak_B1, temperature)
            if any(self._rows[row].params.min_p for row in rows):
                weights_BV = weights_BV.mul_(weights_BV >= numbers[3])
            ids_B1 = self._drawn_of(rows, None, weights_BV, numbers[1])
            return ids_B1, torch.ones_like(peak_B1, dtype=torch.bool)
        top_k = total = None
        kernels = self._kernels
        if kernels is not None and (
            size > kernels.MOST or any(self._rows[row].proposal for row in rows)
        ):
            kernels = None
        if kernels is not None and self._keys_BV is None:
            self._keys_BV, self._totals_B1 = kernels.keys_of(
                self._scores_BV, self._peak_B1, self._numbers_4B1[0]
            )
        if bounded:
            limits = [[min(self._rows[row].params.top_k, size)] for row in rows]
            top_k = to_device(np.array(limits), scores_BV.device)
        else:
            if self._totals_B1 is None:
                weights_BV = draws.weights_of(self._scores_BV, self._peak_B1, self._numbers_4B1[0])
                self._totals_B1 = weights_BV.sum(-1, keepdim=True)
            total = _of(self._totals_B1, at)
        if kernels is not None and self._keys_BV is not None:
            whole = size == scores_BV.shape[1]
            keys_BC = _of(self._keys_BV, at).topk(size, -1).values
            ids_B1, enough_B1 = kernels.draw(keys_BC, peak_B1, numbers, top_k, total, whole=whole)
            return ids_B1, enough_B1
        ids_BC, weights_BC, enough_B1 = draws.nucleus(
            scores_BV, peak_B1, temperature, top_k, total, numbers[2], numbers[3], size
        )
        return self._drawn_of(rows, ids_BC, weights_BC, numbers[1]), enough_B1

    def _drawn_of(
        self, rows: Sequence[int], ids_BC: Tensor | None, weights_BC: Tensor, uniform_B1: Tensor
    ) -> Tensor:
        """(B, 1) ids drawn by weights, those with a proposal by rejection sampling.

        Args:
            ids_BC: whose weights they are; None: of all tokens in their order.
        """
        own = {at: self._rows[row] for at, row in enumerate(rows) if self._rows[row].proposal}
        drawn_B1 = torch.empty_like(uniform_B1, dtype=torch.int64)
        if len(own) < len(rows):
            drawn_B1 = draws.draw(weights_BC, uniform_B1)
            drawn_B1 = drawn_B1 if ids_BC is None else ids_BC.gather(1, drawn_B1)
        if not own:
            return drawn_B1
        device, vocab_size = weights_BC.device, self._logits_BV.shape[1]
        offered = [row.proposal for row in own.values() if row.proposal is not None]
        sizes = [proposal.ids_C.shape[0] for proposal in offered]
        begins = to_device(np.repeat(vocab_size * np.arange(len(own)), sizes), device)
        places = torch.cat([proposal.ids_C for proposal in offered]) + begins
        chances = torch.cat([proposal.chances_C for proposal in offered])
        offered_PV = torch.zeros(len(own), vocab_size, dtype=torch.float64, device=device)
        offered_PV.view(-1).index_copy_(0, places, chances)
        proposed = np.array([[proposal.token_id] for proposal in offered])
        again = [[min(row.again, draws.MOST_UNIFORM)] for row in own.values()]
        at_P = to_device(np.array(list(own)), device)
        taken_P1 = draws.accepted(
            None if ids_BC is None else ids_BC[at_P], weights_BC[at_P], offered_PV,
            to_device(proposed, device), uniform_B1[at_P], to_device(np.array(again), device),
        )  # fmt: skip
        return drawn_B1.index_copy_(0, at_P, taken_P1)


def _kinds(
    params: Sequence[SamplingParams], size: int, vocab_size: int
) -> dict[tuple[int, bool] | None, list[int]]:
    """Rows by what is done for them: None takes the largest score; else how many of the largest
    scores are looked at (0: all tokens in the order of their ids), and whether top-k limits them.
    """
    kinds: dict[tuple[int, bool] | None, list[int]] = {}
    for place, own in enumerate(params):
        kind: tuple[int, bool] | None
        if own.temperature == 0:
            kind = None
        elif own.top_k:
            kind = (min(1 << (own.top_k - 1).bit_length(), vocab_size), True)
        else:
            kind = (size if own.top_p < 1 else 0, False)
        kinds.setdefault(kind, []).append(place)
    return kinds


def scores_of(logits_BV: Tensor, rows: Sequence[Row]) -> Tensor:
    """(B, V) float32: with bias, penalties, and -inf for what structures do not allow."""
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    edits = [
        (at * vocab_size + row.edits[0], row.edits[1])
        for at, row in enumerate(rows)
        if row.edits is not None and len(row.edits[0])
    ]
    scores_BV = logits_BV.float()
    if edits:
        places, numbers = (np.concatenate(parts) for parts in zip(*edits, strict=True))
        scores_BV = draws.edited(logits_BV, to_device(places, device), to_device(numbers, device))
    limited = [at for at, row in enumerate(rows) if row.bits is not None]
    if limited:
        if not edits:
            scores_BV = logits_BV.to(torch.float32, copy=True)
        stacked = np.stack([row.bits for row in rows if row.bits is not None])
        draws.restricted(
            scores_BV, to_device(np.array(limited), device), to_device(stacked, device)
        )
    return scores_BV


def _kernels_for(logits_BV: Tensor) -> ModuleType | None:
    """Kernels that draw on a GPU; None: there are none."""
    if logits_BV.device.type != "cuda" or triton_kernels() is None:
        return None
    from kernels.triton import draw

    return draw if _draws_alike(draw, logits_BV.device) else None


@cache
def _draws_alike(kernels: ModuleType, device: torch.device) -> bool:
    """Return whether kernels draw what numpy draws in main memory, on a device that they first
    meet. A wrong one would be seen by nobody: all tokens are plausible."""
    ways = [{"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.95, "min_p": 0.02}]
    rows = [Row(SamplingParams(**own), at / 8) for own in ways for at in range(1, 8)]  # type: ignore[arg-type]
    logits_BV = 6 * torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(0))
    likeliest_BV = logits_BV.round().repeat(1, 5)  # many are the largest
    likeliest_BV[1, 7000:7002] = torch.nan
    likeliest_BV[2] = -torch.inf
    expected = _one_by_one(logits_BV, rows), str(_likeliest(likeliest_BV))
    try:
        drawn = _Batch(logits_BV.to(device), rows, kernels).read()
        if (drawn, str(_Peaks(likeliest_BV.to(device), kernels).read())) == expected:
            return True
        why = "draw others"
    except RuntimeError as error:  # of Triton's compiler, too
        why = f"fail: {error}"
    _logger.warning("tokens are drawn by torch: on %s, our kernels %s", device, why)
    return False


class _Sent:
    """Numbers on their way to the host: `read` is the only place where sampling waits for a
    device, and for no more than what was asked of it before these."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # of a GPU: pinned memory
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: np.ndarray = self._values.numpy()
        return numbers


def _read(values: Tensor) -> np.ndarray:
    return _Sent(values).read()


def _of(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def peaks(logits_TV: Tensor) -> tuple[list[int], list[float]]:
    """The id and the value of each row's largest logit; NaN counts as the largest."""
    if not host.on_host(logits_TV):
        return _Peaks(logits_TV, _kernels_for(logits_TV)).found()
    rows = (logits_TV.float() if logits_TV.dtype == torch.bfloat16 else logits_TV).detach().numpy()
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()


def candidates(scores_V: Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn and their unnormalised weights (float64, largest = 1).

    `scores_V` is float32 with a finite maximum. Returns ids_C int64 and weights_C, on the host.
    """
    scores = _read(scores_V)
    ids_C, weights_C = host.candidates(scores, params, float(scores.max()))
    kept = weights_C.nonzero()[0]
    return kept if ids_C is None else ids_C[kept], weights_C[kept]


def _likeliest(logits_BV: Tensor) -> list[Drawn]:
    return _at_peaks(*peaks(logits_BV))


def _at_peaks(ids: Sequence[int], values: Sequence[float]) -> list[Drawn]:
    return [
        Drawn(_usable(peak) or Token(best), best) for best, peak in zip(ids, values, strict=True)
    ]


def score(token_ids: Sequence[int], logits_TV: Tensor, count: int) -> list[Token]:
    """Given tokens with their log-probabilities and those of the ``count`` most likely ones.

    Token i follows row i of ``(T, V)`` logits of any float dtype and device. Raises `LogitsError`
    if a row has no finite largest logit.
    """
    tokens, start = list[Token](), 0
    most = min(count, logits_TV.shape[1])
    for part in parts_of(len(token_ids), logits_TV[:1]):
        rows_TV = logits_TV[part.start : part.stop].detach()
        given = to_device(np.array(token_ids[part.start : part.stop])[:, None], logits_TV.device)
        peak_T1 = rows_TV.amax(-1, keepdim=True).double()
        for peak, *row in _read(
            torch.cat((peak_T1, draws.logprobs(rows_TV, given, most)), 1)
        ).tolist():
            check_peak(peak)
            tokens.append(_scored(token_ids[start], np.array(row), most))
            start += 1
    return tokens


def _scored(token_id: int, numbers: np.ndarray, count: int) -> Token:
    """A token with a row of `draws.logprobs`, of which the first ``count`` are wanted."""
    most = len(numbers) // 2
    ids = numbers[1 : 1 + most].astype(np.int64).tolist()[:count]
    values = numbers[1 + most :].tolist()[:count]
    return Token(token_id, float(numbers[0]), tuple(zip(ids, values, strict=True)))


def _outcome(
    token_id: float, raw_peak: float, peak: float, enough: float, likeliest: float
) -> Drawn | None:
    """The outcome of a row that was read back; None: look at more scores."""
    if error := _usable(raw_peak) or _usable(peak):
        return Drawn(error, int(likeliest))
    return Drawn(Token(int(token_id)), int(likeliest)) if enough else None


def _usable(peak: float) -> LogitsError | None:
    """The error that `check_peak` raises for this peak, if it does."""
    if isfinite(peak):
        return None
    try:
        check_peak(peak)
    except LogitsError as error:
        return error
    return None


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
