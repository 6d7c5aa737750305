"""A layer whose experts arrive while it is computed gives the bits of one that has them all."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ExpertWeights, experts_forward
from kernels.cpu import NativeKernels, choose_kernel
from kernels.cpu.streaming import LayerBuffers
from offload.readers.direct_io import DirectFiles
from offload.readers.native import NativeReader
from offload.transfer import Read
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import make_layer

EXPERTS, TOP_K, HIDDEN, WIDTH = 9, 4, 40, 24


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    kernels, why_not = choose_kernel()
    return kernels or pytest.skip(why_not)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arriving")


def blobs(layer: object, slot: int) -> list[Tensor]:
    """All memory of a slot, as bytes."""
    if isinstance(layer, ExpertWeights):
        found = [layer.gate_up_EGH[slot], layer.down_EHF[slot]]
    else:
        found = [*layer.planes[slot], layer.scales[slot]]  # type: ignore[attr-defined]
    return [blob.reshape(-1).view(torch.uint8) for blob in found]


@given(seed=st.integers(0, 2**31), quantized=st.booleans(), broken=st.integers(0, 3))
@torch.inference_mode()
def test_experts_that_come_late_give_the_same_bits(
    seed: int, quantized: bool, broken: int, native: NativeKernels, folder: Path
) -> None:
    torch.manual_seed(seed)
    random, tokens = Random(seed), Random(seed).choice([1, 1, 3])
    sizes = (tokens, EXPERTS, TOP_K, HIDDEN, WIDTH)
    case = make_layer(*sizes, 32, seed=seed) if quantized else make_case(*sizes, torch.float32)
    slots, hidden, weights = case.experts, case.hidden.float(), case.weights
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K].sort().values for _ in range(tokens)])
    ids[random.randrange(tokens), TOP_K - 1] = -1
    where = torch.randperm(EXPERTS)  # slots are not experts
    expected = experts_forward(hidden, torch.where(ids < 0, -1, where[ids]), weights, slots)
    wanted = sorted(set(ids.flatten().tolist()) - {-1})
    late = {expert for expert in wanted if random.random() < 0.6}
    path = folder / "experts.bin"
    reader = NativeReader("r", native, DirectFiles(), threads=0)
    places = {expert: blobs(slots, int(where[expert])) for expert in sorted(late)}
    fd, at, asked = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 0, {}
    for expert, parts in places.items():
        reads = []
        for place in parts:
            os.write(fd, place.numpy().tobytes())
            place.zero_()
            reads.append(Read(fd, path, at, place))
            at += len(place)
        asked[expert] = reader.submit(reads, urgent=True)
    fails = broken == 0 and bool(late)
    if fails:
        os.truncate(path, at - 1)
    how = native.layer_call(hidden, slots)
    assert how is not None
    told = [(e, int(where[e]), asked[e].record if e in late else None) for e in wanted]
    out = torch.full_like(hidden, torch.nan)
    rows = LayerBuffers.of(hidden, ids, weights, out)
    call = native.arriving(how, slots, rows, told, reader.reads, 0.0)
    first = wanted.index(min(late)) if late else None
    assert call.run() == first  # which is late
    assert call.calls == (first is None or first > 0)
    reader.reads.start(2)
    for job in asked.values():
        while not job.done:
            reader.reads.wait(job.record, 1.0)
    assert call.run() == (wanted.index(max(late)) if fails else None)
    if not fails:
        assert torch.equal(out, expected)
        assert call.run() is None  # nothing is added twice
        assert torch.equal(out, expected)
    reader.close()
    os.close(fd)
