"""Weights as integers of 4 or 8 bits in 32-bit words: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.loading.decode import decode_awq, decode_gptq, decode_packed
from moe.loading.float_schemes import float8_rows
from moe.loading.schemes import (
    Infos,
    Parts,
    Scheme,
    SchemeError,
    check,
    check_groups,
    known_bits,
    need,
)


def gptq(config: dict[str, Any]) -> Scheme:
    bits = known_bits(config, "bits", (4, 8))
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def shape(parts: Infos) -> tuple[int, ...]:
        qweight, qzeros, scales, g_idx = [
            *need(parts, "qweight", "qzeros", "scales", dimensions=2),
            *need(parts, "g_idx"),
        ]
        columns, rows = qweight.shape[0] * (32 // bits), qweight.shape[-1]
        groups = scales.shape[0]
        check(qweight, torch.int32, (columns * bits // 32, rows))
        check(qzeros, torch.int32, (groups, -(-rows * bits // 32)))
        check(scales, scales.dtype, (groups, rows))
        check(g_idx, torch.int32, (columns,))
        return rows, columns

    def decode(parts: Parts) -> Tensor:
        group = parts["g_idx"]
        if group.numel() and not 0 <= int(group.min()) <= int(group.max()) < len(parts["scales"]):
            raise SchemeError("g_idx names groups that have no scales")
        return decode_gptq(**parts, bits=bits, zero_offset=offset)

    names = {role: f".{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    return Scheme("GPTQ", names, shape, decode, few_values=bits == 4)


def awq(config: dict[str, Any]) -> Scheme:
    known_bits(config, "bits", (4,))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise SchemeError(f"version is {version}, only gemm can be read")

    def shape(parts: Infos) -> tuple[int, ...]:
        qweight, qzeros, scales = need(parts, "qweight", "qzeros", "scales", dimensions=2)
        columns, rows = qweight.shape[0], qweight.shape[-1] * 8
        groups = scales.shape[0]
        check(qweight, torch.int32, (columns, rows // 8))
        check(qzeros, torch.int32, (groups, rows // 8))
        check(scales, scales.dtype, (groups, rows))
        check_groups(groups, columns)
        return rows, columns

    names = {role: f".{role}" for role in ("qweight", "qzeros", "scales")}
    return Scheme("AWQ", names, shape, lambda parts: decode_awq(**parts), few_values=True)


def compressed_tensors(config: dict[str, Any]) -> Scheme:
    weights = [group["weights"] for group in config["config_groups"].values()]
    if len({(w["num_bits"], w["type"], w.get("symmetric", True)) for w in weights}) != 1:
        raise SchemeError("its groups of layers have different formats")
    if weights[0]["type"] == "float" and weights[0]["num_bits"] == 8:
        return float8_rows()
    bits = known_bits(weights[0], "num_bits", (4, 8))
    if config.get("format") != "pack-quantized" or not weights[0].get("symmetric", True):
        raise SchemeError(
            f"format {config.get('format')}, only symmetric pack-quantized and float8 can be read"
        )

    def shape(parts: Infos) -> tuple[int, ...]:
        packed, scale = need(parts, "packed", "scale", dimensions=2)
        check(packed, torch.int32, packed.shape[:2])
        rows, columns = packed.shape[0], packed.shape[1] * (32 // bits)
        check(scale, scale.dtype, (rows, scale.shape[-1]))
        check_groups(scale.shape[-1], columns)
        return rows, columns

    def decode(parts: Parts) -> Tensor:
        columns = parts["packed"].shape[1] * (32 // bits)
        return decode_packed(parts["packed"], parts["scale"], columns, bits)

    names = {"packed": ".weight_packed", "scale": ".weight_scale"}
    ignored = (".weight_shape", ".input_scale")
    few = bits == 4
    return Scheme("compressed-tensors", names, shape, decode, ignored=ignored, few_values=few)
