"""Quantisation schemes: the tensors that make up a weight, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.safetensors_io import TensorInfo
from kernels.planes import FILE_GROUP_SIZES, FLOAT_FORMATS, PlaneFormat, float_values
from kernels.scales import GroupScales, Scales, powers_of_two

Infos = Mapping[str, TensorInfo]
Parts = Mapping[str, Tensor]


class SchemeError(Exception):
    """The parts of one weight do not fit together."""


@dataclass(frozen=True)
class Coding:
    """A way of quantising, as far as loading needs to know it.

    Attributes:
        name: the method.
        fits_bfloat16: decoded weights are exact in bfloat16.
        decoded: what of it no bit planes hold, by name, for people.
        few_values: so few values a scale that 8-bit planes hold them exactly (`experts.weights`),
            where no group of theirs ends inside one of ours.
    """

    name: str
    fits_bfloat16: bool = field(default=False, kw_only=True)
    few_values: bool = field(default=False, kw_only=True)
    decoded: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class StoredPlanes:
    """Turns codes and scales of a scheme into bit planes.

    Attributes:
        format: of a weight, from the headers of its parts; None where no planes hold it.
        read: ``(N, K)`` unsigned codes, and their scales in that format; raises `SchemeError`. Of
            a weight that joins experts, from the parts of one of them.
    """

    format: Callable[[Infos], PlaneFormat | None]
    read: Callable[[Parts, PlaneFormat], tuple[Tensor, GroupScales]]


@dataclass(frozen=True)
class Scheme(Coding):
    """The way in which a method stores a weight in several tensors of a checkpoint.

    Attributes:
        parts: role -> ending of a tensor's name. A weight is quantised where the first is there.
        shape: shape of the weight from the headers of its parts; raises `SchemeError`.
        decode: the weight in float32 from its parts; raises `SchemeError`.
        weight: ending of the name of the weight.
        ignored: endings of tensors that do not matter here, as of scales of activations.
        planes: how a weight stays as it is stored, as bit planes; None where it cannot.
    """

    parts: dict[str, str]
    shape: Callable[[Infos], tuple[int, ...]]
    decode: Callable[[Parts], Tensor]
    weight: str = ".weight"
    ignored: tuple[str, ...] = ()
    planes: StoredPlanes | None = None

    def group(self, names: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
        """Stem -> role -> stored name, of every weight that is quantised."""
        sign = next(iter(self.parts.values()))
        stems = [name.removesuffix(sign) for name in names if name.endswith(sign)]
        return {
            stem: {r: stem + end for r, end in self.parts.items() if stem + end in names}
            for stem in stems
        }


def need(parts: Infos, *roles: str, dimensions: int | None = None) -> list[TensorInfo]:
    """The parts of these roles, of this many dimensions; raises `SchemeError`, as all below."""
    if missing := [role for role in roles if role not in parts]:
        raise SchemeError(f"missing: {' and '.join(missing)}")
    for role in roles:
        shape = parts[role].shape
        if dimensions is not None and len(shape) != dimensions:
            raise SchemeError(f"{role} must have {dimensions} dimensions, it is {shape}")
    return [parts[role] for role in roles]


def check_dtype(info: TensorInfo, *dtypes: torch.dtype) -> None:
    if info.dtype not in dtypes:
        raise SchemeError(f"must be {' or '.join(map(str, dtypes))}, it is {info.dtype}")


def check(info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_dtype(info, dtype)
    if info.shape != shape:
        raise SchemeError(f"expected a part of shape {shape}, it is {info.shape}")


def check_groups(groups: int, columns: int) -> None:
    if groups < 1 or columns % groups:
        raise SchemeError(f"{columns} columns cannot have {groups} groups of equal size")


def known_bits(config: dict[str, Any], key: str, known: tuple[int, ...]) -> int:
    bits = config.get(key, 4)
    if bits not in known:
        raise SchemeError(f"{key} is {bits}, known are {known}")
    return int(bits)


# The arithmetic of quantised checkpoints: stored tensors of one weight in, float32 out.
#
# Every function gives the exact products of codes and scales; the caller rounds them to what it
# keeps. Legend: N rows (outputs), K columns (inputs), D groups of a row.

_NVFP4_GROUP = 16
OF_ACTIVATIONS = (
    *(".input_scale", ".input_global_scale", ".output_scale", ".prob_output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale"),
)
"""Endings of scales by which other engines (names as vLLM knows them) round activations, keys and
values; ours need none."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each 4-bit field of a word holds, lowest field first (AutoAWQ's GEMM packing)."""


