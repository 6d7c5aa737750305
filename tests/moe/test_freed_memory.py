import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from moe.freed_memory import give_back_freed_memory, keep_freed_memory

if sys.argv[1] != "given back":
    assert keep_freed_memory()
torch.ones(1 << 23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    torch.ones(1 << 23)  # 32 MB
    if sys.argv[1] == "kept for a while":
        give_back_freed_memory()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_kept_blocks_are_used_again_without_page_faults() -> None:
    pages = 8192  # of a block
    assert faults("kept") < 16 * pages  # the heap is walked through once before it is used again
    assert faults("given back") > 31 * pages
    assert faults("kept for a while") > 31 * pages
