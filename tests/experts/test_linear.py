"""`QuantizedLinear` stands where a linear layer stood."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.linear import QuantizedLinear
from kernels.planes import quantize


@pytest.mark.parametrize("shape", [(5, 70), (2, 3, 70), (0, 70), (70,)])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_close_for_any_leading_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(70, 33, bias=bias)
    x = torch.randn(shape)
    expected = linear(x)
    got = QuantizedLinear.of(linear, 32, 8)(x)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if got.numel():
        assert (got - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_weight_can_be_read_and_made_whole(bits: int) -> None:
    linear = nn.Linear(64, 20)
    quantized = QuantizedLinear.of(linear, 64, bits)
    assert quantized.bits == quantized.matrix.bits == bits
    assert quantized.reads == 0
    weight = quantized.weight
    assert quantized.reads == 1
    whole = quantized.whole()
    assert type(whole) is nn.Linear
    assert torch.equal(whole.weight, weight)
    assert whole.bias is linear.bias
    x = torch.randn(4, 64)
    assert (whole(x) - quantized(x)).abs().max() < 0.02 * whole(x).abs().max()
    if bits == 8:
        codes, scales = quantize(linear.weight.detach(), 64)
        assert torch.equal(weight, (codes.float() - 136) * scales.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_weight_is_read_in_the_dtype_of_the_model_around_it(dtype: torch.dtype) -> None:
    """Jamba multiplies by a weight itself."""
    quantized = QuantizedLinear.of(nn.Linear(64, 20, bias=False), 64, 8, dtype)
    x = torch.randn(4, 64, dtype=dtype)
    expected = quantized(x)
    assert (x @ quantized.weight.T - expected).abs().max() < 0.05
    assert quantized.whole()(x).dtype == expected.dtype == dtype


def test_its_state_can_be_read_into_one_made_on_meta() -> None:
    linear = nn.Linear(40, 20)
    quantized = QuantizedLinear.of(linear, 32, 4)
    assert list(quantized.state_dict()) == ["bias", "plane0", "plane1", "plane2", "scales"]
    empty = QuantizedLinear.of(nn.Linear(40, 20, device="meta"), 32, 4)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.load_state_dict(quantized.state_dict(), assign=True)
    x = torch.randn(3, 40)
    assert torch.equal(empty(x), quantized(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_quantized_in_pieces_are_those_quantized_at_once(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(200, 133)
    whole = QuantizedLinear.of(linear, 64, bits).state_dict()
    monkeypatch.setattr("experts.linear._PIECE_ROWS", 32)
    pieces = QuantizedLinear.of(linear, 64, bits).state_dict()
    assert all(torch.equal(own, pieces[name]) for name, own in whole.items())
