"""Operations of torch beside the instructions that they are lowered to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.cpu import choose_kernel
from kernels.cpu.program import Space
from moe.decode.copies import without_copies
from moe.decode.lower import Lowering, operation_names
from moe.decode.patterns import with_patterns
from moe.decode.program import Program
from moe.decode.recorder import DecodeTrace, Recorder, Value
from moe.decode.records import DescriptionRecords
from moe.decode.traced import TracedStep
from moe.decode.units import Instruction
from moe.kv.cache import KVCache
from moe.network.packed_pass import Work

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

WIDTH, ROWS = 48, 3
Function = Callable[[Tensor], Tensor]


def recording(
    function: Function, x: Tensor, recorded: Callable[[Recorder, Tensor], Tensor] | None = None
) -> DecodeTrace:
    """See `ran`."""
    recorder = Recorder(operation_names())
    recorder.give(x, Space.EMBEDDED)
    with recorder:
        made = function(x) if recorded is None else recorded(recorder, x)
        logits = recorder.value(made.reshape(-1).float())
    assert isinstance(logits, Value)
    recorder.trace.logits = logits
    return recorder.trace


def ran(
    function: Function, rows: Tensor, recorded: Callable[[Recorder, Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """What a program and torch make of ``(ROWS, WIDTH)`` rows, each by itself.

    Args:
        recorded: records the function, where that is not what the recorder sees of it.
    """
    kernel, _ = choose_kernel()
    assert kernel is not None
    embedding = nn.Embedding.from_pretrained(rows)
    with torch.inference_mode():
        expected = torch.stack([function(row.clone()[None, None]).reshape(-1) for row in rows])
        trace = recording(function, rows[:1, None].clone(), recorded)
        step = TracedStep(Program(trace, DescriptionRecords()), embedding, kernel.decode)
        work = [Work([token], KVCache(4)) for token in range(len(rows))]
        actual = torch.cat(step(work, lambda *_: pytest.fail("no experts")))
    return actual, expected.float()


def heads(x: Tensor) -> Tensor:
    """``(1, 1, WIDTH)`` as ``(1, 4, WIDTH / 4)``."""
    return x.view(1, 4, -1)


def put_where_masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0.5] = 0.25
    return y


def changed_in_place(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., ::2] = x[..., ::2] * 2
    y[..., 1::3].add_(1).mul_(x[..., 1::3])
    return y


def constant_until_written(x: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, WIDTH)
    chosen = x.topk(5, -1).indices
    before = mask + 1
    mask.scatter_(-1, chosen, 1.0)
    return before + mask * x


def rotated(x: Tensor) -> Tensor:
    q = x.view(1, 1, 4, WIDTH // 4).transpose(1, 2)
    angle = torch.arange(WIDTH // 4) / 7
    a, b = q.chunk(2, -1)
    return (q * angle.cos() + torch.cat([-b, a], -1) * angle.sin()).transpose(1, 2)


def hashed(x: Tensor) -> Tensor:
    """Integers of 64 bits, which no float holds."""
    ids = (heads(x) * 1e4).long()
    mixed = (ids[:, :2] * 0x1234567890ABCDF) ^ (ids[:, 2:] * -0x7654321012345 + 5)
    rest = torch.remainder(mixed.unsqueeze(-1), torch.tensor([1_000_003, -97]))
    kept = torch.where(mixed < 0, mixed.new_full((), -1), mixed)
    moved = torch.remainder(kept.gather(-1, (heads(x)[:, 2:] > 0).long()), 10_007)
    both = mixed == torch.maximum(mixed, -mixed)
    return torch.cat([rest.flatten(), moved.flatten(), both.flatten()])


def balanced(x: Tensor, divisions: int, dim: int) -> Tensor:
    """Matrices divided by the sums of their rows and columns by turns."""
    for turn in range(divisions):
        x = x / (x.sum(dim if turn % 2 == 0 else -3 - dim, keepdim=True) + 1e-3)
    return x


def balanced_and_read(x: Tensor) -> Tensor:
    """The third of five divisions is read, too, and the last one is by the same sums again."""
    between = balanced(heads(x).exp(), 3, -1)
    last = balanced(between, 2, -2)
    return between + last / (last.sum(-1, keepdim=True) + 1e-3)


W = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
FUNCTIONS: dict[str, Function] = {
    "unary": lambda x: torch.cat([f(x) for f in (torch.neg, torch.exp, torch.sigmoid, F.silu,
        torch.tanh, F.relu, torch.cos, torch.sin, torch.abs, F.softplus, F.gelu, torch.erf,
        torch.floor, torch.square, F.logsigmoid)], -1),
    "of positive": lambda x: torch.cat([f(x.abs() + 0.1) for f in (torch.log, torch.log1p,
        torch.rsqrt, torch.sqrt, torch.reciprocal)], -1),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "binary": lambda x: x * x.view(-1) + x / (x.abs() + 2) - (3 - x) * 0.5,
    "powers": lambda x: x ** 2 + x.abs() ** 1.5,
    "alpha": lambda x: torch.add(x, x * x, alpha=0.25) - torch.sub(x, x.exp(), alpha=2),
    "compare": lambda x: ((x > 0) & (x < 1) | (x <= -1) | ~(x >= -2)) + (x == 0) + (x != 0.5) * x,
    "where": lambda x: torch.where(x > 0, x, -2.0) + x.masked_fill(x < 0.3, float("-inf")).exp(),
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0.1) * x.clamp_max(0.7) + x.clamp_min(0),
    "maximum": lambda x: torch.maximum(x, x * x) - torch.minimum(x, x.exp()),
    "floor division": lambda x: torch.div(x * 10, 3, rounding_mode="floor") + (x * 99).long() // 7,
    "balanced": lambda x: torch.cat([balanced(heads(x).exp(), 7, dim) for dim in (-1, -2)]),
    "balanced views": lambda x: balanced(heads(x)[:, ::2, 1:6].mT.exp(), 20, -2),
    "balanced and read": balanced_and_read,
    "rows by matrices of their own": lambda x: torch.bmm(
        x.view(4, 1, -1), W.view(4, 16, -1)[..., :12].contiguous().mT),
    "truncated division": lambda x: torch.div((x * 10).long(), 3, rounding_mode="trunc"),
    "broadcast": lambda x: heads(x) * heads(x)[:, :, :1] + heads(x)[:, 1:2],
    "transposed": lambda x: (heads(x).transpose(1, 2) * 2 + heads(x).mT).contiguous(),
    "sums": lambda x: torch.cat([heads(x).sum(1).flatten(), heads(x).sum((1, 2)),
        heads(x).mean(-1).flatten(), heads(x).mean((0, 1)), heads(x).amax(1).flatten(),
        heads(x).amin(-1).flatten(), heads(x).sum().reshape(1)]),
    "any": lambda x: torch.cat([(heads(x) > 1.5).any(-1), (heads(x) > -1).all(-1)]).float(),
    "softmax": lambda x: heads(x).softmax(-1) + heads(x).softmax(1) + heads(x).log_softmax(-1),
    "logsumexp": lambda x: heads(x).logsumexp(-1),
    "vector norm": lambda x: heads(x) / torch.linalg.vector_norm(heads(x), dim=-1, keepdim=True),
    "sums of sizes": lambda x: heads(x) / torch.norm(heads(x), p=1, dim=-1, keepdim=True),
    "layer norm": lambda x: F.layer_norm(heads(x), (WIDTH // 4,), W[0, :12], W[1, :12], 1e-5),
    "rms norm": lambda x: F.rms_norm(heads(x), (WIDTH // 4,), W[0, :12], 1e-5),
    "signs": lambda x: x.sign() + (x * 0).sign(),
    "hashed": hashed,
    "largest so far": lambda x: torch.where(
        heads(x) > 0, torch.arange(12), -1).cummax(-1).values + heads(x).cummax(1).values,
    "cumulated": lambda x: heads(x).cumsum(-1) + heads(x).cumsum(1),
    "top": lambda x: torch.cat([heads(x).topk(3, -1).values.flatten(),
        heads(x).topk(2, -1).indices.flatten(), heads(x).topk(2, 1).values.flatten()]),
    "smallest": lambda x: x.topk(4, -1, largest=False).values + x.topk(4, -1, False).indices,
    "sort": lambda x: x.sort(-1, descending=True).values + x.argsort(-1) + x.sort(-1).indices,
    "max": lambda x: heads(x).max(-1).values + heads(x).max(-1).indices + heads(x).argmax(-1),
    "gather": lambda x: heads(x).gather(-1, heads(x).topk(3, -1).indices),
    "gather of rows": lambda x: heads(x).gather(1, (heads(x)[:, :2] > 0).long()),
    "scatter": lambda x: torch.zeros_like(heads(x)).scatter(-1, heads(x).topk(3, -1).indices, 2.0),
    "scattered sums": lambda x: torch.zeros_like(x).scatter_add(-1, (x > 0).long() * 3, x),
    "added at an index": lambda x: torch.zeros(1, 4, 12).index_add(
        1, (heads(x)[0, :, 0] > 0).long() * 2, heads(x)
    ),
    "places": lambda x: torch.cat([torch.searchsorted(
        x.abs().cumsum(-1).view(-1), heads(x) * 9, right=right) for right in (True, False)], 1),
    "indexed": lambda x: heads(x)[:, torch.tensor([2, 0, 1, 1])] + x[..., x.argmax(-1).view(-1)],
    "selected": lambda x: heads(x).index_select(2, torch.tensor([5, 0, 3])),
    "embedded": lambda x: F.embedding((x[..., :3] > 0).long() * 7, W),
    "padded": lambda x: F.pad(heads(x), (2, 1, 0, 3)) + F.pad(heads(x), (3, 0, 2, 1), value=1.0),
    "cropped": lambda x: F.pad(heads(x), (-2, 1)),
    "repeated": lambda x: torch.cat([heads(x).repeat(1, 2, 1), heads(x).repeat_interleave(2, 1)]),
    "stacked": lambda x: torch.stack([x, x * 2, x + 1], -1).flatten(-2),
    "in place": changed_in_place,
    "put where masked": put_where_masked,
    "constant until written": constant_until_written,
    "rotated": rotated,
    "projected": lambda x: F.linear(x, W, W[3]) + x @ W + (W @ x.mT).mT,
    "projected heads": lambda x: F.linear(heads(x).transpose(1, 2), W[:7, :4]),
    "products": lambda x: heads(x) @ heads(x).mT @ heads(x) + W[:4, :4] @ heads(x),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x) * 2, heads(x) + 1),
    "scaled attention": lambda x: F.scaled_dot_product_attention(
        W[None, :5, :12], heads(x), heads(x)[..., :7], scale=0.2
    ),
    "flipped": lambda x: heads(x).flip(-1) + heads(x).flip(1, -1) * 2,
    "many products": lambda x: torch.einsum("bhd,hde->bhe", heads(x), W.view(4, 12, 48)),
    "depthwise": lambda x: F.conv1d(x.view(1, 12, 4), W[:12, None, :3], W[5, :12], groups=12),
    "dilated": lambda x: F.conv1d(
        x.view(1, 12, 4), W[:12, None, :2], None, dilation=3, groups=12),
    "convolved": lambda x: F.conv1d(x.view(1, 12, 4), W[:8, :6, None] * W[0, :3], groups=2),
    "wide convolution": lambda x: F.conv1d(x.view(1, 12, 4), W[:12, None, :4], None, 1, 3, 1, 12),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=5)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 5.0]))
def test_a_program_computes_what_torch_computes(name: str, seed: int, scale: float) -> None:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) * scale
    actual, expected = ran(FUNCTIONS[name], rows)
    largest = float(expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max())  # sums may cancel
    atol = max(2e-5, 1e-6 * largest)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=atol, equal_nan=True)


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As most models write it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def read_between(x: Tensor) -> Tensor:
    squares = x.pow(2)
    return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6) + squares


def codes_of(function: Function) -> list[str]:
    lowering = Lowering(recording(function, torch.randn(1, 1, WIDTH)))
    logits = lowering.trace.logits
    assert logits is not None
    lowering.spaces[logits.buffer] = Space.LOGITS
    units = without_copies(lowering.units, lowering.spaces, set())
    units = with_patterns(units, set(lowering.spaces))
    return [unit.code.name for unit in units if isinstance(unit, Instruction)]


@pytest.mark.parametrize(
    ("function", "codes"),
    [
        (lambda x: rms(heads(x)) * W[0, :12], ["NORM"]),
        (lambda x: W[0, :12] * rms(heads(x)), ["NORM"]),
        (lambda x: rms(x).tanh(), ["NORM", "TANH"]),
        (lambda x: heads(x).softmax(-1), ["SOFTMAX"]),
        (rotated, ["ROTATE"]),
        # Not of these: what lies between is read, too, or other numbers are summed.
        (read_between, None),
        (lambda x: heads(x).softmax(1), None),
        (lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) * 0.5 + 1e-6), None),
        (lambda x: x.exp() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), None),
    ],
)
@torch.inference_mode()
def test_norms_softmax_and_rotations_are_one_instruction(
    function: Function, codes: list[str] | None
) -> None:
    found = codes_of(function)
    if codes is None:
        assert not {"NORM", "SOFTMAX", "ROTATE"} & {*found}
    else:
        assert [each for each in found if each != "COPY"] == codes
    rows = torch.randn(ROWS, WIDTH)
    actual, expected = ran(function, rows)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=20)
@given(
    st.integers(1, 5), st.sampled_from([1, 31, 70]), st.sampled_from([1, 16, 37]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_rows_times_matrices_that_they_choose(
    count: int, outputs: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(4, outputs, columns, generator=generator)
    wide = torch.randn(count * columns, WIDTH, generator=generator)

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, wide).view(count, columns), x.view(12, 4)[:count].argmax(-1)

    def function(x: Tensor) -> Tensor:
        rows, ids = parts(x)
        return torch.einsum("rnk,rk->rn", matrices[ids], rows)

    def recorded(recorder: Recorder, x: Tensor) -> Tensor:
        rows, ids = parts(x)
        out = torch.zeros(count, outputs)
        recorder.record("selected_projection", (matrices, rows, ids), {}, [out])
        return out

    rows = torch.randn(ROWS, WIDTH, generator=generator)
    actual, expected = ran(function, rows, recorded)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-4)
    alone, _ = ran(function, rows[:1], recorded)
    assert torch.equal(alone[0], actual[0])


@given(st.data(), st.integers(0, 2**31))
def test_operations_in_a_row_share_memory(data: st.DataObject, seed: int) -> None:
    """Random chains, so that buffers are used again for others."""
    steps = data.draw(st.lists(st.sampled_from([
        lambda x: F.linear(x, W) / 7, lambda x: x + F.silu(x),
        lambda x: rotated(x).reshape(1, 1, -1),
        lambda x: heads(x).softmax(-1).view(1, 1, -1) * 3, changed_in_place, constant_until_written,
        lambda x: x.sort(-1).values, lambda x: heads(x).transpose(1, 2).reshape(1, 1, -1),
    ]), min_size=1, max_size=9))  # fmt: skip

    def chain(x: Tensor) -> Tensor:
        for step in steps:
            x = x * 0.5 + step(x)
        return x

    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    actual, expected = ran(chain, rows)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    alone, _ = ran(chain, rows[:1])
    assert torch.equal(alone[0], actual[0])


MIXES: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda a, b, at: a * 0.5 + b,
    lambda a, b, at: torch.cat([a[..., :at], b[..., at:]], -1),
    lambda a, b, at: torch.cat([a[..., at:] * 0.7, b[..., :at]], -1),
    lambda a, b, at: heads(a).transpose(1, 2).reshape(1, 1, -1) + b,
    lambda a, b, at: heads(a).transpose(1, 2).contiguous().transpose(1, 2).reshape(1, 1, -1),
    lambda a, b, at: torch.cat([heads(a)[..., 6:], heads(b)[..., :6] - 1], -1).view(1, 1, -1),
    lambda a, b, at: a[..., :12].repeat(1, 1, 4) - b,
    lambda a, b, at: F.linear(torch.cat([b[..., at:], a[..., :at]], -1), W / 7),
    lambda a, b, at: a.clone().mul_(b).add_(a),
]  # fmt: skip


def written_into(a: Tensor, b: Tensor, at: int) -> Tensor:
    made = a.clone()
    made[..., at:] = b[..., at:] * 2
    made[..., :at].add_(a[..., :at])
    return made


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**31))
def test_copies_that_are_left_out_change_nothing(data: st.DataObject, seed: int) -> None:
    """Tensors that are cut, joined, turned and written into, each of any that came before."""
    place, kinds = st.integers(0, 9), st.sampled_from([*MIXES, written_into])
    drawn = st.tuples(kinds, place, place, st.integers(1, WIDTH - 1), st.booleans())
    steps = data.draw(st.lists(drawn, min_size=2, max_size=10))

    def mixed(x: Tensor) -> Tensor:
        made = [x * 1.5, x + 0.25]
        for mix, one, other, at, again in steps:
            a, b = made[one % len(made)], made[other % len(made)]
            if again:  # a tensor that others have been made of changes
                a[..., :at].add_(b[..., :at].clone())
            made.append(mix(a, b, at))
        return torch.cat(made, -1) - 0.5

    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    actual, expected = ran(mixed, rows)
    largest = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * max(1.0, largest))
