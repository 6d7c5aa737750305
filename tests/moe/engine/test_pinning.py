"""`engine.pin_threads`: where the threads of a step run, and that this changes no token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import choose_kernel
from moe import MoE, SamplingParams
from moe.engine.pinning import pinned_cpus
from moe.settings import EngineSettings, Profile

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")
CPU = torch.device("cpu")
PINNED = Profile(engine=EngineSettings(pin_threads=True))

SEEN = """
import os, threading
import moe, torch
from moe.engine.pinning import PinnedThreads

def places():
    return [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]

usable = os.sched_getaffinity(0)
cpus = sorted(usable)[:2]
pinned = PinnedThreads(cpus)
for _ in range(2):
    with pinned:
        assert os.sched_getaffinity(0) == {cpus[0]}, "the caller"
        assert {cpus[1]} in places(), "its team"
    assert os.sched_getaffinity(0) == usable, "free again"

def elsewhere():
    with pinned:
        seen.append((os.sched_getaffinity(0), places().count({cpus[1]})))
seen = []
other = threading.Thread(target=elsewhere)
other.start()
other.join()
assert seen == [({cpus[0]}, 2)], "each calling thread has a team"
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_caller_stays_while_it_computes_and_its_team_for_good() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_pinned_unless_asked_for() -> None:
    assert pinned_cpus(Profile(), CPU) == ((), "")


def test_each_thread_has_a_physical_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [frozenset({2, 6}), frozenset({3, 7}), frozenset({5})]
    monkeypatch.setattr("moe.engine.pinning.physical_cores", lambda: cores)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert pinned_cpus(PINNED, CPU) == ([2, 3, 5], "")
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert pinned_cpus(PINNED, CPU) == (
        (),
        "there are 4 threads, and this process may use 3 physical cores; set threads to 3 or less",
    )
    monkeypatch.setattr("moe.engine.pinning.physical_cores", list)
    assert pinned_cpus(PINNED, CPU) == ((), "this system does not let threads choose CPUs")
    assert pinned_cpus(PINNED, torch.device("cuda")) == ((), "the model runs on a GPU")


def test_tokens_are_the_same_and_a_notice_says_why_nothing_is_pinned(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(*, pin: bool) -> tuple[list[int], list[str]]:
        model = MoE.from_pretrained(store, engine={"pin_threads": pin})
        made = model.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0))[0]
        return made.token_ids, [line for line in model.notices if "pin_threads" in line]

    free, none = tokens(pin=False)
    assert tokens(pin=True) == (free, none)
    assert none == []
    monkeypatch.setattr("moe.engine.pinning.physical_cores", list)
    assert tokens(pin=True)[1] == [
        "engine.pin_threads changes nothing: this system does not let threads choose CPUs"
    ]
