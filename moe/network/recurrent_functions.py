"""Public functions of FLA, causal-conv1d and mamba-ssm on our kernels, as transformers calls them.

Each takes the arguments of transformers' own torch function of that name and returns what it
returns, or `NotImplemented` for calls that our kernels do not serve. Its examples are random calls
that prove so (`moe.network.recurrent_kernels`). Computations and states are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.recurrence import MAX_KEYS, MAX_STATES, MAX_TAPS, convolve, gated, scan
from moe.network.attention import current_pass

_ACTIVATIONS = (None, "silu", "swish")
Call = tuple[tuple[Any, ...], dict[str, Any]]
Normal = Callable[..., Tensor]


@dataclass(frozen=True)
class Function:
    """
    Attributes:
        run: takes the arguments of the public function.
        examples: calls whose random tensors an argument makes (see `normal_on`), new ones each
            time, as some change their arguments in place.
    """

    run: Callable[..., Any]
    examples: Callable[[Normal], Iterator[Call]]


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    """Chunked or token by token, with a decay of each head or of each key (KDA)."""
    if key.shape[-1] > MAX_KEYS:
        return NotImplemented
    state, normalised = initial_state, use_qk_l2norm_in_kernel
    out, after = gated(query, key, value, g, beta, state, normalised=normalised)
    return out.to(query.dtype), after if output_final_state else None


def _causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Any:
    if weight.shape[1] > MAX_TAPS or activation not in _ACTIVATIONS:
        return NotImplemented
    out, _state = convolve(hidden_states.mT, weight, bias, silu=activation is not None)
    return out.mT.to(hidden_states.dtype)


def _causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    kept, taps = conv_state.shape[-1], weight.shape[1]
    if not taps - 1 <= kept <= MAX_TAPS or activation not in _ACTIVATIONS:
        return NotImplemented
    silu = activation is not None
    out, after = convolve(hidden_states.mT, weight, bias, conv_state, silu=silu)
    conv_state.copy_(after)
    return out.mT.to(hidden_states.dtype)


def _mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """A prompt of Mamba-2: ``(B, T, H, P)``."""
    if B.shape[-1] > MAX_STATES or z is not None or (D is not None and D.ndim != 1):
        return NotImplemented
    out, after = scan(
        hidden_states, dt, A, B, C, initial_states,
        d=D, bias=dt_bias, softplus=dt_softplus, limits=dt_limit,
    )  # fmt: skip
    return (out, after) if return_final_states else out


def _mamba_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """A prompt of Mamba, ``(B, P, T)``, from the state that the running module has asked for."""
    if A.shape[-1] > MAX_STATES or B.ndim != 3:
        return NotImplemented
    cache = current_pass.get(None)
    before = None if cache is None else cache.recurrent_before
    if before is not None and before.shape != (len(hidden_states), *A.shape):
        return NotImplemented
    rows = _each(lambda t: t.mT[:, :, None], hidden_states, dt, B, C, z)
    x, steps, b, c, gates = rows
    fixed = _each(lambda t: t[None], A, D, delta_bias)
    out, after = scan(
        x, steps, fixed[0], b, c, None if before is None else before[:, None],
        d=fixed[1], z_BTHP=gates, bias=fixed[2], softplus=delta_softplus,
    )  # fmt: skip
    out = out[:, :, 0].mT
    return (out, after[:, 0]) if return_last_state else out


def _mamba2_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """A token of Mamba-2, ``(B, H, P)``; changes the state in place."""
    fixed: list[Any] = [A, D, dt_bias]
    if B.shape[-1] > MAX_STATES or hidden_states.ndim != 3:
        return NotImplemented
    if _is_expanded(dt, 2) and all(t is None or _is_expanded(t, 1) for t in fixed):  # one a head
        dt = dt[..., 0]
        fixed = [A[:, 0, 0], *_each(lambda t: t[:, 0], D, dt_bias)]
    x, steps, b, c, gates = _each(lambda t: t[:, None], hidden_states, dt, B, C, z)
    a, d, bias = fixed
    out, after = scan(x, steps, a, b, c, state, d=d, z_BTHP=gates, bias=bias, softplus=dt_softplus)
    state.copy_(after)
    return out[:, 0].to(hidden_states.dtype)


def _mamba_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """A token of Mamba, ``(B, P)``: one head of Mamba-2 whose channels differ."""
    if hidden_states.ndim != 2:
        return NotImplemented
    x, steps, b, c, gates = _each(lambda t: t[:, None], hidden_states, dt, B, C, z)
    a, d, bias = _each(lambda t: t[None], A, D, dt_bias)
    done = _mamba2_update(state[:, None], x, steps, a, b, c, d, bias, dt_softplus, gates)
    return done if done is NotImplemented else done[:, 0]


def _each(change: Callable[[Tensor], Tensor], *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else change(tensor) for tensor in tensors]


def _is_expanded(tensor: Tensor, first: int) -> bool:
    """Each dimension from ``first`` on repeats one number."""
    dims = range(first, tensor.ndim)
    return all(tensor.stride(dim) == 0 or tensor.shape[dim] == 1 for dim in dims)


def normal_on(device: torch.device) -> Normal:
    """Makes normal random tensors of given shapes there, the same on all devices."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def _gated_calls(by_key: bool, normal: Normal) -> Iterator[Call]:
    for batch, tokens, begun in ((1, 70, False), (1, 9, True), (3, 1, True)):
        heads = 2 if by_key else 4  # of values; two of keys
        q, k = normal(2, batch, tokens, 2, 16)
        decay = -normal(batch, tokens, heads, *((16,) if by_key else ())).exp()
        beta = normal(batch, tokens, heads).sigmoid()
        options = {
            "g": decay,
            "beta": beta,
            "initial_state": normal(batch, heads, 16, 24) if begun else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": not begun,
        }
        scale = 0.2 if begun else 1.0  # longer keys would make the rule unstable
        yield (q, k * scale, normal(batch, tokens, heads, 24)), options


