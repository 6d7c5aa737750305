"""Facts about the machine, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moe import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"}
CGROUP = "sys/fs/cgroup"
LIMITS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {"memory_total": 1024_000, "memory_available": 819_200, "cpu_quota": None}),
    (  # version 2; the tighter limit is the parent's
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{CGROUP}/a/b/memory.max": "max\n",
            f"{CGROUP}/a/b/cpu.max": "max 100000\n",
            f"{CGROUP}/a/memory.max": "500000\n",
            f"{CGROUP}/a/memory.current": "450000\n",
            f"{CGROUP}/a/memory.stat": "anon 1\ninactive_file 20000\n",
            f"{CGROUP}/a/cpu.max": "150000 100000\n",
        },
        {"memory_total": 500_000, "memory_available": 70_000, "cpu_quota": 1.5},
    ),
    (  # version 1; no limit is a huge number, -1 no quota
        {
            "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/x\n0::/\n",
            f"{CGROUP}/memory/x/memory.limit_in_bytes": "400000\n",
            f"{CGROUP}/memory/x/memory.usage_in_bytes": "100000\n",
            f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{CGROUP}/cpu/x/cpu.cfs_quota_us": "-1\n",
            f"{CGROUP}/cpu/x/cpu.cfs_period_us": "100000\n",
            f"{CGROUP}/cpu/cpu.cfs_quota_us": "200000\n",
            f"{CGROUP}/cpu/cpu.cfs_period_us": "100000\n",
        },
        {"memory_total": 400_000, "memory_available": 300_000, "cpu_quota": 2.0},
    ),
    (  # in a container the host's path is not visible
        {"proc/self/cgroup": "0::/docker/1\n", f"{CGROUP}/memory.max": "300000\n"},
        {"memory_total": 300_000, "memory_available": 819_200, "cpu_quota": None},
    ),
]


@pytest.mark.parametrize(("files", "expected"), LIMITS)
def test_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], expected: dict[str, Any]
) -> None:
    root = tree(tmp_path, MEMINFO | files)
    assert {name: getattr(machine, name)(root) for name in expected} == expected


def test_instruction_sets(tmp_path: Path) -> None:
    flags = "flags\t\t: fpu avx2 avx512f amx_tile amx_int8\n\nflags : avx2\n"
    cpuinfo = f"vendor_id\t: AuthenticAMD\nmodel name: x\n{flags}"
    root = tree(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert machine.instruction_sets(root) == ["AVX2", "AVX-512F", "AMX"]
    assert machine.cpu_maker(root) == "AuthenticAMD"


def test_memory_nodes_are_those_of_usable_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5, 9, 12})
    lists = {0: "0-3,8-11\n", 2: "4\n", 10: "12-15\n", 9: "\n", 1: "5"}
    folder = "sys/devices/system/node"
    root = tree(tmp_path, {f"{folder}/node{at}/cpulist": text for at, text in lists.items()})
    assert machine.memory_nodes(root) == [{0, 1, 9}, {5}, {12}]
    assert machine.memory_nodes(tmp_path / "nothing") == [{0, 1, 5, 9, 12}]


SPREAD = """
import ctypes, platform, sys, threading
from pathlib import Path
from moe import machine

get = machine._MEMORY_POLICY_CALLS[platform.machine()][1]
system = ctypes.CDLL(None)

def policy():
    mode, words = ctypes.c_int(), (ctypes.c_ulong * 16)()
    if system.syscall(get, ctypes.byref(mode), words, 1024, None, 0) != 0:
        sys.exit(77)  # containers may forbid it
    return mode.value, words[0]

assert policy() == (0, 0)
spread = machine.spread_memory(Path(sys.argv[1]))
seen = [policy()]
other = threading.Thread(target=lambda: seen.append(policy()))
other.start()
other.join()
assert machine.spread_memory(Path(sys.argv[1])) == spread
print(spread, *(mode for mode, _ in seen), seen[0][1] & 1)
"""


KEEPS = """
import ctypes, platform, sys
from pathlib import Path
from moe import machine

set_policy, get_policy = machine._MEMORY_POLICY_CALLS[platform.machine()]
system, mode, node = ctypes.CDLL(None), ctypes.c_int(), ctypes.c_ulong(1)
if system.syscall(set_policy, 2, ctypes.byref(node), 65) != 0:  # numactl --membind=0
    sys.exit(77)
