"""Random MoE layers and a float64 oracle written token by token, apart from the kernels' code."""

from __future__ import annotations

import platform
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from kernels import ExpertWeights
from kernels.cpu.build import load_library
from kernels.cpu.compiler import cpu_flags
from tests.amounts import deep_except

# The instruction sets that one source serves, by the flags that choose them.
TARGETS = ["-march=native"]
if platform.machine() == "x86_64":
    TARGETS += ["-march=x86-64", "-march=x86-64-v3"]
# And AMX, whose tiles are plain C++ here (kernels/cpu/amx_emulated.h), where its vectors run.
AMX_TARGETS = list(TARGETS)
if {"avx512bw", "avx512_vnni"} <= cpu_flags():
    AMX_TARGETS.append("-march=native -DEMULATED_AMX")
# The first is what everything else here runs; each other one takes a minute to compile.
TARGET_PARAMS = deep_except(TARGETS[:1], TARGETS)
AMX_TARGET_PARAMS = deep_except(AMX_TARGETS[:1], AMX_TARGETS)


def load_target(target: str) -> CDLL:
    """The kernels, built for one of the targets."""
    return load_library(tuple(target.split()))


def _halves(curve: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gate(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return curve(gate) * up

    return gate


def _interleaved_clamped(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2].clamp(max=1.0), rows[..., 1::2].clamp(-1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _clamped_late(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate).clamp(max=0.75) * up.clamp(-0.75, 0.75)


def _bent(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return 2.5 * torch.tanh(gate / 2.5) * torch.sigmoid(gate) * torch.tanh(up / 1.5) * 1.5


def _squared_relu(rows: Tensor) -> Tensor:
    return torch.relu(rows) ** 2


# name -> (activation, rows of the first projection for each unit of width)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "silu gate": (_halves(silu), 2),
    "gelu gate": (_halves(gelu), 2),
    "tanh gelu gate": (_halves(partial(gelu, approximate="tanh")), 2),
    "relu gate": (_halves(torch.relu), 2),
    "clamped interleaved gate": (_interleaved_clamped, 2),
    "clamped behind its curve": (_clamped_late, 2),
    "gate and up bent towards limits": (_bent, 2),
    "squared relu, no gate": (_squared_relu, 1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_rows(rows: Tensor) -> Tensor:
    return rms_norm(rows, (rows.shape[-1],), eps=1e-6)


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    experts: ExpertWeights

    def rows(self, keep: slice) -> Case:
        return Case(self.hidden[keep], self.ids[keep], self.weights[keep], self.experts)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
        return self.hidden, self.ids, self.weights, self.experts


def make_case(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    hidden_dtype: torch.dtype | None = None,
    activation: str = "silu gate",
    biased: bool = False,
    normed: bool = False,
    unused: float = 0.0,
    one_expert: bool = False,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    function, rows = ACTIVATIONS[activation]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    weights = ExpertWeights(
        (normal(experts, rows * width, hidden) * hidden**-0.5).to(dtype),
        (normal(experts, hidden, width) * width**-0.5).to(dtype),
        function,
        normal(experts, rows * width).to(dtype) if biased else None,
        normal(experts, hidden).to(dtype) if biased else None,
        norm_rows if normed else None,
    )
    scores = torch.rand(tokens, experts, generator=random)
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    if not one_expert:
        ids = scores.topk(min(top_k, experts), dim=1).indices
    off = torch.rand(ids.shape, generator=random) < unused
    routing = torch.rand(ids.shape, generator=random).masked_fill(off, 0.0)
    return Case(
        normal(tokens, hidden).to(hidden_dtype or dtype), ids.masked_fill(off, -1), routing, weights
    )


def oracle(case: Case) -> Tensor:
    """(T, H) float64, one token and slot after the other."""
    experts = case.experts
    output = torch.zeros(case.hidden.shape, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(case.ids.tolist(), case.weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert < 0:
                continue
            row = experts.gate_up_EGH[expert].double() @ case.hidden[t].double()
            if experts.gate_up_bias_EG is not None:
                row += experts.gate_up_bias_EG[expert].double()
            row = experts.down_EHF[expert].double() @ experts.activation(row[None])[0]
            if experts.down_bias_EH is not None:
                row += experts.down_bias_EH[expert].double()
            if experts.post_norm is not None:
                row = experts.post_norm(row[None])[0]
            output[t] += weight * row
    return output


def assert_close(actual: Tensor, case: Case) -> None:
    """`actual` is right to the precision of the dtypes that the case computes in."""
    assert actual.shape == case.hidden.shape
    assert actual.dtype == case.hidden.dtype
    # Half-precision activations are rounded on the way in, in the middle and on the way out.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[actual.dtype]
    if case.experts.post_norm is not None:  # which makes small rows large, and their errors too
        tolerance *= 10
    expected = oracle(case)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), expected, rtol=tolerance, atol=tolerance * scale + 1e-6
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layer: odd sizes, every dtype, biases, norms, unused slots, none or many tokens."""
    experts = draw(st.integers(1, 9))
    return make_case(
        tokens=draw(st.sampled_from((0, 1, 2, 3, 7, 13, 40))),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        hidden=draw(st.integers(1, 90)),
        width=draw(st.integers(1, 90)),
        dtype=draw(st.sampled_from(DTYPES)),
        hidden_dtype=draw(st.sampled_from(DTYPES)),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        biased=draw(st.booleans()),
        normed=draw(st.booleans()),
        unused=draw(st.sampled_from((0.0, 0.3, 1.0))),
        one_expert=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
