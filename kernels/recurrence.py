"""Recurrent layers: gated delta rules, state spaces and short convolutions, on any device.

`gated`, `scan` and `convolve` are torch operations (``moe::gated``, ``moe::scan``,
``moe::convolve``), which `moe.decode.trace` records. This module says what they take and give;
kernels/cpu/recurrence.py computes them on CPUs and kernels/triton/recurrence.py on GPUs, each after
`register`. States and outputs are float32; inputs have any floating dtype. A sequence's outputs and
states have the same bits in any company and however its tokens are cut into calls. Float64
references are in tests/kernels/recurrence_cases.py.

Legend: B sequences, T tokens, H heads, K keys, V values, P channels, N states of each, C channels
of a convolution, S inputs that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_KEYS = MAX_STATES = 256
MAX_TAPS = 8


@dataclass(frozen=True)
class Recurrence:
    """One call, without the memory of its states and outputs.

    Attributes:
        rows: the inputs that differ from token to token, ``(B, T, H, width)`` each with the last
            dimension side by side, or None.
        kept: constants, contiguous, or None.
        state, out: shapes of the states and the outputs.
    """

    rows: tuple[Tensor | None, ...]
    kept: tuple[Tensor | None, ...]
    state: tuple[int, ...]
    out: tuple[int, ...]


@dataclass(frozen=True)
class GatedCall(Recurrence):
    """Rows are q, k, v, decay, beta; see `gated`. A head of q and k serves ``group`` of v."""

    scale: float
    corrected: bool
    by_key: bool
    normalised: bool
    group: int


@dataclass(frozen=True)
class ScanCall(Recurrence):
    """Rows are x, dt, b, c, z, constants a, d, bias; see `scan`. A head of b and c serves ``group``
    of x."""

    by_channel: bool
    softplus: bool
    least: float
    most: float
    group: int


@dataclass(frozen=True)
class ConvolutionCall(Recurrence):
    """The only row is x, as of one head; constants are the weight and the bias; see `convolve`."""

    silu: bool


def gated_call(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, scale: float,
    corrected: bool, normalised: bool,
) -> GatedCall:  # fmt: skip
    (batch, _, heads, values), keys = v.shape, k.shape[-1]
    by_key = decay.ndim == 4
    rows = _each(_rows, q, k, v, decay if by_key else decay[..., None], _column(beta))
    state = batch, heads, keys, values
    group = heads // k.shape[2]
    return GatedCall(rows, (), state, tuple(v.shape), scale, corrected, by_key, normalised, group)


def scan_call(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor | None, a: Tensor, d: Tensor | None,
    bias: Tensor | None, softplus: bool, least: float, most: float,
) -> ScanCall:  # fmt: skip
    (batch, _, heads, channels), states = x.shape, b.shape[-1]
    by_channel = dt.ndim == 4
    rows = _each(_rows, x, dt if by_channel else dt[..., None], b, c, z)
    state = batch, heads, channels, states
    group, out = heads // b.shape[2], tuple(x.shape)
    kept = _each(whole, a, d, bias)
    return ScanCall(rows, kept, state, out, by_channel, softplus, least, most, group)


def convolution_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: int, silu: bool
) -> ConvolutionCall:
    rows, kept = _each(_rows, x[:, :, None]), _each(whole, weight, bias)
    state = x.shape[0], x.shape[2], states
    return ConvolutionCall(rows, kept, state, tuple(x.shape), silu)


Kernel = Callable[[Recurrence, Tensor | None, Tensor, Tensor], None]
"""Takes a call, the states before it (float32 and contiguous; None: zeros), and the memory for the
states after it and the outputs, both contiguous, which it fills."""

_kernels: dict[str, Kernel] = {"meta": lambda *_: None}


def register(device: str, kernel: Kernel) -> None:
    """Compute the operations on tensors of this type of device with ``kernel`` from now on."""
    _kernels[device] = kernel


def compute(call: Recurrence, state: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Outputs and the states after them, on ``device``, where all tensors of the call are.

    Raises:
        RuntimeError: no kernel is registered for it.
    """
    if device.type not in _kernels:
        raise RuntimeError(f"no kernel of recurrent layers is registered for '{device}'")
    before = None if state is None else whole(state).float()
    after = torch.empty(call.state, dtype=torch.float32, device=device)
    out = torch.empty(call.out, dtype=torch.float32, device=device)
    _kernels[device.type](call, before, after, out)
    return out, after


_OPERATIONS = torch.library.Library("moe", "DEF")


