"""Weights as small floating point numbers: FP8 with scales of blocks or rows, and MXFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.loading.decode import decode_fp8, decode_mxfp4
from moe.loading.schemes import Infos, Parts, Scheme, SchemeError, check_dtype, need


def fp8(config: dict[str, Any]) -> Scheme:
    stated = config.get("weight_block_size")
    block = None if stated is None else (int(stated[0]), int(stated[1]))
    if block is not None and min(block) < 1:
        raise SchemeError(f"weight_block_size is {block}")

    def shape(parts: Infos) -> tuple[int, ...]:
        weight, scale = need(parts, "weight", "scale")
        check_dtype(weight, torch.float8_e4m3fn, torch.float8_e5m2)
        if len(weight.shape) < 2:
            raise SchemeError(f"the weight must be a matrix, it is {weight.shape}")
        rows, columns = weight.shape[-2:]
        size = block or (rows, columns)
        expected = (*weight.shape[:-2], -(-rows // size[0]), -(-columns // size[1]))
        single = block is None and scale.shape in ((), (1,))
        if scale.shape != expected and not single:
            raise SchemeError(
                f"scales of blocks of {size} must be {expected} for a weight {weight.shape}, "
                f"they are {scale.shape}"
            )
        return weight.shape

    def decode(parts: Parts) -> Tensor:
        weight, scale = parts["weight"], parts["scale"]
        size = block or (weight.shape[-2], weight.shape[-1])
        scale = scale.reshape(1, 1) if scale.dim() < 2 else scale
        return decode_fp8(weight, scale, size)

    parts = {"scale": "_scale_inv", "weight": ""}
    return Scheme("FP8", parts, shape, decode, "", ignored=("activation_scale", "input_scale"))


def mxfp4(_: dict[str, Any]) -> Scheme:
    def shape(parts: Infos) -> tuple[int, ...]:
        blocks, scales = need(parts, "blocks", "scales")
        check_dtype(blocks, torch.uint8)
        check_dtype(scales, torch.uint8)
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise SchemeError(
                f"blocks must be (experts, rows, groups, 16) with a scale each, they are "
                f"{blocks.shape} and {scales.shape}"
            )
        experts, rows, groups, _ = blocks.shape
        return experts, groups * 32, rows

    def decode(parts: Parts) -> Tensor:
        return decode_mxfp4(parts["blocks"], parts["scales"])

    names = {"blocks": "_blocks", "scales": "_scales"}
    return Scheme("MXFP4", names, shape, decode, "", fits_bfloat16=True, few_values=True)


def float8_rows() -> Scheme:
    def shape(parts: Infos) -> tuple[int, ...]:
        weight, scale = need(parts, "weight", "scale")
        check_dtype(weight, torch.float8_e4m3fn)
        if len(weight.shape) != 2 or scale.shape not in ((1,), (1, 1), (weight.shape[0], 1)):
            raise SchemeError(
                f"there must be one scale, or one a row of a weight {weight.shape}, they are "
                f"{scale.shape}"
            )
        return weight.shape

    names = {"scale": ".weight_scale", "weight": ".weight"}
    return Scheme(
        "compressed-tensors",
        names,
        shape,
        lambda parts: parts["weight"].float() * parts["scale"].float(),
        ignored=(".input_scale",),
    )
