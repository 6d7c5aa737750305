"""Quantizes experts with small losses on calibration inputs: GPTQ for nested codes.

GPTQ rounds a matrix column by column and adds what each column lost to the columns still to come,
weighted by the correlation of their inputs (`H = sum x x^T`, Cholesky of its inverse, as
published). The code here is nested, so this is done once for each prefix, always against the
original weight: first for 2 bits, then for the next plane, where each code is free only within the
cell that its prefix fixed. So every prefix is compensated for itself. A weight that leaves its own
cell for a coarse prefix is lost to the finer ones, so none moves further than `REACH`, except for
the finest prefix. If only one precision will be read, that width alone loses least.

Rows are independent. At each prefix a row keeps whichever loses less on the inputs: compensated
codes or plain rounding within its cells. Columns are taken in order of their inputs' size. An
expert with few calibration rows (`MIN_ROWS`) is rounded plainly.

Legend: X matrices, N rows, K columns, D groups of a row; E experts, R rows of an expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experts.compress.statistics import LayerInputs, moments, output
from experts.grid import quantize_exactly
from experts.weights import (
    ExpertShape,
    beside_weights,
    from_expert_blobs,
    is_interleaved,
    split_parts,
)
from kernels import ExpertWeights, QuantizedExperts, planes
from kernels.planes import (
    PREFIX_BITS,
    PlaneLayout,
    PlaneMatrix,
    join_matrices,
    num_planes,
    pack,
    pack_scales,
)

MIN_ROWS = 128
"""Experts with fewer calibration rows are rounded plainly."""

_CHUNK_VALUES = 1 << 24
"""Most values of second moments in memory at once."""

DAMPING = 0.01
"""Added to the diagonal of H, as a share of its mean."""

REACH = 0.25
"""Bound of what compensation for a coarse prefix may move a weight by, in its steps. Measured on
the shipped model with text that neither calibrates nor tests, KL in bits a token at 2, 4 and 8
bits: .030, .0028, .0002 at 0.1; .0225, .0035, .0008 at 0.25; .0200, .0044, .0016 at 0.4; .0191,
.0052, .0023 at 0.5; and .0185, .0013, .0001 where each width is done alone."""

Cell = tuple[Tensor, Tensor]
"""Smallest and largest code of each weight that begin with its prefix."""

_BLOCK = 64

_Codes = tuple[Tensor, Tensor]
"""Codes and scales."""
Blobs = tuple[tuple[Tensor, ...], Tensor]
"""Planes and scales of one expert."""


@torch.no_grad()
def quantize_calibrated(
    whole: ExpertWeights,
    inputs: LayerInputs,
    bits: Sequence[int],
    group_size: int = 64,
    *,
    nested: bool,
) -> QuantizedExperts:
    """Quantize a layer's experts, each to its own bits, with compensation.

    Args:
        whole: the layer's weights.
        inputs: calibration inputs of its experts.
        bits: of each expert, one of `PREFIX_BITS`.
        group_size: weights that share a scale.
        nested: compensate every prefix, so an expert is good at fewer bits, too; else only its own
            bits.

    Raises:
        ValueError: as `experts.weights.quantize_experts`.
    """
    layer = _LayerQuantizer.of(whole, inputs, group_size)
    few = too_few(inputs, whole.num_experts)
    found = {expert: _prefix(layer.plain(expert), bits[expert]) for expert in few}
    for own in sorted(set(bits)):
        widths = PREFIX_BITS[: num_planes(own)] if nested else (own,)
        those = [e for e, width in enumerate(bits) if width == own and e not in found]
        for experts in layer.chunks(those):
            found |= zip(experts, layer.compensated(experts, [widths])[0], strict=True)
    return layer.joined([found[expert] for expert in range(whole.num_experts)])


@torch.no_grad()
def quantize_at_each_width(
    whole: ExpertWeights, inputs: LayerInputs, group_size: int = 64
) -> list[QuantizedExperts]:
    """`quantize_calibrated` for each of `PREFIX_BITS` alone, cheaper than one by one."""
    layer = _LayerQuantizer.of(whole, inputs, group_size)
    few = too_few(inputs, whole.num_experts)
    found: dict[int, list[Blobs]] = {}
    for expert in few:
        fine = layer.plain(expert)
        found[expert] = [_prefix(fine, bits) for bits in PREFIX_BITS]
    for experts in layer.chunks([e for e in range(whole.num_experts) if e not in found]):
        ways = layer.compensated(experts, [[bits] for bits in PREFIX_BITS])
        found |= zip(experts, map(list, zip(*ways, strict=True)), strict=True)
    each = zip(*(found[expert] for expert in range(whole.num_experts)), strict=True)
    return [layer.joined(blobs) for blobs in each]


def too_few(inputs: LayerInputs, num_experts: int) -> list[int]:
    """Experts that have fewer than `MIN_ROWS` rows."""
    few: list[int] = (inputs.counts(num_experts) < MIN_ROWS).nonzero().flatten().tolist()
    return few


@torch.no_grad()
def output_errors(
    whole: ExpertWeights, versions: Iterable[ExpertWeights], inputs: LayerInputs
) -> Tensor:
    """``(E, len(versions))`` float64: squared error of the layer's output when one expert alone is
    replaced by that of a version.

    Summed over the calibration tokens and the hidden dimension, routing weights included.
    """
    rows = [inputs.rows_of(expert) for expert in range(whole.num_experts)]
    right = [output(whole, expert, rows_RH) for expert, (rows_RH, _) in enumerate(rows)]
    errors = []
    for coarse in versions:
        own = replace(whole, gate_up_EGH=coarse.gate_up_EGH, down_EHF=coarse.down_EHF)
        lost = [
            (output(own, expert, rows_RH) - right[expert]) * weights_R1
            for expert, (rows_RH, weights_R1) in enumerate(rows)
        ]
        errors.append(torch.stack([one.double().square().sum() for one in lost]))
    return torch.stack(errors, 1)


@dataclass(frozen=True)
class _LayerQuantizer:
    """Quantizes the experts of one layer."""

    whole: ExpertWeights
    inputs: LayerInputs
    shape: ExpertShape
    interleaved: bool

    @classmethod
    def of(cls, whole: ExpertWeights, inputs: LayerInputs, group_size: int) -> _LayerQuantizer:
        shape = ExpertShape.of(whole, group_size)
        interleaved = shape.parts == 2 and is_interleaved(whole.activation, shape.intermediate)
        return cls(whole, inputs, shape, interleaved)

    def chunks(self, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        """Experts in chunks whose moments fit into memory."""
        size = max(1, _CHUNK_VALUES // max(self.shape.hidden, self.shape.intermediate) ** 2)
        return (experts[at : at + size] for at in range(0, len(experts), size))

    def plain(self, expert: int) -> Blobs:
        """All planes of an expert, rounded to nearest."""
        first, second = (
            quantize_exactly(weight_XNK, self.shape.group_size)
            for weight_XNK in self._weights([expert])
        )
        return self._blobs(first, second, 0, PREFIX_BITS[-1])

    def compensated(
        self, experts: Sequence[int], ways: Sequence[Sequence[int]]
    ) -> list[list[Blobs]]:
        """Blobs of each of these experts, for each list of widths.

        Args:
            ways: lists of widths to compensate for, ascending; the last is how many bits are kept.
        """
        every = moments(self.inputs, self.whole, experts)
        first, second = (
            _codes(weight_XNK, Moments.of(moment_XKK), ways, self.shape.group_size)
            for weight_XNK, moment_XKK in zip(self._weights(experts), every, strict=True)
        )
        return [
            [self._blobs(one, two, at, widths[-1]) for at in range(len(experts))]
            for one, two, widths in zip(first, second, ways, strict=True)
        ]

    def _weights(self, experts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both projections of some experts; the rows of the first part by part."""
        whole, shape = self.whole, self.shape
        parts = [
            split_parts(whole.gate_up_EGH[e], shape.parts, self.interleaved).flatten(0, 1)
            for e in experts
        ]
        return torch.stack(parts), whole.down_EHF[list(experts)]

    def _blobs(self, first: _Codes, second: _Codes, at: int, bits: int) -> Blobs:
        codes, scales = (own[at].unflatten(0, (self.shape.parts, -1)) for own in first)
        matrices = [
            _matrix(part, spread, self.shape.first, bits)
            for part, spread in zip(codes, scales, strict=True)
        ]
        return join_matrices(
            [*matrices, _matrix(second[0][at], second[1][at], self.shape.second, bits)]
        )

    def joined(self, blobs: Sequence[Blobs]) -> QuantizedExperts:
        own = beside_weights(self.whole)
        return from_expert_blobs(self.shape, blobs, self.interleaved, **own)


