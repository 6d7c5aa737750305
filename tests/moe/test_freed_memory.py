import subprocess
import sys

import pytest

FAULTS = """
import os, resource, sys
import torch
from moe.machine import give_back_freed_memory, keep_freed_memory

def faults(how):
    if how != "given back":
        assert keep_freed_memory()
    torch.ones(1 << 23)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(32):
        torch.ones(1 << 23)  # 32 MB
        if how == "kept for a while":
            give_back_freed_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for how in sys.argv[1:]:
    if os.fork() == 0:
        print(faults(how), flush=True)
        os._exit(0)
    os.wait()
"""


def faults(*how: str) -> list[int]:
    """Of processes that treat freed memory so."""
    run = [sys.executable, "-c", FAULTS, *how]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_kept_blocks_are_used_again_without_page_faults() -> None:
    pages = 8192  # of a block
    kept, given_back, for_a_while = faults("kept", "given back", "kept for a while")
    assert kept < 16 * pages  # the heap is walked through once before it is used again
    assert given_back > 31 * pages
    assert for_a_while > 31 * pages