def decode_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """``(..., N, K)`` float8 times one scale for each block of rows and columns.

    Scales of one byte are exponents (E8M0), which some files call F8_E8M0 and others U8.
    """
    rows, columns = weight.shape[-2:]
    spread = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    spread = spread.repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float() * spread.repeat_interleave(block[1], -1)[..., :columns]


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """``(E, N, D, 16)`` bytes of two numbers each, low one first, to ``(E, K, N)``.

    The result is transposed, as transformers' own decoder does for these checkpoints.
    """
    decoded = float_values(_fp4_fields(blocks), "mxfp4") * powers_of_two(scales)[..., None]
    return decoded.flatten(-2).transpose(-2, -1).contiguous()


def decode_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """``(N, K / 2)`` bytes of two numbers each, low one first, and ``(N, K / 16)`` scales."""
    halves_NK = _fp4_halves(packed).float()
    return halves_NK * (scales / 2).repeat_interleave(_NVFP4_GROUP, 1)


def _fp4_fields(packed: Tensor) -> Tensor:
    """Twice as many codes as bytes, the low one of each first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _fp4_halves(packed: Tensor) -> Tensor:
    """``(N, K)`` numbers in int8, in halves: whole numbers from -12 to 12."""
    return (2 * float_values(_fp4_fields(packed), "mxfp4")).to(torch.int8)


def decode_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, bits: int, zero_offset: int
) -> Tensor:
    """``(K / f, N)``, ``(D, N / f)`` words, ``(D, N)`` scales and the group of each column."""
    codes_KN = _fields(qweight, bits).transpose(1, 2).flatten(0, 1).float()
    zeros_DN = _fields(qzeros, bits).flatten(1) + zero_offset
    group = g_idx.long()
    return ((codes_KN - zeros_DN[group]) * scales.float()[group]).T.contiguous()


def decode_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """``(K, N / 8)``, ``(D, N / 8)`` words and ``(D, N)`` scales."""
    codes_KN = _unscramble(_fields(qweight, 4)).flatten(1).float()
    zeros_DN = _unscramble(_fields(qzeros, 4)).flatten(1).float()
    repeat = codes_KN.shape[0] // scales.shape[0]
    spread = scales.float().repeat_interleave(repeat, 0)
    return ((codes_KN - zeros_DN.repeat_interleave(repeat, 0)) * spread).T.contiguous()


def decode_packed(
    packed: Tensor, scales: Tensor, columns: int, bits: int, zeros: Tensor | None = None
) -> Tensor:
    """``(N, K / f)`` words of codes and ``(N, D)`` scales; ``(N / f, D)`` words of zero points, or
    codes around ``2 ** (bits - 1)``."""
    codes_NK = _fields(packed, bits).flatten(1)[:, :columns].float()
    zeros_ND = packed_zeros(zeros, scales, bits).repeat_interleave(columns // scales.shape[1], 1)
    return (codes_NK - zeros_ND) * scales.float().repeat_interleave(columns // scales.shape[1], 1)


def packed_zeros(zeros: Tensor | None, scales: Tensor, bits: int) -> Tensor:
    """``(N, D)`` zero points of compressed-tensors."""
    if zeros is None:
        return torch.full(scales.shape, 2.0 ** (bits - 1))
    return _fields(zeros, bits).transpose(1, 2).flatten(0, 1)[: len(scales)].float()


def offset_scales(scales_ND: Tensor, zeros_ND: Tensor, repeat: int) -> GroupScales:
    """Scales, and the zero points as offsets, each rounded to float16; for ``repeat`` groups."""
    scale_ND = scales_ND.half()
    offset_ND = -(zeros_ND.float() * scales_ND.float()).half()
    spread = [own.repeat_interleave(repeat, 1) for own in (scale_ND, offset_ND)]
    return GroupScales(*spread)


def plane_format(group: int, bits: int, scales: Scales) -> PlaneFormat | None:
    """The format with the largest groups that do not reach over one of these."""
    fits = [size for size in FILE_GROUP_SIZES if group % size == 0]
    return PlaneFormat(max(fits), bits, scales) if fits else None


def float8_format(weight: TensorInfo, block_columns: int | None) -> PlaneFormat | None:
    """The format of planes for a matrix of E4M3 numbers.

    Args:
        block_columns: that share a scale; None: a row does.
    """
    columns = max(FLOAT_FORMATS["fp8"][1]) if block_columns is None else block_columns
    fits = [size for size in FLOAT_FORMATS["fp8"][1] if columns % size == 0]
    known = weight.dtype == torch.float8_e4m3fn and len(weight.shape) == 2 and fits
    return PlaneFormat(max(fits), 8, "fp8") if known else None


def float8_planes(
    weight: Tensor, scales: Tensor, block: tuple[int, int], size: int
) -> tuple[Tensor, GroupScales]:
    """Codes and scales of E4M3 numbers, of which ``block`` have one, as groups of ``size``."""
    (rows, columns), codes_NK = weight.shape, weight.view(torch.uint8)
    groups = -(-columns // size)
    spread = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    spread = spread.repeat_interleave(block[0], 0)[:rows]
    spread = spread.repeat_interleave(-(-block[1] // size), 1)[:, :groups].expand(rows, groups)
    # Kernels do not know the code for NaN, so its group's scale says it.
    nan_NK = (codes_NK & 127) == 127
    if bool(nan_NK.any()):
        nan_ND = pad(nan_NK, (0, -columns % size)).unflatten(1, (groups, size)).any(-1)
        spread = spread.masked_fill(nan_ND, torch.nan)
    return codes_NK, GroupScales(spread)


def _fields(words: Tensor, bits: int) -> Tensor:
    """``(..., 32 / bits)`` numbers in uint8 that int32 words hold, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def finite_powers(exponents: Tensor) -> Tensor:
    """E8M0 bytes; raises `SchemeError` where one says NaN."""
    if bool((exponents == 255).any()):
        raise SchemeError("a scale is NaN (255)")
    return exponents