def _define(signature: str, prepare: Callable[..., Recurrence]) -> None:
    """An operation ``(state, *arguments of prepare)`` that gives outputs and states after them."""

    def run(state: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
        return compute(prepare(*args), state, args[0].device)

    name = signature.partition("(")[0]
    _OPERATIONS.define(f"{signature} -> (Tensor, Tensor)")
    for key in ("CPU", "CUDA", "Meta"):
        _OPERATIONS.impl(name, run, key)


_define(
    "gated(Tensor? state, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, float scale, "
    "bool corrected, bool normalised)",
    gated_call,
)
_define(
    "scan(Tensor? state, Tensor x, Tensor dt, Tensor b, Tensor c, Tensor? z, Tensor a, Tensor? d, "
    "Tensor? bias, bool softplus, float least, float most)",
    scan_call,
)
_define(
    "convolve(Tensor? state, Tensor x, Tensor weight, Tensor? bias, int states, bool silu)",
    convolution_call,
)


def gated(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    decay: Tensor,
    beta_BTH: Tensor | None,
    state_BHKV: Tensor | None = None,
    *,
    scale: float | None = None,
    corrected: bool = True,
    normalised: bool = False,
) -> tuple[Tensor, Tensor]:
    """``S = exp(decay) S + k v'^T; out = scale q^T S`` token by token: outputs ``(B, T, H, V)``
    and the states after the last token, ``(B, H, K, V)``.

    Args:
        q_BTHK, k_BTHK: K at most `MAX_KEYS`; fewer heads than of values each serve some of
            those, one after the other.
        decay: logs, ``(B, T, H)``, or ``(B, T, H, K)`` for each key (KDA).
        state_BHKV: before the first token; None: zeros.
        scale: None: K ** -0.5.
        corrected: v' is ``beta (v - S^T k)`` (the delta rule), else ``beta v``.
        normalised: q and k are divided by their norms first, as FLA's kernels do.
    """
    scale = k_BTHK.shape[-1] ** -0.5 if scale is None else scale
    result: tuple[Tensor, Tensor] = torch.ops.moe.gated(
        state_BHKV, q_BTHK, k_BTHK, v_BTHV, decay, beta_BTH, scale, corrected, normalised
    )
    return result


def scan(
    x_BTHP: Tensor,
    dt: Tensor,
    a: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_BHPN: Tensor | None = None,
    *,
    d: Tensor | None = None,
    z_BTHP: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    limits: tuple[float, float] = (-float("inf"), float("inf")),
) -> tuple[Tensor, Tensor]:
    """``h = exp(dt a) h + dt x b^T; out = h c + d x`` token by token: outputs ``(B, T, H, P)``
    and the states after the last token, ``(B, H, P, N)``.

    Args:
        dt: ``(B, T, H)`` as Mamba-2 has it, or ``(B, T, H, P)`` of each channel (Mamba).
        a: of the shape of one head's dt, with N behind it in the second case: ``(H,)`` or
            ``(H, P, N)``.
        b_BTGN, c_BTGN: N at most `MAX_STATES`; each of G groups serves some heads, one after
            the other.
        state_BHPN: before the first token; None: zeros.
        d, bias: ``(H,)`` or ``(H, P)``; the bias is added to dt.
        z_BTHP: outputs are multiplied by ``silu(z)``.
        softplus: of dt with its bias.
        limits: least and most dt after that.
    """
    result: tuple[Tensor, Tensor] = torch.ops.moe.scan(
        state_BHPN, x_BTHP, dt, b_BTGN, c_BTGN, z_BTHP, a, d, bias, softplus, *limits
    )
    return result


def convolve(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    state_BCS: Tensor | None = None,
    *,
    kept: int | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel, and its silu if wanted: outputs ``(B, T, C)`` and
    the last S inputs ``(B, C, S)``, those before the first token included.

    Args:
        weight_CW: at most `MAX_TAPS` taps, the last that of the present token.
        state_BCS: the last inputs before; None: zeros.
        kept: S, at least the number of taps less one, if there is no state; None: that number.
    """
    if state_BCS is not None:
        kept = state_BCS.shape[2]
    kept = weight_CW.shape[1] - 1 if kept is None else kept
    result: tuple[Tensor, Tensor] = torch.ops.moe.convolve(
        state_BCS, x_BTC, weight_CW, bias_C, kept, silu
    )
    return result


def whole(tensor: Tensor) -> Tensor:
    """Contiguous and without gradients."""
    return tensor.detach().contiguous()


def _each(change: Callable[[Tensor], Tensor], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else change(tensor) for tensor in tensors)


def _column(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor[..., None]


def _rows(tensor: Tensor) -> Tensor:
    """With the last dimension side by side."""
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
