"""What a way of quantising is: which tensors make up a weight, and of which shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experts.header import TensorInfo

Infos = Mapping[str, TensorInfo]
Parts = Mapping[str, Tensor]


class SchemeError(Exception):
    """What is wrong with the parts of one weight."""


@dataclass(frozen=True)
class Coding:
    """What is to be known of a way of quantising, whoever decodes it.

    Attributes:
        name: the method.
        fits_bfloat16: decoded weights are exact in bfloat16.
        few_values: so few values a scale that 8-bit planes hold them exactly (`experts.grid`),
            where no group of theirs ends inside one of ours.
    """

    name: str
    fits_bfloat16: bool = field(default=False, kw_only=True)
    few_values: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Scheme(Coding):
    """How one method stores a weight in several tensors of a checkpoint.

    Attributes:
        parts: role -> ending of a tensor's name. A weight is quantised where the first is there.
        shape: shape of the weight from the headers of its parts; raises `SchemeError`.
        decode: the weight in float32 from its parts; raises `SchemeError`.
        weight: ending of the name of the weight.
        ignored: endings of tensors that do not matter here, as of scales of activations.
    """

    parts: dict[str, str]
    shape: Callable[[Infos], tuple[int, ...]]
    decode: Callable[[Parts], Tensor]
    weight: str = ".weight"
    ignored: tuple[str, ...] = ()

    def group(self, names: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
        """Stem -> role -> stored name, of every weight that is quantised."""
        sign = next(iter(self.parts.values()))
        stems = [name.removesuffix(sign) for name in names if name.endswith(sign)]
        return {
            stem: {r: stem + end for r, end in self.parts.items() if stem + end in names}
            for stem in stems
        }


def need(parts: Infos, *roles: str, dimensions: int | None = None) -> list[TensorInfo]:
    """The parts of these roles, of so many dimensions; raises `SchemeError`, as all below."""
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