def _convolution_calls(update: bool, normal: Normal) -> Iterator[Call]:
    for tokens, taps, kept, activation in ((1, 4, 4, "silu"), (1, 3, 3, None), (9, 4, 3, "silu")):
        x, weight = normal(2, 40, tokens), normal(40, taps)
        bias = normal(40) if activation is None else None
        state = (normal(2, 40, kept),) if update else ()
        yield (x, *state, weight, bias), {"activation": activation}


def _mamba2_scan_calls(normal: Normal) -> Iterator[Call]:
    for tokens, begun in ((13, False), (1, True), (9, True)):
        x, dt = normal(2, tokens, 4, 8), normal(2, tokens, 4)
        b, c = normal(2, 2, tokens, 2, 16)
        options = {
            "D": normal(4),
            "dt_bias": normal(4),
            "initial_states": normal(2, 4, 8, 16) if begun else None,
            "dt_softplus": True,
            "dt_limit": (0.1, 2.0),
            "return_final_states": True,
        }
        yield (x, dt, -normal(4).exp(), b, c, 4), options


def _mamba_scan_calls(normal: Normal) -> Iterator[Call]:
    for batch, tokens in ((1, 9), (2, 1)):
        x, dt, z = normal(3, batch, 40, tokens)
        b, c = normal(2, batch, 8, tokens)
        options = {
            "D": normal(40),
            "z": z,
            "delta_bias": normal(40),
            "delta_softplus": True,
            "return_last_state": True,
        }
        yield (x, dt, -normal(40, 8).exp(), b, c), options


def _mamba2_update_calls(normal: Normal) -> Iterator[Call]:
    for z in (None, normal(2, 4, 8)):
        dt = normal(2, 4, 1).expand(-1, -1, 8)
        a = -normal(4, 1, 1).exp().expand(-1, 8, 16)
        b, c = normal(2, 2, 2, 16)
        d, bias = normal(2, 4, 1).expand(-1, -1, 8)
        options = {"dt_bias": bias, "dt_softplus": True, "z": z}
        yield (normal(2, 4, 8, 16), normal(2, 4, 8), dt, a, b, c, d), options


def _mamba_update_calls(normal: Normal) -> Iterator[Call]:
    for z in (None, normal(2, 40)):
        x, dt = normal(2, 2, 40)
        b, c = normal(2, 2, 8)
        options = {"dt_bias": normal(40), "dt_softplus": True, "z": z}
        yield (normal(2, 40, 8), x, dt, -normal(40, 8).exp(), b, c, normal(40)), options


_GATED = Function(_gated_delta_rule, partial(_gated_calls, False))
_KDA = Function(_gated_delta_rule, partial(_gated_calls, True))
FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "chunk_gated_delta_rule": (_GATED,),
    "fused_recurrent_gated_delta_rule": (_GATED,),
    "chunk_kda": (_KDA,),
    "fused_recurrent_kda": (_KDA,),
    "causal_conv1d_fn": (Function(_causal_conv1d_fn, partial(_convolution_calls, False)),),
    "causal_conv1d_update": (Function(_causal_conv1d_update, partial(_convolution_calls, True)),),
    "mamba_chunk_scan_combined": (Function(_mamba2_scan, _mamba2_scan_calls),),
    "selective_scan_fn": (Function(_mamba_scan, _mamba_scan_calls),),
    "selective_state_update": (
        Function(_mamba_update, _mamba_update_calls),
        Function(_mamba2_update, _mamba2_update_calls),
    ),
}
"""By public name; of those that share one, the first that serves a call."""
