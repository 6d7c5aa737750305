"""Operations on complex numbers as operations on their real and imaginary parts.

Some rotary tables are complex numbers. The compiled step knows real numbers only; a complex tensor
lies in memory as pairs of them, so views need nothing, and each operation has a real form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return _joined(size * angle.cos(), size * angle.sin())


def _mul(a: Any, b: Any) -> Tensor:
    """One of them may be real, or a number."""
    if not _is_complex(a):
        a, b = b, a
    pairs = torch.view_as_real(a)
    if not _is_complex(b):
        scale = b[..., None] if isinstance(b, Tensor) and b.ndim else b
        return torch.view_as_complex((pairs * scale).contiguous())
    others = torch.view_as_real(b)
    real, imaginary, *_ = pairs.unbind(-1)
    other_real, other_imaginary, *_ = others.unbind(-1)
    return _joined(
        real * other_real - imaginary * other_imaginary,
        real * other_imaginary + imaginary * other_real,
    )


def _joined(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


REAL_FORMS: Mapping[str, Callable[..., Tensor]] = {"polar": _polar, "mul": _mul}
"""By aten's name: the same result, views and real operations only."""


def real_form(name: str, arguments: Any) -> Callable[..., Tensor] | None:
    """What computes an operation of these arguments without complex arithmetic; None if it has
    none or needs none."""
    if name == "polar" or any(map(_is_complex, arguments)):
        return REAL_FORMS.get(name)
    return None
