"""What tests of recurrent kernels share: references in any dtype, and random cases.

The references are the formulas of kernels/cpu/recurrence.h, token by token, with its legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from kernels import recurrence


def gated(case: GatedCase, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs ``(B, T, H, V)`` and last states ``(B, H, K, V)``."""
    q, k, v, decay, beta, state = (t.to(dtype) for t in case.tensors)
    heads = v.shape[2]
    q, k = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k))
    if case.normalised:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q = q * case.scale
    kept = decay.exp() if decay.ndim == 4 else decay.exp()[..., None]
    outs = [v[:, :0]]
    for t in range(v.shape[1]):
        state = state * kept[:, t, :, :, None]
        known = (state * k[:, t, :, :, None]).sum(-2) if case.corrected else 0
        new = beta[:, t, :, None] * (v[:, t] - known)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(-2)[:, None])
    return torch.cat(outs, 1), state


def scan(case: ScanCase, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs ``(B, T, H, P)`` and last states ``(B, H, P, N)``."""
    x, dt, a, b, c, state = (t.to(dtype) for t in case.tensors)
    heads = x.shape[2]
    b, c = (t.repeat_interleave(heads // t.shape[2], 2) for t in (b, c))
    d, bias, z = (None if t is None else t.to(dtype) for t in (case.d, case.bias, case.z))
    dt = dt if bias is None else dt + bias
    dt = (softplus(dt) if case.softplus else dt).clamp(*case.limits)
    by_channel = dt.ndim == 4
    outs = [x[:, :0]]
    for t in range(x.shape[1]):
        step = dt[:, t] if by_channel else dt[:, t, :, None]
        decay = (step[..., None] * (a if by_channel else a[:, None, None])).exp()
        state = state * decay + (step * x[:, t])[..., None] * b[:, t, :, None]
        outs.append((state * c[:, t, :, None]).sum(-1)[:, None])
    out = torch.cat(outs, 1)
    if d is not None:
        out = out + x * (d if by_channel else d[:, None])
    return out if z is None else out * silu(z), state


def convolve(case: ConvolutionCase, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs ``(B, T, C)`` and the last inputs ``(B, C, S)``."""
    x, weight, state = (t.to(dtype) for t in case.tensors)
    columns = torch.cat([state, x.mT], -1)
    read = columns[..., state.shape[-1] + 1 - weight.shape[1] :]
    bias = None if case.bias is None else case.bias.to(dtype)
    out = x.mT[..., :0]
    if x.shape[1]:
        out = conv1d(read, weight[:, None], bias, groups=len(weight))
    kept = columns[..., columns.shape[-1] - state.shape[-1] :]
    return (silu(out) if case.silu else out).mT, kept


@dataclass(frozen=True)
class GatedCase:
    """Arguments of `kernels.recurrence.gated`: q, k, v, decay, beta and the state before."""

    tensors: tuple[Tensor, ...]
    scale: float = 1.0
    corrected: bool = True
    normalised: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "corrected": self.corrected,
            "normalised": self.normalised,
        }

    @property
    def tokens(self) -> int:
        return self.tensors[2].shape[1]

    def part(self, begin: int, end: int, state: Tensor) -> GatedCase:
        """Some of the tokens."""
        return replace(self, tensors=(*(t[:, begin:end] for t in self.tensors[:5]), state))

    def sequence(self, index: int) -> GatedCase:
        return replace(self, tensors=tuple(t[index : index + 1] for t in self.tensors))


@dataclass(frozen=True)
class ScanCase:
    """Arguments of `kernels.recurrence.scan`: x, dt, a, b, c and the state before."""

    tensors: tuple[Tensor, ...]
    d: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    softplus: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def options(self) -> dict[str, Any]:
        return {
            "d": self.d,
            "z_BTHP": self.z,
            "bias": self.bias,
            "softplus": self.softplus,
            "limits": self.limits,
        }

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1]

    def part(self, begin: int, end: int, state: Tensor) -> ScanCase:
        x, dt, a, b, c, _ = self.tensors
        x, dt, b, c = (t[:, begin:end] for t in (x, dt, b, c))
        z = None if self.z is None else self.z[:, begin:end]
        return replace(self, tensors=(x, dt, a, b, c, state), z=z)

    def sequence(self, index: int) -> ScanCase:
        x, dt, a, b, c, state = self.tensors
        x, dt, b, c, state = (t[index : index + 1] for t in (x, dt, b, c, state))
        z = None if self.z is None else self.z[index : index + 1]
        return replace(self, tensors=(x, dt, a, b, c, state), z=z)


@dataclass(frozen=True)
class ConvolutionCase:
    """Arguments of `kernels.recurrence.convolve`: x, the weight and the state before."""

    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None
    silu: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"silu": self.silu}

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1]

    def part(self, begin: int, end: int, state: Tensor) -> ConvolutionCase:
        x, weight, _ = self.tensors
        return replace(self, tensors=(x[:, begin:end], weight, state))

    def sequence(self, index: int) -> ConvolutionCase:
        x, weight, state = self.tensors
        return replace(self, tensors=(x[index : index + 1], weight, state[index : index + 1]))


Case = GatedCase | ScanCase | ConvolutionCase