def _unscramble(fields: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_ORDER).argsort()
    return fields[..., places]


# Weights as small floating point numbers: FP8 with scales of blocks or rows, MXFP4 and NVFP4.


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

    def format(parts: Infos) -> PlaneFormat | None:
        return float8_format(parts["weight"], None if block is None else block[1])

    def read(parts: Parts, own: PlaneFormat) -> tuple[Tensor, GroupScales]:
        weight, scale = parts["weight"], parts["scale"]
        size = block or (weight.shape[0], weight.shape[1])
        scale = scale.reshape(1, 1) if scale.dim() < 2 else scale
        return float8_planes(weight, scale, size, own.group_size)

    return Scheme(
        "FP8",
        {"scale": "_scale_inv", "weight": ""},
        shape,
        decode,
        "",
        ignored=("activation_scale", "input_scale", *OF_ACTIVATIONS),
        planes=StoredPlanes(format, read),
    )


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

    def read(parts: Parts, _: PlaneFormat) -> tuple[Tensor, GroupScales]:
        return _fp4_fields(parts["blocks"]).flatten(1), GroupScales(finite_powers(parts["scales"]))

    return Scheme(
        "MXFP4",
        {"blocks": "_blocks", "scales": "_scales"},
        shape,
        decode,
        "",
        fits_bfloat16=True,
        few_values=True,
        planes=StoredPlanes(lambda _: PlaneFormat(32, 4, "mxfp4"), read),
    )


