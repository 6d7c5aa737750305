"""Matrices with a file's own codes, scales and offsets: exact, and multiplied right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels import PlaneMatrix, reference
from kernels.cpu.build import load_library
from kernels.cpu.experts import NativePlanes
from kernels.planes import PlaneFormat, PlaneLayout, dequantize, unpack
from kernels.scales import GroupScales
from tests.kernels.file_cases import (
    FILE_FORMATS,
    first_planes,
    formats,
    make_file_layer,
    make_file_matrix,
    rounded_rows,
)
from tests.kernels.kernel_cases import TARGET_PARAMS
from tests.kernels.plane_cases import Expected

Q2_K, Q3_K = PlaneFormat(16, 2, "super-nibbles"), PlaneFormat(16, 3, "super")
Q4_K, Q6_K = PlaneFormat(32, 4, "super-offset"), PlaneFormat(16, 6, "super")
Q8_0, AWQ = PlaneFormat(32, 8, "centred"), PlaneFormat(128, 4, "offset")


@pytest.fixture(scope="module", params=TARGET_PARAMS)
def native(request: pytest.FixtureRequest) -> NativePlanes:
    return NativePlanes(load_library((request.param,)))


@given(st.integers(1, 40), st.integers(1, 600), formats, st.integers(0, 2**31))
def test_every_prefix_stands_for_the_middle_of_its_codes(
    rows: int, columns: int, format: PlaneFormat, seed: int
) -> None:
    matrix, weights = make_file_matrix(rows, columns, format, np.random.default_rng(seed))
    assert torch.equal(unpack(matrix.planes, matrix.layout), torch.from_numpy(weights.codes_NK))
    assert matrix.bits == format.bits
    for planes in range(1, len(matrix.planes) + 1):
        own = first_planes(matrix, planes)
        expected = weights.at(format, planes)
        found = dequantize(own.planes, own.scales, own.layout).double().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        assert own.layout.nbytes(own.bits) == sum(
            blob.numel() for blob in (*own.planes, own.scales)
        )


@given(
    tokens=st.sampled_from((0, 1, 2, 5, 8, 9, 33)),
    rows=st.integers(1, 300),
    columns=st.integers(1, 600),
    format=formats,
    seed=st.integers(0, 2**31),
)
@example(tokens=33, rows=40, columns=1000, format=Q2_K, seed=0)
@example(tokens=33, rows=40, columns=1000, format=Q3_K, seed=0)
@example(tokens=33, rows=40, columns=1024, format=Q4_K, seed=0)
@example(tokens=33, rows=40, columns=1024, format=Q6_K, seed=0)
@example(tokens=33, rows=40, columns=1000, format=Q8_0, seed=0)
@example(tokens=33, rows=40, columns=1000, format=AWQ, seed=0)
def test_linear_equals_the_float64_oracle_and_does_not_mix_rows(
    native: NativePlanes, tokens: int, rows: int, columns: int, format: PlaneFormat, seed: int
) -> None:
    random = np.random.default_rng(seed)
    whole, weights = make_file_matrix(rows, columns, format, random)
    x = torch.from_numpy(random.normal(size=(tokens, columns)).astype(np.float32))
    for planes in range(1, len(whole.planes) + 1):
        matrix = first_planes(whole, planes)
        expected = Expected(rounded_rows(x) @ weights.at(format, planes).T, np.zeros(tokens))
        actual = native.linear(x, matrix)
        expected.check(actual)
        expected.check(reference.linear_forward(x, matrix))
        for t in range(tokens):
            assert torch.equal(native.linear(x[t : t + 1], matrix)[0], actual[t])


@pytest.mark.parametrize(
    ("first", "second", "planes"),
    [(Q4_K, Q6_K, 2), (Q4_K, Q6_K, 1), (Q6_K, Q4_K, 2), (Q4_K, PlaneFormat(), 4), (Q8_0, Q2_K, 2)],
)
def test_experts_with_a_format_for_each_projection(
    native: NativePlanes, first: PlaneFormat, second: PlaneFormat, planes: int
) -> None:
    if second == PlaneFormat():
        pytest.skip("symmetric")
    case = make_file_layer(first, second, planes=planes)
    experts, tokens = case.experts, 40
    hidden = torch.randn(tokens, experts.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(tokens)[:, None] % 3
    weights = torch.ones(tokens, 1)
    together = native.experts(hidden, ids, weights, experts)
    expected = np.stack([case.output(hidden[t], t % 3) for t in range(tokens)])
    scale = np.abs(expected).max()
    # An inner activation that rounds the other way changes a code by one.
    assert np.abs(together.numpy() - expected).max() < 1e-2 * scale
    assert np.median(np.abs(together.numpy() - expected)) < 1e-5 * scale
    slow = reference.experts_forward(hidden, ids, weights, experts)
    assert np.median((slow - together).abs().numpy()) < 1e-5 * scale
    for t in range(tokens):
        alone = native.experts(hidden[t : t + 1], ids[t : t + 1], weights[:1], experts)
        assert torch.equal(alone[0], together[t])
    kept = replace(experts, row_bits=24)
    together = native.experts(hidden, ids, weights, kept)
    exact = reference.experts_forward(hidden, ids, weights, kept)
    torch.testing.assert_close(together, exact, rtol=0, atol=1e-5 * scale)
    for t in range(0, tokens, 13):
        alone = native.experts(hidden[t : t + 1], ids[t : t + 1], weights[:1], kept)
        assert torch.equal(alone[0], together[t])


@pytest.mark.usefixtures("one_thread")
def test_threads_do_not_change_bits(native: NativePlanes) -> None:
    matrix, _ = make_file_matrix(900, 512, Q4_K, np.random.default_rng(0))
    x = torch.randn(30, 512, generator=torch.Generator().manual_seed(0))
    alone = native.linear(x, matrix)
    torch.set_num_threads(3)
    assert torch.equal(native.linear(x, matrix), alone)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="group size must be 16, 32, 64 or 128, got 48"):
        PlaneLayout(16, 64, 48, 4, "offset")
    with pytest.raises(ValueError, match="codes with offset scales cannot have 7 bits"):
        PlaneLayout(16, 64, 32, 7, "offset")
    with pytest.raises(ValueError, match="codes with symmetric scales cannot have 4 bits"):
        PlaneLayout(16, 64, 32, 4)
    with pytest.raises(ValueError, match=r"scales are symmetric, centred, .*, got odd"):
        PlaneLayout(16, 64, 32, 4, "odd")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_planes_are_made_where_the_codes_are(name: str) -> None:
    """On meta: a step in main memory would be refused."""
    matrix, _ = make_file_matrix(40, 300, FILE_FORMATS[name], np.random.default_rng(0))
    layout, kind = matrix.layout, matrix.layout.scales
    kinds = {"fp8": torch.float32, "super": torch.int8, "centred": torch.half, "offset": torch.half}
    scale = torch.ones(40, layout.num_groups, dtype=kinds.get(kind, torch.uint8))
    outer = torch.ones(40, 2, dtype=torch.half) if kind.startswith("super") else None
    both = kind in ("offset", "super-offset", "super-nibbles")
    inner_least, outer_least = (scale, outer) if both else (None, None)
    scales = GroupScales(scale, inner_least, outer, outer_least).to(torch.device("meta"))
    codes = torch.empty(40, 300, dtype=torch.uint8, device="meta")
    for arranged in (layout, replace(layout, arrangement="cuda")):
        own = PlaneMatrix.of_file(codes, scales, arranged)
        assert own.scales.is_meta
        assert own.scales.shape == matrix.scales.shape
        assert [plane.shape for plane in own.planes] == [plane.shape for plane in matrix.planes]