spread = machine.spread_memory(Path(sys.argv[1]))
assert system.syscall(get_policy, ctypes.byref(mode), None, 0, None, 0) == 0
print(spread, mode.value)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="memory policies are Linux's")
@pytest.mark.parametrize(
    ("code", "nodes", "expected"),
    [
        (SPREAD, {0: "0-4095"}, "False 0 0 0"),
        (SPREAD, {0: "0-4095", 1: "0-4095", 70: ""}, "True 3 3 1"),
        (KEEPS, {0: "0-4095", 1: "0-4095"}, "False 2"),
    ],
)
def test_memory_comes_from_all_nodes_in_turn(
    tmp_path: Path, code: str, nodes: dict[int, str], expected: str
) -> None:
    """Of made-up nodes the kernel leaves those out that this machine does not have."""
    folder = "sys/devices/system/node"
    root = tree(tmp_path, {f"{folder}/node{at}/cpulist": text for at, text in nodes.items()})
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this container forbids memory policies")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


def cores_of(root: Path, siblings: dict[str, str]) -> list[frozenset[int]]:
    """Of a made-up machine: CPUs -> what each of them says of its siblings; node -> its CPUs."""
    cpus, nodes = "sys/devices/system/cpu", "sys/devices/system/node"
    files = {}
    for own, text in siblings.items():
        if own.startswith("node"):
            files[f"{nodes}/{own}/cpulist"] = text
        else:
            files[f"{cpus}/cpu{own}/topology/thread_siblings_list"] = text
    return machine.physical_cores(tree(root, files))


SMT = {
    "0": "0,4",
    "1": "1,5",
    "2": "2,6",
    "3": "3,7",
    "4": "0,4",
    "5": "1,5",
    "6": "2,6",
    "7": "3,7",
}
TWO_NODES = {"node0": "0,2,4,6\n", "node1": "1,3,5,7\n"}


@pytest.mark.parametrize(
    ("usable", "siblings", "expected"),
    [
        (range(8), SMT, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (range(8), SMT | TWO_NODES, [{0, 4}, {2, 6}, {1, 5}, {3, 7}]),
        ([1, 2, 3, 5, 6, 7], SMT, [{1, 5}, {2, 6}, {3, 7}]),  # a cpuset without core 0
        ([4, 5], SMT, [{4}, {5}]),  # one of two siblings each
        ([0, 1, 2, 4], SMT | {"1": "1", "2": "2"}, [{0, 4}, {1}, {2}]),  # 5 and 6 are offline
        ([0, 3], {}, [{0}, {3}]),  # no topology
    ],
)
def test_physical_cores_are_those_of_usable_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usable: Iterable[int],
    siblings: dict[str, str],
    expected: list[set[int]],
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(usable))
    assert cores_of(tmp_path, siblings) == expected


def test_without_a_say_where_threads_run_there_are_no_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    assert cores_of(tmp_path, SMT) == []


def test_all_threads_stay_on_the_given_cpus() -> None:
    code = """
import os, threading
from moe.machine import stay_on
cpu = {min(os.sched_getaffinity(0))}
begin, end, seen = threading.Event(), threading.Event(), []
def wait():
    begin.set()
    end.wait()
    seen.append(os.sched_getaffinity(0))
other = threading.Thread(target=wait)
other.start()
begin.wait()
stay_on(cpu)
end.set()
other.join()
assert seen == [cpu] and os.sched_getaffinity(0) == cpu
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert machine.memory_total(tmp_path) is None
    assert machine.memory_available(tmp_path) is None
    assert machine.cpu_quota(tmp_path) is None
    assert machine.instruction_sets(tmp_path) == []
    assert machine.cpu_maker(tmp_path) == ""


@pytest.mark.deep
def test_threads_of_torch_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    def spins(**given: str) -> str:
        ways = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
        unset = {name: value for name, value in os.environ.items() if name not in ways}
        env = unset | {"OMP_DISPLAY_ENV": "verbose"} | given
        code = "import moe, torch; print('libgomp' in open('/proc/self/maps').read())"
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        if "True" not in run.stdout:
            pytest.skip("torch has another OpenMP here")
        (found,) = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", run.stderr)
        return str(found)

    assert spins() == "10000"
    assert spins(GOMP_SPINCOUNT="77") == "77"
    assert spins(OMP_WAIT_POLICY="ACTIVE") not in ("10000", "0")