def moved(case: Case, device: torch.device) -> Case:
    """With all tensors on that device."""
    changed: dict[str, Any] = {"tensors": tuple(t.to(device) for t in case.tensors)}
    for each in fields(case):
        if isinstance(own := getattr(case, each.name), Tensor):
            changed[each.name] = own.to(device)
    return replace(case, **changed)


def reference(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs and last states, token by token."""
    if isinstance(case, GatedCase):
        return gated(case, dtype)
    return scan(case, dtype) if isinstance(case, ScanCase) else convolve(case, dtype)


def run(case: Case) -> tuple[Tensor, Tensor]:
    """The same by the kernels that are registered for the tensors' device."""
    if isinstance(case, GatedCase):
        return recurrence.gated(*case.tensors, **case.options)
    if isinstance(case, ConvolutionCase):
        x, weight, state = case.tensors
        return recurrence.convolve(x, weight, case.bias, state, **case.options)
    return recurrence.scan(*case.tensors, **case.options)


class Expected(NamedTuple):
    """Outputs and states in float64 and in float32."""

    case: Case
    exact: tuple[Tensor, Tensor]
    rounded: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, case: Case) -> Expected:
        return cls(case, reference(case), reference(case, torch.float32))


def assert_close(actual: tuple[Tensor, Tensor], expected: Expected) -> None:
    """As near to float64 as four times the error of float32, or a few last bits."""
    for mine, exact, plain in zip(actual, expected.exact, expected.rounded, strict=True):
        assert mine.shape == exact.shape
        if exact.numel():
            least = 2e-6 * exact.abs().max()
            assert (mine - exact).abs().max() <= 4 * (plain - exact).abs().max() + least


def make_gated(
    batch: int,
    tokens: int,
    heads: int,
    group: int,
    keys: int,
    values: int,
    *,
    by_key: bool = False,
    strength: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> GatedCase:
    """Of ``heads`` of keys, each for ``group`` of values; decays are about exp(-strength)."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    each = (keys,) if by_key else ()
    every = heads * group
    decay = -strength * normal(batch, tokens, every, *each).exp()
    tensors = (
        normal(batch, tokens, heads, keys),
        normal(batch, tokens, heads, keys),
        normal(batch, tokens, every, values),
        decay,
        normal(batch, tokens, every).sigmoid(),
        normal(batch, every, keys, values),
    )
    return GatedCase(tensors, scale=keys**-0.5, **options)


def make_scan(
    batch: int,
    tokens: int,
    groups: int,
    group: int,
    channels: int,
    states: int,
    *,
    by_channel: bool = False,
    strength: float = 1.0,
    whole: bool = True,
    seed: int = 0,
    **options: Any,
) -> ScanCase:
    """Of ``groups`` of ``group`` heads; ``whole``: with d, z and bias."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    heads = groups * group
    each = (channels,) if by_channel else ()
    tensors = (
        normal(batch, tokens, heads, channels),
        normal(batch, tokens, heads, *each),
        -strength * normal(heads, *each, *((states,) if by_channel else ())).exp(),
        normal(batch, tokens, groups, states),
        normal(batch, tokens, groups, states),
        normal(batch, heads, channels, states),
    )
    more: dict[str, Any] = {}
    if whole:
        more = {"d": normal(heads, *each), "bias": normal(heads, *each)}
        more["z"] = normal(batch, tokens, heads, channels)
    return ScanCase(tensors, **more, **options)


def make_convolution(
    batch: int, tokens: int, channels: int, taps: int, kept: int, *, bias: bool, silu: bool
) -> ConvolutionCase:
    random = torch.Generator().manual_seed(batch + tokens)
    tensors = (
        torch.randn(batch, tokens, channels, generator=random),
        torch.randn(channels, taps, generator=random),
        torch.randn(batch, channels, kept, generator=random),
    )
    return ConvolutionCase(tensors, torch.randn(channels) if bias else None, silu)


_STRENGTHS = st.sampled_from([1e-3, 1.0, 300.0])
_SEEDS = st.integers(0, 1000)


def cases(most: int, tokens: int, widths: Sequence[int]) -> st.SearchStrategy[Case]:
    """At most ``most`` sequences, heads, and heads of a group; a convolution has more channels."""
    many, lengths = st.integers(1, most), st.integers(0, tokens)
    sizes = many, lengths, many, many, st.sampled_from(widths), st.sampled_from(widths)
    rules = st.builds(
        make_gated,
        *sizes,
        by_key=st.booleans(),
        strength=_STRENGTHS,
        seed=_SEEDS,
        corrected=st.booleans(),
        normalised=st.just(True),
    )
    scans = st.builds(
        make_scan,
        *sizes,
        by_channel=st.booleans(),
        strength=_STRENGTHS,
        whole=st.booleans(),
        seed=_SEEDS,
        softplus=st.just(True),
        limits=st.sampled_from([(0.0, float("inf")), (1e-2, 0.5)]),
    )
    convolutions = st.integers(2, 5).flatmap(
        lambda taps: st.builds(
            make_convolution,
            *(many, st.integers(0, 40), st.sampled_from([1, 5, 16, 64, 150]), st.just(taps)),
            st.integers(taps - 1, taps),
            bias=st.booleans(),
            silu=st.booleans(),
        )
    )
    return st.one_of(rules, scans, convolutions)
