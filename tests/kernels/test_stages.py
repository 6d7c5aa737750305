"""Limits of the machine, the time of compiled calls by stage, and threads without processors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen

import pytest
import torch

from kernels.cpu import choose_kernel
from kernels.cpu.limits import measure_limits
from kernels.cpu.stages import Stage, measured_stages
from kernels.planes import PlaneLayout, PlaneMatrix, pack, pack_scales, quantize
from kernels.reference import ExpertWeights


def random_matrix(rows: int, columns: int, planes: int) -> PlaneMatrix:
    layout = PlaneLayout(rows, columns, 64)
    codes, scales = quantize(torch.randn(rows, columns), 64)
    return PlaneMatrix(layout, pack(codes, layout)[:planes], pack_scales(scales, layout))


def test_limits_are_those_of_a_machine() -> None:
    limits = measure_limits()
    assert 1e8 < limits.bytes < 1e13
    assert 1e8 < limits.products < 1e16


@pytest.mark.parametrize("planes", [1, 3, 4])
def test_a_linear_layer_reads_its_planes_and_scales_once(planes: int) -> None:
    kernels, _ = choose_kernel()
    assert kernels is not None
    matrix = random_matrix(96, 256, planes)
    with measured_stages() as stages:
        start = time.perf_counter()
        for _ in range(3):
            kernels.planes.linear(torch.randn(2, 256), matrix)
        elapsed = time.perf_counter() - start
        found = stages()
    assert set(found) == {Stage.LINEAR}
    stage = found[Stage.LINEAR]
    nbytes = sum(plane.numel() for plane in matrix.planes) + 2 * matrix.scales.numel()
    assert stage.bytes == 3 * nbytes
    assert stage.runs == 6  # rows are quantised, then multiplied
    assert 0 < stage.busy <= stage.seconds <= elapsed


def test_experts_count_the_weights_of_those_that_are_used() -> None:
    kernels, _ = choose_kernel()
    assert kernels is not None
    experts = ExpertWeights(torch.randn(4, 32, 16), torch.randn(4, 16, 32), torch.relu)
    ids, weights = torch.tensor([[1, 3], [3, 1]]), torch.ones(2, 2)
    with measured_stages() as stages:
        kernels.whole.experts(torch.randn(2, 16), ids, weights, experts)
        found = stages()
    assert found[Stage.EXPERT_FIRST].bytes == 2 * 32 * 16 * 4
    assert found[Stage.EXPERT_SECOND].bytes == 2 * 16 * 32 * 4
    assert found[Stage.EXPERT_SUM].runs == 1


def test_a_new_measurement_begins_at_zero_and_others_are_not_counted() -> None:
    kernels, _ = choose_kernel()
    assert kernels is not None
    matrix = random_matrix(32, 64, 4)
    with measured_stages():
        kernels.planes.linear(torch.randn(1, 64), matrix)
    kernels.planes.linear(torch.randn(1, 64), matrix)
    with measured_stages() as stages:
        assert stages() == {}


@contextmanager
def on_one_processor() -> Iterator[None]:
    """All threads of this process, of which some may end meanwhile."""

    def pin(processors: set[int]) -> None:
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), processors)

    before = os.sched_getaffinity(0)
    pin({min(before)})
    try:
        yield
    finally:
        pin(before)


@pytest.mark.usefixtures("one_thread")
def test_threads_that_wait_for_a_processor_are_left_out() -> None:
    """Beside a busy process, each call of two threads would else wait for a time slice."""
    kernels, _ = choose_kernel()
    assert kernels is not None
    matrix, x = random_matrix(512, 256, 3), torch.randn(2, 256)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        for _ in range(200):
            kernels.planes.linear(x, matrix)
        return time.perf_counter() - start

    seconds(2)  # starts the threads
    with on_one_processor(), Popen(["sh", "-c", "while :; do :; done"]) as busy:
        try:
            alone = seconds(1)
            together = [seconds(2) for _ in range(3)]
        finally:
            busy.kill()
    assert min(together) < 5 * alone + 0.1  # else about 3 s
