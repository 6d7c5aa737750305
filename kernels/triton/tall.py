"""Products of many rows with symmetric bit planes, each weight decoded once for a block of rows.

A warp has 16 outputs and all of K. Codes become whole numbers in registers, which the large matrix
instructions of sm_90 read there; activations reach them through shared memory, their columns in the
order of the codes (`turned`). As in kernels/triton/planes.py, each scale group is summed and then
multiplied by its scale in float32: no weight is rounded. A row's bits depend on its own input only,
but are not those of `project_planes`, which adds in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.planes import CHUNK_COLUMNS, PlaneLayout
from kernels.scales import block_bytes as scale_bytes
from kernels.triton.codes import group_scale, load_words, whole_numbers
from kernels.triton.language import Epilogue, block_slots, compute_type
from kernels.triton.planes import addresses, large_instructions, store, words_at
from kernels.triton.routing import Blocks
from kernels.triton.tiles import TallTile

_TURNED = 1024  # pairs of a program of `turn_kernel`


def reads(layout: PlaneLayout, device: torch.device) -> bool:
    """Return whether `project_tall` can multiply by such a matrix, fast."""
    whole = layout.columns % (2 * CHUNK_COLUMNS) == 0
    return layout.scales == "symmetric" and whole and large_instructions(device)


@triton.jit
def load_blocks(
    begins, chunk, blocks, group, block_bytes, PLANES: tl.constexpr, GROUP: tl.constexpr
):
    """Words of the planes of a unit of S blocks, and (16 S,) scales of both halves."""
    wanted = chunk >= 0
    words0 = load_words(words_at(begins[0]), chunk, wanted, 2, False, False, 0)
    words1, words2, words3 = words0, words0, words0
    if PLANES >= 2:
        words1 = load_words(words_at(begins[1]), chunk, wanted, 1, False, False, 0)
    if PLANES >= 3:
        words2 = load_words(words_at(begins[2]), chunk, wanted, 1, False, False, 0)
    if PLANES >= 4:
        words3 = load_words(words_at(begins[3]), chunk, wanted, 4, False, False, 0)
    scales = tl.multiple_of(begins[4].to(tl.pointer_type(tl.uint8)), 16)
    at = scales + blocks[:, None].to(tl.int64) * block_bytes
    own = group + 0 * chunk
    scale0, _ = group_scale(at, None, own, wanted, 8, 0, GROUP, False, 0)
    scale1 = scale0
    if GROUP == 32:
        scale1, _ = group_scale(at, None, own, wanted, 8, 0, GROUP, False, 1)
    S: tl.constexpr = chunk.shape[0]
    words = words0, words1, words2, words3
    return words, tl.reshape(scale0, (16 * S,)), tl.reshape(scale1, (16 * S,))


@triton.jit
def add_blocks(
    sums, words, scale0, scale1, x0, x1,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = sums.shape[0]
    first = tl.reshape(whole_numbers(words, 0, PLANES, COMPUTE, 2), (OUTPUTS, 32))
    second = tl.reshape(whole_numbers(words, 1, PLANES, COMPUTE, 2), (OUTPUTS, 32))
    if GROUP == 64:
        both = tl.permute(tl.join(first, second), (0, 2, 1))
        both = tl.reshape(both, (OUTPUTS, 64))
        sums += tl.dot(both, x0, input_precision="ieee") * scale0[:, None]
    else:
        sums += tl.dot(first, x0, input_precision="ieee") * scale0[:, None]
        sums += tl.dot(second, x1, input_precision="ieee") * scale1[:, None]
    return sums


@triton.jit
def tall_kernel(
    x, table, bias, output, order, offsets, block_expert, block_first,
    share, parts, width, N, K, chunks, block_bytes, unit_stride, part_stride,
    slope, limit, offset,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, CURVE: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    expert = tl.load(block_expert + tl.program_id(1))
    if expert < 0:
        return
    first = tl.load(block_first + tl.program_id(1))
    slots, used = block_slots(order, offsets, expert, first, ROWS)
    part = tl.program_id(2)
    begins = addresses(table + (expert * parts + part) * 5)
    begins_b = begins
    if GATED:
        begins_b = addresses(table + (expert * parts + part + 1) * 5)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    blocks = tl.where(blocks < (N + 15) // 16, blocks, 0)
    before = blocks * chunks
    column = tl.arange(0, 64 if GROUP == 64 else 32)
    from_x = x + (slots // share).to(tl.int64)[None, :] * K + column[:, None]
    sums = tl.zeros((16 * BLOCKS, ROWS), tl.float32)
    more = sums
    for unit in tl.range(0, chunks // 2, num_stages=STAGES):
        x0 = tl.load(from_x + unit * 64).to(COMPUTE)
        x1 = x0
        if GROUP == 32:
            x1 = tl.load(from_x + unit * 64 + 32).to(COMPUTE)
        group = unit * 64 // GROUP
        words, scale0, scale1 = load_blocks(
            begins, before + 2 * unit, blocks, group, block_bytes, PLANES, GROUP
        )
        sums = add_blocks(sums, words, scale0, scale1, x0, x1, PLANES, COMPUTE, GROUP)
        if GATED:
            words, scale0, scale1 = load_blocks(
                begins_b, before + 2 * unit, blocks, group, block_bytes, PLANES, GROUP
            )
            more = add_blocks(more, words, scale0, scale1, x0, x1, PLANES, COMPUTE, GROUP)
    units = tl.program_id(0) * (16 * BLOCKS) + tl.arange(0, 16 * BLOCKS)
    store(
        sums, more, bias, output, expert, part, slots, used, units, width, N,
        unit_stride, part_stride, slope, limit, offset, CURVE, GATED, HAS_BIAS, TURNED,
    )  # fmt: skip


def project_tall(
    x_XK: Tensor,
    table_EP5: Tensor,
    layout: PlaneLayout,
    bias_EW: Tensor | None,
    blocks: Blocks,
    tile: TallTile,
    *,
    planes: int,
    share: int = 1,
    epilogue: Epilogue | None = None,
    turn: bool = False,
) -> Tensor:
    """As kernels.triton.planes.project_planes, of experts and of layouts that `reads` accepts.

    Args:
        x_XK: from `turned`.
        turn: the rows of a known activation come as `turned` returns them.
        planes: that all experts have.
    """
    epilogue = Epilogue() if epilogue is None else epilogue
    parts = table_EP5.shape[1]
    known, gated = epilogue.activation is not None, epilogue.gated
    width = parts * layout.rows
    output_SN = x_XK.new_empty(blocks.order_S.shape[0], layout.rows if known else width)
    grid = triton.cdiv(layout.num_blocks, tile.blocks), blocks.count, 1 if gated else parts
    tall_kernel[grid](
        x_XK, table_EP5, bias_EW, output_SN,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, parts, width, layout.rows, layout.columns, layout.columns // CHUNK_COLUMNS,
        scale_bytes(layout.scales, layout.columns, layout.group_size),
        *epilogue.strides(layout.rows), *epilogue.numbers,
        PLANES=planes, COMPUTE=compute_type(x_XK.dtype), CURVE=epilogue.curve, GATED=gated,
        HAS_BIAS=bias_EW is not None, GROUP=layout.group_size, TURNED=turn,
        **tile.constants, **tile.options,
    )  # fmt: skip
    return output_SN


@triton.jit
def turn_kernel(x, output, count, PAIRS: tl.constexpr):
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    source = at // 16 * 16 + at % 4 * 4 + at // 4 % 4
    tl.store(output + at, tl.load(x + source, mask=at < count), mask=at < count)


def turned(x_XK: Tensor) -> Tensor:
    """Contiguous rows, of each 32 columns those of a thread no longer side by side: column
    ``8 u + 2 p + h`` at ``8 p + 2 u + h``."""
    pairs = torch.int64 if x_XK.dtype == torch.float32 else torch.int32
    output_XK = torch.empty_like(x_XK)
    count = x_XK.numel() // 2
    turn_kernel[(triton.cdiv(count, _TURNED),)](
        x_XK.view(pairs), output_XK.view(pairs), count, PAIRS=_TURNED
    )
    return output_XK
