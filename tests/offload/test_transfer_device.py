"""Copies to a device: in batches, after their source, and none that was cancelled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.device_copy import DeviceCopier
from offload.errors import OffloadError


class Source:
    """A transfer that ends when a test says so."""

    def __init__(self) -> None:
        self.done, self.seconds, self.hastened = False, 0.5, False
        self.failed: Exception | None = None

    def wait(self) -> float:
        self.done = True
        if self.failed:
            raise self.failed
        return 0.5

    def cancel(self) -> bool:
        return not self.done

    def hasten(self) -> None:
        self.hastened = True


def rows(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((8,), i + 1, dtype=torch.uint8), torch.zeros(8)) for i in range(count)]


def test_the_first_who_waits_starts_all_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, batched = [], torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        calls.append(len(targets))
        batched(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    copier = DeviceCopier(torch.device("cpu"))
    pairs = [(source, target.to(torch.uint8)) for source, target in rows(4)]
    copies = [copier.copy(source, target) for source, target in pairs]
    assert copies[3].cancel()
    copies[1].wait()
    assert calls == [3]
    assert [copy.done for copy in copies] == [True] * 4
    assert not copies[0].cancel()
    assert [int(target[0]) for _, target in pairs] == [1, 2, 3, 0]
    with pytest.raises(OffloadError, match="cancelled"):
        copies[3].wait()


def test_a_copy_begins_when_its_source_has_come() -> None:
    copier, disk = DeviceCopier(torch.device("cpu")), Source()
    source, target = torch.ones(8), torch.zeros(8)
    copy = copier.copy(source, target, disk)
    copy.hasten()
    assert [disk.hastened, copy.done] == [True, False]
    disk.done = True
    assert [copy.done] == [True]
    assert target.equal(source)
    assert copy.wait() < 60
    assert copy.seconds == 0.5

    late = copier.copy(source * 2, target, other := Source())
    late.wait()
    assert other.done
    assert target.equal(source * 2)


def test_a_source_that_fails_fails_its_copy_only() -> None:
    copier, disk = DeviceCopier(torch.device("cpu")), Source()
    disk.failed = OffloadError("cannot read expert 3")
    target, other = torch.zeros(8), torch.zeros(8)
    bad, good = copier.copy(torch.ones(8), target, disk), copier.copy(torch.ones(8), other)
    with pytest.raises(OffloadError, match="expert 3"):
        bad.wait()
    assert bad.done
    assert bad.failed is disk.failed
    good.wait()
    assert not target.any()
    assert other.all()


def test_a_copy_whose_source_is_being_read_cannot_be_taken_back() -> None:
    copier, disk = DeviceCopier(torch.device("cpu")), Source()
    disk.cancel = lambda: False  # type: ignore[method-assign]
    assert not copier.copy(torch.ones(8), torch.zeros(8), disk).cancel()


@pytest.mark.gpu
def test_on_a_gpu_kernels_see_the_old_bytes_before_and_the_new_ones_after() -> None:
    device = torch.device("cuda")
    copier = DeviceCopier(device)
    sources = [torch.full((1 << 22,), float(i)).pin_memory() for i in range(1, 9)]
    targets = [torch.zeros(1 << 22, device=device) for _ in sources]
    torch.cuda._sleep(50_000_000)
    before = [target.sum() for target in targets]
    copies = [copier.copy(s, t) for s, t in zip(sources, targets, strict=True)]
    for copy in copies:
        copy.wait()
    after = [target.double().mean() for target in targets]
    assert [x.item() for x in before] == [0.0] * 8
    assert [x.item() for x in after] == [float(i) for i in range(1, 9)]
    assert all(copy.done for copy in copies)
