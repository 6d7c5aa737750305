"""Kept memory of large temporaries: no page faults, within the bound, never anyone else's data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each runs in a process of its own: the allocator of a process cannot be taken out again.
_PREAMBLE = """
import gc, os, resource, threading, torch
from kernels.memory import block_counts, fresh_pages, keep_blocks
MIB = 2**20
class Owner: pass
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def tensor(mib, value=1): return torch.full((mib * MIB,), value, dtype=torch.uint8)
torch.set_num_threads(1)
"""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + code],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _only_where_it_can_be_built() -> None:
    reason = _run("print(keep_blocks(Owner(), MIB))").strip()
    if reason != "None":
        pytest.skip(reason)


def test_blocks_are_reused_without_page_faults_in_any_thread() -> None:
    _run("""
owner = Owner()
assert keep_blocks(owner, 256 * MIB) is None
def work():
    for mib in (40, 7, 1, 40):
        tensor(mib)
def in_thread(job):
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
work()
before = block_counts()
counted = faults()
for _ in range(10):
    work()
    in_thread(work)
assert faults() - counted < 200, faults() - counted  # of threads' stacks; the tensors have 22,000
assert block_counts().misses == before.misses
assert block_counts().hits == before.hits + 80
""")


def test_the_bound_holds_and_the_oldest_blocks_go_first() -> None:
    _run("""
owner = Owner()
keep_blocks(owner, 32 * MIB)
for mib in (4, 8, 16, 24):
    tensor(mib)
    counts = block_counts()
    assert counts.used_bytes == 0 and counts.kept_bytes <= counts.bound_bytes == 32 * MIB
assert block_counts().kept_bytes == 24 * MIB  # 16 + 24 would be too many
large, small = tensor(24), tensor(4)
assert block_counts().hits == 1
assert block_counts().kept_bytes == 0 and block_counts().used_bytes == 28 * MIB
tensor(40)  # larger than the bound: served, not kept
assert block_counts().kept_bytes == 0
del large, small
assert block_counts().kept_bytes == 28 * MIB and block_counts().used_bytes == 0
tensor(8)  # 36 would be too many: the block of 24 was given back first
assert block_counts().kept_bytes == 12 * MIB
""")


def test_what_is_kept_goes_when_its_owners_go() -> None:
    _run("""
first, second = Owner(), Owner()
keep_blocks(first, 64 * MIB)
keep_blocks(second, 32 * MIB)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
survivor = tensor(8, 7)
before = resident()
tensor(48), tensor(20)
assert block_counts().bound_bytes == 96 * MIB and block_counts().kept_bytes == 68 * MIB
del first
gc.collect()
assert block_counts().bound_bytes == 32 * MIB and block_counts().kept_bytes <= 24 * MIB
del second
gc.collect()
assert block_counts().kept_bytes == 0 and resident() - before < 2 * MIB
assert (survivor == 7).all()
misses = block_counts().misses
tensor(48)  # as if there were no such allocator
assert block_counts().misses == misses
del survivor
assert block_counts().used_bytes == 0
""")


def test_threads_never_share_a_block() -> None:
    _run("""
owner = Owner()
keep_blocks(owner, 24 * MIB)
wrong = []
def work(number):
    held = []
    for turn in range(150):
        mine = torch.full((MIB + 70_000 * (turn * number % 23),), number, dtype=torch.uint8)
        held = [*held[-2:], mine]
        if turn % 3 == 0 and not all((one == number).all() for one in held):
            wrong.append(number)
threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
counts = block_counts()
assert counts.used_bytes == 0 and 0 < counts.kept_bytes <= counts.bound_bytes and counts.hits > 0
""")


def test_the_rest_of_torch_works_as_before() -> None:
    _run("""
owner = Owner()
early = tensor(4, 3)
keep_blocks(owner, 64 * MIB)
array = tensor(4, 5).numpy()  # outlives its tensor
storage = tensor(2, 6).untyped_storage()
storage.resize_(6 * MIB)
assert bytes(storage[: 2 * MIB]) == bytes([6]) * (2 * MIB)
shared = tensor(2, 9).share_memory_()
lazy = torch._lazy_clone(tensor(3, 4))
lazy[0] = 1
assert (lazy[1:] == 4).all() and lazy.data_ptr() % 64 == 0
del early
tensor(4, 1)
assert (array == 5).all() and (shared == 9).all()
assert torch.empty(0).data_ptr() == 0
assert torch.zeros(3 * MIB).sum() == 0
try:
    torch.empty(2**50, dtype=torch.uint8)
except RuntimeError as error:
    assert "can't allocate memory" in str(error), error
else:
    raise AssertionError
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
    keep = torch.empty(5 * MIB, dtype=torch.uint8)
assert any(event.self_cpu_memory_usage == 5 * MIB for event in measured.key_averages())
if (child := os.fork()) == 0:
    os._exit(0 if (tensor(4, 2) == 2).all() else 1)
assert os.waitpid(child, 0)[1] == 0
""")


def test_fresh_pages_take_memory_as_they_are_written() -> None:
    _run("""
owner = Owner()
keep_blocks(owner, 64 * MIB)
tensor(32)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
with fresh_pages():
    buffer = torch.empty(32 * MIB, dtype=torch.uint8)
buffer[::MIB] = 1
assert block_counts().kept_bytes == 32 * MIB and block_counts().used_bytes == 0
assert resident() - before < 4 * MIB
""")


def test_without_a_compiler_nothing_is_kept_and_the_reason_is_given(tmp_path: Path) -> None:
    out = _run(
        """
owner = Owner()
print(keep_blocks(owner, MIB))
with fresh_pages():
    tensor(2)
print(block_counts().hits + block_counts().misses)
""",
        XDG_CACHE_HOME=str(tmp_path),
        CXX="/bin/false",
    )
    assert out.splitlines() == ["`/bin/false --version` exited with 1: no message", "0"]