def _codes(
    weight_XNK: Tensor, own: Moments, ways: Sequence[Sequence[int]], group_size: int
) -> list[_Codes]:
    """Codes and scales for each list of widths."""
    _, scales = quantize_exactly(weight_XNK, group_size)
    return [(compensate(weight_XNK, own, scales, group_size, widths), scales) for widths in ways]


def _prefix(blobs: Blobs, bits: int) -> Blobs:
    """The blobs of the first bits of an expert."""
    planes, scales = blobs
    return planes[: num_planes(bits)], scales


def _matrix(codes_NK: Tensor, scales_ND: Tensor, layout: PlaneLayout, bits: int) -> PlaneMatrix:
    planes = pack(codes_NK, layout)[: num_planes(bits)]
    return PlaneMatrix(layout, planes, pack_scales(scales_ND, layout))


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of inputs, factored for compensation; made once for all widths.

    Attributes:
        order_XK: columns in the order in which they are taken.
        ordered_XKK: the moments, in that order.
        upper_XKK: upper Cholesky factor of the inverse of the damped moments, in that order.
    """

    order_XK: Tensor
    ordered_XKK: Tensor
    upper_XKK: Tensor

    @classmethod
    def of(cls, moment_XKK: Tensor) -> Moments:
        """Factorise ``(X, K, K)`` second moments, which are zero where there were no inputs."""
        order = moment_XKK.diagonal(dim1=-2, dim2=-1).argsort(-1, descending=True)
        rows = order[:, :, None].expand_as(moment_XKK)
        ordered = moment_XKK.float().gather(1, rows).gather(2, rows.transpose(1, 2))
        return cls(order, ordered, _inverse_factor(damped(ordered)))


def compensate(
    weight_XNK: Tensor,
    moments: Moments,
    scales_XND: Tensor,
    group_size: int,
    widths: Sequence[int],
) -> Tensor:
    """Codes that lose little on the inputs at each of some prefixes.

    Args:
        weight_XNK: ``(X, N, K)`` floating point, finite.
        moments: of the inputs of each matrix.
        scales_XND: ``(X, N, D)`` scales of the codes, as `kernels.planes.quantize` makes them.
        group_size: columns that share a scale.
        widths: prefixes in bits, ascending; the finest decides the last bits of the codes.

    Returns:
        ``(X, N, K)`` uint8 codes; bits beyond the finest width are those of its centre.
    """
    weight = weight_XNK.float()
    columns = moments.order_XK[:, None, :].expand_as(weight)
    ordered = weight.gather(-1, columns)
    scale = spread(scales_XND, group_size, weight.shape[-1]).gather(-1, columns)
    position = ordered / scale.masked_fill(scale == 0, 1.0) + planes.ZERO_CODE
    within = torch.zeros_like(position), torch.full_like(position, planes.MAX_CODE)
    for bits in widths:
        plain = nearest(position.clamp(*within), bits)
        lost_plain, centres = (plain - planes.ZERO_CODE) * scale - ordered, plain
        if bool(lost_plain.any()):  # weights that are on a coarse grid lose nothing
            reachable = within if bits == widths[-1] else _reachable(position, bits, within)
            centres = _sweep(ordered, moments.upper_XKK, scale, bits, reachable)
            lost = (centres - planes.ZERO_CODE) * scale - ordered
            more = ((lost - lost_plain) @ moments.ordered_XKK * (lost + lost_plain)).sum(-1)
            centres = torch.where((more <= 0)[..., None], centres, plain)
        within = cell(centres, bits)
    return torch.empty_like(centres).scatter_(-1, columns, centres).to(torch.uint8)


def damped(moment_XKK: Tensor) -> Tensor:
    """Moments with `DAMPING` on the diagonal; the identity where there were no inputs."""
    moment = moment_XKK.float()
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    eye = torch.eye(moment.shape[-1], device=moment.device)
    shift = torch.where(mean > 0, DAMPING * mean, 1.0)
    return moment + shift[:, None, None] * eye


def nearest(position: Tensor, bits: int) -> Tensor:
    """Centres of the prefixes of ``bits`` that are nearest to positions on the grid of codes.

    A position is ``weight / scale + ZERO_CODE``, in floating point.
    """
    step = 2 ** (8 - bits)
    if step == 1:
        return position.round().clamp(0, planes.MAX_CODE)
    return (position / step).floor().clamp(0, 2**bits - 1) * step + step / 2


def cell(centre: Tensor, bits: int) -> Cell:
    """Smallest and largest code that begin with the prefix of ``bits`` that `centre` stands for."""
    step = 2 ** (8 - bits)
    low = (centre / step).floor() * step
    return low, low + step - 1


def spread(scales_XND: Tensor, group_size: int, columns: int) -> Tensor:
    """``(X, N, K)`` float32: the scale of each weight."""
    return scales_XND.float().repeat_interleave(group_size, -1)[..., :columns]


def _reachable(position: Tensor, bits: int, within: Cell) -> Cell:
    """The range that compensation may move weights in: near their positions, within the cell."""
    reach = REACH * 2 ** (8 - bits)
    return (position - reach).clamp(*within), (position + reach).clamp(*within)


def _sweep(weight: Tensor, upper: Tensor, scale: Tensor, bits: int, reachable: Cell) -> Tensor:
    """Centres of one prefix, column by column; float32."""
    # Columns come first, as the loop works on one at a time: it must be contiguous.
    work, scale, low, high = (
        own.transpose(-2, -1).contiguous() for own in (weight, scale, *reachable)
    )
    divisor, centres = scale.masked_fill(scale == 0, 1.0), torch.empty_like(work)
    columns = work.shape[-2]
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty_like(work[:, start:end])
        for at in range(start, end):
            position = work[:, at] / divisor[:, at] + planes.ZERO_CODE
            centre = centres[:, at]
            centre[:] = nearest(position.clamp_(low[:, at], high[:, at]), bits)
            lost = work[:, at] - (centre - planes.ZERO_CODE) * scale[:, at]
            error, factor = errors[:, at - start], upper[:, at]
            torch.div(lost, factor[:, at, None], out=error)
            work[:, at + 1 : end].baddbmm_(factor[:, at + 1 : end, None], error[:, None], alpha=-1)
        work[:, end:].baddbmm_(upper[:, start:end, end:].transpose(-2, -1), errors, alpha=-1)
    return centres.transpose(-2, -1)


def _inverse_factor(moment: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse; in float64, as moments are badly conditioned."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()