def modelopt(config: dict[str, Any]) -> Scheme:
    algorithm = config.get("quant_algo")
    if algorithm != "NVFP4":
        raise SchemeError(f"quant_algo is {algorithm}, only NVFP4 can be read")
    names = {"global": ".weight_scale_2", "scale": ".weight_scale", "packed": ".weight"}
    return _nvfp4("ModelOpt NVFP4", names, divided=False)


def _nvfp4(name: str, names: dict[str, str], *, divided: bool) -> Scheme:
    """FP4 numbers, a float8 scale for each 16 of a row, and a float32 one for the whole weight.

    Args:
        divided: scales are divided by the weight's own, not multiplied with it.
    """

    def shape(parts: Infos) -> tuple[int, ...]:
        packed, scale = need(parts, "packed", "scale", dimensions=2)
        (whole,) = need(parts, "global")
        check_dtype(packed, torch.uint8)
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        check_groups(columns // _NVFP4_GROUP, columns)
        check(scale, torch.float8_e4m3fn, (rows, columns // _NVFP4_GROUP))
        check_dtype(whole, torch.float32)
        if whole.shape not in ((), (1,)):
            raise SchemeError(f"there must be one scale for all of it, they are {whole.shape}")
        return rows, columns

    def scales(parts: Parts) -> Tensor:
        own, whole = parts["scale"].float(), parts["global"].reshape(1, 1)
        return own / whole if divided else own * whole

    def read(parts: Parts, _: PlaneFormat) -> tuple[Tensor, GroupScales]:
        codes_NK = (_fp4_halves(parts["packed"]) + 16).to(torch.uint8)
        return codes_NK, GroupScales((scales(parts) / 2).half())

    return Scheme(
        name,
        names,
        shape,
        lambda parts: decode_nvfp4(parts["packed"], scales(parts)),
        ignored=OF_ACTIVATIONS,
        planes=StoredPlanes(lambda _: plane_format(_NVFP4_GROUP, 5, "centred"), read),
    )


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

    def read(parts: Parts, own: PlaneFormat) -> tuple[Tensor, GroupScales]:
        weight, scale = parts["weight"], parts["scale"].reshape(-1, 1)
        block = len(weight) // len(scale), weight.shape[1]
        return float8_planes(weight, scale, block, own.group_size)

    return Scheme(
        "compressed-tensors",
        {"scale": ".weight_scale", "weight": ".weight"},
        shape,
        lambda parts: parts["weight"].float() * parts["scale"].float(),
        ignored=OF_ACTIVATIONS,
        planes=StoredPlanes(lambda parts: float8_format(parts["weight"], None), read),
    )


# Weights as integers of 4 or 8 bits in 32-bit words: GPTQ, AWQ and compressed-tensors.


def gptq(config: dict[str, Any]) -> Scheme:
    bits = known_bits(config, "bits", (2, 4, 8))
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

    def format(parts: Infos) -> PlaneFormat | None:
        in_order = config.get("desc_act", True) is False  # else columns may be in groups by value
        (columns,), groups = parts["g_idx"].shape, parts["scales"].shape[0]
        fits = in_order and columns % groups == 0
        return plane_format(columns // groups, bits, "offset") if fits else None

    def read(parts: Parts, own: PlaneFormat) -> tuple[Tensor, GroupScales]:
        columns, groups = len(parts["g_idx"]), len(parts["scales"])
        size = columns // groups
        if not torch.equal(parts["g_idx"], torch.arange(columns, dtype=torch.int32) // size):
            raise SchemeError("desc_act is false, and g_idx is not in order")
        codes_KN = _fields(parts["qweight"], bits).transpose(1, 2).flatten(0, 1)
        zeros_DN = _fields(parts["qzeros"], bits).flatten(1)[:, : codes_KN.shape[1]] + offset
        scales_ND = parts["scales"].T
        return codes_KN.T, offset_scales(scales_ND, zeros_DN.T, size // own.group_size)

    names = {role: f".{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    planes = StoredPlanes(format, read)
    return Scheme("GPTQ", names, shape, decode, few_values=bits <= 4, planes=planes)


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

    def format(parts: Infos) -> PlaneFormat | None:
        return plane_format(parts["qweight"].shape[0] // parts["scales"].shape[0], 4, "offset")

    def read(parts: Parts, own: PlaneFormat) -> tuple[Tensor, GroupScales]:
        codes_KN = _unscramble(_fields(parts["qweight"], 4)).flatten(1)
        zeros_DN = _unscramble(_fields(parts["qzeros"], 4)).flatten(1)
        repeat = len(codes_KN) // len(parts["scales"]) // own.group_size
        return codes_KN.T, offset_scales(parts["scales"].T, zeros_DN.T, repeat)

    names = {role: f".{role}" for role in ("qweight", "qzeros", "scales")}
    planes = StoredPlanes(format, read)
    return Scheme(
        "AWQ", names, shape, lambda parts: decode_awq(**parts), few_values=True, planes=planes
    )


def compressed_tensors(config: dict[str, Any]) -> Scheme:
    weights = [group["weights"] for group in config["config_groups"].values()]
    if len({(w["num_bits"], w["type"], w.get("symmetric", True)) for w in weights}) != 1:
        raise SchemeError("its groups of layers have different formats")
    if weights[0]["type"] == "float" and weights[0]["num_bits"] == 8:
        return float8_rows()
    if config.get("format") == "nvfp4-pack-quantized":
        names = {"packed": ".weight_packed", "scale": ".weight_scale"}
        names |= {"global": ".weight_global_scale"}
        return _nvfp4("compressed-tensors NVFP4", names, divided=True)
    bits = known_bits(weights[0], "num_bits", (4, 8))
    if config.get("format") != "pack-quantized":
        raise SchemeError(
            f"format {config.get('format')}, only pack-quantized, nvfp4-pack-quantized and float8 "
            "can be read"
        )
    return _packed_integers(bits, () if weights[0].get("symmetric", True) else ("zero_point",))


def _packed_integers(bits: int, zeros: tuple[str, ...]) -> Scheme:
    """Words of codes along a row, and a scale for each group of it.

    Args:
        zeros: the role of zero points; empty: codes lie around ``2 ** (bits - 1)``.
    """

    def shape(parts: Infos) -> tuple[int, ...]:
        packed, scale, *zero = need(parts, "packed", "scale", *zeros, dimensions=2)
        check(packed, torch.int32, packed.shape[:2])
        rows, columns = packed.shape[0], packed.shape[1] * (32 // bits)
        check(scale, scale.dtype, (rows, scale.shape[-1]))
        check_groups(scale.shape[-1], columns)
        for info in zero:
            check(info, torch.int32, (-(-rows * bits // 32), scale.shape[-1]))
        return rows, columns

    def decode(parts: Parts) -> Tensor:
        columns = parts["packed"].shape[1] * (32 // bits)
        zero = parts.get("zero_point")
        return decode_packed(parts["packed"], parts["scale"], columns, bits, zero)

    def format(parts: Infos) -> PlaneFormat | None:
        columns = parts["packed"].shape[1] * (32 // bits)
        kind: Scales = "offset" if zeros else "centred"
        return plane_format(columns // parts["scale"].shape[1], bits, kind)

    def read(parts: Parts, own: PlaneFormat) -> tuple[Tensor, GroupScales]:
        codes_NK, scale_ND = _fields(parts["packed"], bits).flatten(1), parts["scale"]
        repeat = codes_NK.shape[1] // scale_ND.shape[1] // own.group_size
        zero_ND = packed_zeros(parts.get("zero_point"), scale_ND, bits)
        made = offset_scales(scale_ND, zero_ND, repeat)
        return codes_NK, made if zeros else replace(made, offset_ND=None)

    names = {"packed": ".weight_packed", "scale": ".weight_scale"}
    names |= {role: f".weight_{role}" for role in zeros}
    return Scheme(
        "compressed-tensors",
        names,
        shape,
        decode,
        ignored=(".weight_shape", *OF_ACTIVATIONS),
        few_values=bits == 4,
        planes=StoredPlanes(format, read),
    )
