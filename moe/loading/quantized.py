"""Checkpoints whose weights are quantised already, read as if they were not.

Each group of stored tensors (codes, scales, zero points) is presented as the one float tensor that
they stand for, under its usual name. So transformers' conversions, plans and reports work as for
any other checkpoint. Names and shapes are checked before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from experts.safetensors_io import TensorInfo
from kernels.planes import (
    PlaneFormat,
    PlaneLayout,
    dequantize,
    num_planes,
    pack,
    pack_scales,
    quantize,
)
from kernels.scales import GroupScales
from moe.errors import CheckpointError, UnsupportedModelError, listing
from moe.loading.checkpoint import LOCAL, ByteSource, Checkpoint
from moe.loading.gguf.checkpoint import GgufCheckpoint, gguf_coding
from moe.loading.schemes import (
    Coding,
    Scheme,
    SchemeError,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)

METHODS: dict[str, Callable[[dict[str, Any]], Coding]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "gguf": gguf_coding,
}


@contextmanager
def open_checkpoint(
    path: Path, config: PreTrainedConfig, *, exact: bool = False, source: ByteSource = LOCAL
) -> Iterator[Checkpoint]:
    """Open a model directory; quantised weights are decoded as they are read.

    Args:
        path: the directory.
        config: its configuration, which names the method.
        exact: present decoded weights in a dtype that holds them without rounding, not in the
            configuration's.
        source: of the weights; headers are read from the files in any case.

    Raises:
        CheckpointError: files are damaged, or parts of a quantised weight are missing or do not
            fit each other; lists all.
        UnsupportedModelError: the method is not known.
    """
    scheme = scheme_of(config)
    exact = exact and scheme is not None and not scheme.fits_bfloat16
    dtype = torch.float32 if exact else _dtype(config)
    if scheme is not None and not isinstance(scheme, Scheme):
        with GgufCheckpoint(path, dtype, source) as checkpoint:
            yield checkpoint
        return
    with Checkpoint.open(path, source=source) as checkpoint:
        yield checkpoint if scheme is None else DecodedCheckpoint(checkpoint, scheme, dtype)


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.get_text_config().dtype or config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def scheme_of(config: PreTrainedConfig) -> Coding | None:
    """Return the coding of this configuration's checkpoint; None where it is not quantised.

    Raises:
        UnsupportedModelError: in a way that is not known.
    """
    for part in (config, config.get_text_config()):
        stated = getattr(part, "quantization_config", None)
        if stated:
            known: dict[str, Any] = stated if isinstance(stated, dict) else vars(stated)
            method = str(getattr(known.get("quant_method"), "value", known.get("quant_method")))
            make = METHODS.get(method)
            reason = "only FP8, MXFP4, NVFP4, GPTQ, AWQ, compressed-tensors and GGUF are"
            if make is not None:
                try:
                    return make(known)
                except (SchemeError, TypeError, ValueError, KeyError, AttributeError) as error:
                    reason = str(error) or type(error).__name__
            raise UnsupportedModelError(
                f"{config.model_type}: weights quantised in this way ({method}) are not supported: "
                f"{reason}; use another checkpoint of the same model"
            )
    return None


def decoding_notices(
    config: PreTrainedConfig, expert_bits: int | None, kept: str = ""
) -> list[str]:
    """Say that weights were quantised already, and what became of them.

    Args:
        kept: what stays as it is (`WeightPlan.kept`).
    """
    scheme = scheme_of(config)
    if scheme is None:
        return []
    dtype = _dtype(config)
    most = 100 * torch.finfo(dtype).eps / 2
    rounded = f"decoded to {str(dtype).removeprefix('torch.')}"
    if not scheme.fits_bfloat16:
        rounded += f" (numbers are rounded by {most:.2g} % at most)"
    if kept:
        own = f" ({', '.join(scheme.decoded)} among them)" if scheme.decoded else ""
        became = f"{kept}; others{own} are {rounded}"
    elif expert_bits == 8 and scheme.few_values:
        became = f"{rounded}, those of experts into 8-bit planes that hold the same numbers "
        became += "where groups fit"
    elif expert_bits is not None and expert_bits <= 8:
        error = 100 * rounding_error(expert_bits)
        became = f"{rounded}, those of experts rounded again, to {expert_bits} bits (by about "
        became += f"{error:.2g} % of their size, root mean square)"
    else:
        own = f"; {', '.join(scheme.decoded)} fit no bit planes" if scheme.decoded else ""
        became = f"{rounded} while loading{own}"
    return [f"the checkpoint's weights are {scheme.name}: {became}"]


@cache
def rounding_error(bits: int) -> float:
    """Return by how much rounding to our bit planes changes normal numbers, of their size (RMS)."""
    drawn = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    layout = PlaneLayout(*drawn.shape)
    codes, scales = quantize(drawn, layout.group_size)
    count = num_planes(bits)
    planes = pack(codes, layout)[:count]
    away = dequantize(planes, pack_scales(scales, layout), layout).float() - drawn
    return float(away.square().mean().sqrt() / drawn.square().mean().sqrt())


class DecodedCheckpoint(Checkpoint):
    """An open checkpoint, with weights in the place of their parts. Closed with `stored`.

    `read` gives decoded weights in float32, so that they are rounded once, where they are kept.
    """

    def __init__(self, stored: Checkpoint, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__(stored.path, stored._bytes)
        self._open = stored._open
        self._stored = stored
        self._scheme = scheme
        self._parts: dict[str, dict[str, str]] = {}
        self._last: tuple[str, Tensor] | None = None
        self._last_planes: tuple[tuple[str, int | None], Tensor, GroupScales] | None = None
        problems: list[str] = []
        tensors = dict(stored.tensors)
        for stem, parts in scheme.group(tensors).items():
            try:
                shape = scheme.shape({role: tensors[name] for role, name in parts.items()})
            except SchemeError as error:
                first = next(iter(parts.values()))
                problems.append(f"{tensors[first].file.name}: {stem}: {error}")
                continue
            self._parts[f"{stem}{scheme.weight}"] = parts
            self._tensors[f"{stem}{scheme.weight}"] = _stands_for(parts, tensors, dtype, shape)
        used = {name for parts in self._parts.values() for name in parts.values()}
        for name, info in tensors.items():
            if name not in used and not name.endswith(scheme.ignored):
                self._tensors.setdefault(name, info)
                if info.dtype.is_floating_point and info.dtype.itemsize == 1:
                    problems.append(f"{info.file.name}: {name} is {info.dtype} without a scale")
        if problems:
            title = f"cannot decode the {scheme.name} weights in {stored.path}"
            raise CheckpointError(listing(title, problems))

    def plane_format(self, name: str) -> PlaneFormat | None:
        if name not in self._parts or self._scheme.planes is None:
            return None
        stored = self._stored.tensors
        infos = {role: stored[part] for role, part in self._parts[name].items()}
        return self._scheme.planes.format(infos)

    def read_planes(
        self, name: str, *, rows: slice | None = None, expert: int | None = None
    ) -> tuple[Tensor, GroupScales]:
        own = self.plane_format(name)
        assert own is not None
        assert self._scheme.planes is not None
        if self._last_planes is None or self._last_planes[0] != (name, expert):
            self._last_planes = None  # one weight at a time
            one = None if expert is None else slice(expert, expert + 1)
            stored = self._parts[name].items()
            parts = {role: self._stored.read(part, rows=one) for role, part in stored}
            if expert is not None:
                parts = {role: part[0] for role, part in parts.items()}
            try:
                self._last_planes = (name, expert), *self._scheme.planes.read(parts, own)
            except SchemeError as error:
                raise CheckpointError(f"{self.path}: {name}: {error}") from error
        _, codes_NK, scales = self._last_planes
        wanted = slice(None) if rows is None else rows
        if wanted.indices(len(codes_NK))[1] == len(codes_NK):
            self._last_planes = None
        return codes_NK[wanted], scales.rows(wanted)

    def announce(self, names: Iterable[str]) -> None:
        parts = (self._parts.get(name, {"": name}).values() for name in names)
        self._stored.announce(part for group in parts for part in group)

    def read(self, name: str, *, rows: slice | None = None) -> Tensor:
        if name not in self._parts:
            return super().read(name, rows=rows)
        if self._last is None or self._last[0] != name:
            self._last = None  # one decoded weight at a time
            parts = {role: self._stored.read(part) for role, part in self._parts[name].items()}
            try:
                decoded = self._scheme.decode(parts)
            except SchemeError as error:
                raise CheckpointError(f"{self.path}: {name}: {error}") from error
            assert decoded.shape == self._tensors[name].shape, name
            self._last = name, decoded
        whole = self._last[1]
        if rows is None or rows.indices(len(whole))[1] == len(whole):
            self._last = None
        return whole if rows is None else whole[rows]

    def read_into(self, name: str, out: Tensor, *, rows: slice | None = None) -> None:
        if name in self._parts:
            out.copy_(self.read(name, rows=rows))
        else:
            super().read_into(name, out, rows=rows)


def _stands_for(
    parts: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> TensorInfo:
    """A header entry as of a float tensor that lies where the first part does."""
    first = tensors[next(iter(parts.values()))]
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorInfo(first.file, dtype, shape, first.start, first.start + nbytes)
