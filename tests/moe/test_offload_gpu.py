"""Tiers on a real GPU: TRITON_INTERPRET=0 python -m pytest -m gpu tests/moe/test_offload_gpu.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.manifest import read_manifest
from kernels.triton.language import INTERPRETED
from moe import MoE, SamplingParams
from moe.loading.memory_plan import GIB
from offload.capacity import slot_bytes
from offload.streams import CudaStreams
from tests.moe.test_offload_tiers import PROMPTS, SMALL, tier_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and TRITON_INTERPRET=0"
    ),
]
DEVICE = torch.device("cuda")
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
BYTES = 256 << 20


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, SMALL, device="cuda")


def tiers(store: Path, resident: MoE, slots: int, host_slots: int, pinned: float | None) -> MoE:
    size = slot_bytes(read_manifest(store), 8)
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    memory = SMALL["memory"] | {
        "device_gib": (rest + slots * size + 16) / GIB,
        "host_gib": (host_slots * size + 16) / GIB,
        "pinned_gib": pinned,
    }
    return MoE.from_pretrained(store, SMALL | {"memory": memory}, device="cuda")


def tokens(model: MoE) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("pinned", [None, 0.0])
@pytest.mark.parametrize(("slots", "host_slots"), [(8, 32), (8, 12), (2, 2)])
def test_a_quarter_on_the_gpu_gives_the_bits_of_all(
    store: Path, resident: MoE, slots: int, host_slots: int, pinned: float | None
) -> None:
    model = tiers(store, resident, slots, host_slots, pinned)
    assert list(model.status()["offload"]["tiers"].values()) == [slots, host_slots]
    assert tokens(model) == tokens(resident)
    assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))
    assert tier_of(model, "host")["hits"] > 0
    model.close()


@pytest.fixture
def streams() -> CudaStreams:
    return CudaStreams(DEVICE)


@pytest.fixture
def pinned(streams: CudaStreams) -> Any:
    memory = torch.zeros(BYTES + 4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][:BYTES]
    assert streams.pin(memory)  # which torch's `is_pinned` does not see
    yield memory
    torch.cuda.synchronize()
    streams.unpin(memory)


def busy(matrix: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        matrix = matrix @ matrix
    return matrix


def test_copies_run_beside_kernels(streams: CudaStreams, pinned: torch.Tensor) -> None:
    target, matrix = torch.empty_like(pinned, device=DEVICE), torch.zeros(4096, 4096, device=DEVICE)

    def seconds(count: int, copy: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        event = (
            streams.copy([(pinned, target)], streams.record_event())
            if copy
            else streams.record_event()
        )
        asked = time.perf_counter() - start
        busy(matrix, count)
        event.synchronize()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        assert not copy or asked < taken / 2, "the host waited for the copy"
        return taken

    seconds(1, True)
    alone = min(seconds(0, True) for _ in range(3))
    count = max(1, round(alone / min(seconds(1, False) for _ in range(3))))
    kernels = min(seconds(count, False) for _ in range(3))
    assert min(seconds(count, True) for _ in range(3)) < 0.8 * (alone + kernels)


def test_kernels_wait_for_copies_and_copies_for_kernels(
    streams: CudaStreams, pinned: torch.Tensor
) -> None:
    target = torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE)
    matrix = torch.zeros(4096, 4096, device=DEVICE)
    for value in range(1, 6):
        busy(matrix, 20)
        before = target.clone()  # reads the old bytes, behind the kernels
        pinned.fill_(value)
        event = streams.copy([(pinned, target)], streams.record_event())
        delay = streams.wait_event(event)
        after = target.clone()
        event.synchronize()
        torch.cuda.synchronize()
        assert bool((before == value - 1).all())
        assert bool((after == value).all())
        waited = delay()
        assert waited is not None
        assert waited > 0


def test_what_cannot_be_pinned_is_said_and_nothing_else_fails(streams: CudaStreams) -> None:
    nowhere = torch.empty(0, dtype=torch.uint8)
    assert not streams.pin(nowhere)
    assert torch.ones(4, device=DEVICE).sum().item() == 4
