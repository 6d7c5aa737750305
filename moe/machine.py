"""Facts about this machine that bound a run: CPUs, memory, instruction sets.

Read from ``/proc`` and ``/sys`` at the time of asking, and never larger than what the process's
control groups (version 1 and 2) allow. ``root`` replaces ``/`` in tests. Elsewhere than on Linux
the facts that cannot be read are None or empty.

`keep_freed_memory` and `spread_memory` are about this process only: the one tells glibc to keep
what is freed, the other tells Linux which memory nodes to take memory from. `code_digest` tells
one version of our code from another.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_CODE = Path(__file__).parents[1]
_ROOMS = ("moe", "offload", "experts", "routing", "kernels")
_SOURCES = (".py", ".cpp", ".h")

KEPT = 2**30
"""Most unused bytes at the end of the heap that stay with the process."""
_STEP = 2**28
"""Bytes by which the heap grows at least."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names of mallopt(3), from malloc.h

# System calls to set and to get a thread's memory policy, by `uname -m`: libc does not wrap them.
_MEMORY_POLICY_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _INTERLEAVE = 0, 3  # from linux/mempolicy.h

# What our CPU kernels and torch's can use, by the names in /proc/cpuinfo.
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512F",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
}


def usable_cpus() -> int:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_busy() -> bool:
    """Return whether more threads have wanted to run in the last minute than there are CPUs."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except OSError:
        return False


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the control groups grant, or None where they set no limit."""
    quotas = []
    for group in _groups("cpu", root):
        text = _read(group / "cpu.max")  # version 2: "QUOTA PERIOD" or "max PERIOD"
        if text is None:
            pair = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            text = " ".join(filter(None, pair))
        limit = text.split()
        if len(limit) == 2 and limit[0] not in ("max", "-1"):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def cpu_maker(root: Path = ROOT) -> str:
    """Name of the CPU's maker, like ``GenuineIntel``; empty where the system does not say."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("vendor_id"):
            return line.partition(":")[2].strip()
    return ""


def memory_nodes(root: Path = ROOT) -> list[frozenset[int]]:
    """The usable CPUs of each memory controller (NUMA node) that has some, in their order; all in
    one where the system does not say."""
    return list(_nodes(root).values()) or [_usable()]


def _usable() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """The usable CPUs of each memory node that has some, by its number."""
    usable, found = _usable(), {}
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        found[int(file.parent.name[4:])] = frozenset(_cpus(_read(file) or "")) & usable
    return {number: found[number] for number in sorted(found) if found[number]}


def spread_memory(root: Path = ROOT) -> bool:
    """Take new memory from all memory nodes that have usable CPUs, page by page in turn.

    By default Linux takes a page from the node of the thread that first writes it. A thread that
    reads a model's files would so put all weights on one node, and threads of all nodes would then
    share that node's bandwidth. This holds for the calling thread and for those that it starts
    from now on. A policy that the user chose (``numactl``) stays.

    Returns:
        True if pages come from several nodes in turn now.
    """
    nodes = _nodes(root)
    calls = _MEMORY_POLICY_CALLS.get(platform.machine())
    if len(nodes) < 2 or calls is None or platform.system() != "Linux":
        return False
    set_policy, get_policy = calls
    system = ctypes.CDLL(None)
    policy = ctypes.c_int()
    if system.syscall(get_policy, ctypes.byref(policy), None, 0, None, 0) != 0:
        return False
    if policy.value != _DEFAULT:
        return policy.value == _INTERLEAVE
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for number in nodes:
        words[number // 64] |= 1 << number % 64
    # The kernel reads one bit less than it is told.
    return bool(system.syscall(set_policy, _INTERLEAVE, words, len(words) * 64 + 1) == 0)


def physical_cores(root: Path = ROOT) -> list[frozenset[int]]:
    """The usable CPUs of each physical core (several with hyper-threads), those of a memory node
    together; empty where the system does not say which CPUs are usable."""
    cores: dict[frozenset[int], None] = {}
    for node in memory_nodes(root):
        for cpu in sorted(node):
            file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            cores[frozenset(_cpus(_read(file) or str(cpu))) & node | {cpu}] = None
    return list(cores)


def _cpus(text: str) -> Iterator[int]:
    """The CPUs of a list like ``0-3,8``."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def stay_on(cpus: Collection[int]) -> None:
    """Let this process run on these CPUs only; memory that it touches first is then near them."""
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task), cpus)


def memory_total(root: Path = ROOT) -> int | None:
    """Bytes of memory this process may fill: what the machine has, or less where limited."""
    return min(filter(None, [_meminfo("MemTotal", root), memory_limit(root)]), default=None)


def memory_available(root: Path = ROOT) -> int | None:
    """Bytes that can be taken now without swapping; file cache counts as free."""
    free = [_meminfo("MemAvailable", root)]
    for group in _groups("memory", root):
        limit, used = _limit(group), _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            stat = dict(line.split() for line in (_read(group / "memory.stat") or "").splitlines())
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            free.append(max(0, limit - used + int(cache)))
    return min((number for number in free if number is not None), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the tightest control group allows, or None where none sets a limit."""
    limits = [_limit(group) for group in _groups("memory", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def instruction_sets(root: Path = ROOT) -> list[str]:
    """Names, from ``INSTRUCTION_SETS``, of the vector extensions this CPU has."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            return [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]
    return []


def keep_freed_memory() -> bool:
    """Let glibc take large blocks from the heap, and keep them when freed; False without glibc.

    By default it maps each large block and gives it back when it is freed. A pass over thousands of
    tokens allocates blocks of tens of megabytes in every layer, and then takes a page fault for
    each of their pages again: a tenth of the processor time of reading a long prompt
    (docs/results/2026-11-21-prefill.md). Blocks that are allocated already stay where they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function, or no such library
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in ((_TRIM_THRESHOLD, KEPT), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    )


def give_back_freed_memory() -> None:
    """Give kept memory back to the system, if there is glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def boot(root: Path = ROOT) -> str:
    """Return a text that tells this start of the machine from others; empty where the system does
    not say."""
    return _read(root / "proc/sys/kernel/random/boot_id") or ""


def mount_of(file: Path, root: Path = ROOT) -> list[str]:
    """The device that a file lies on: its number, and how the system says that it is mounted."""
    place = file.resolve()
    found = [str(place.stat().st_dev)]
    while not os.path.ismount(place):
        place = place.parent
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        fields = line.split(" ")  # 5 fields, options, and behind a dash type, source, options
        if fields[4] == str(place).replace(" ", "\\040"):
            found.append(" ".join([fields[2], *fields[4:6], line.partition(" - ")[2]]))
    return found


def _groups(controller: str, root: Path) -> list[Path]:
    """Folders of the control groups that limit this process, innermost first."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers and controller)
        # In a container the path may be the host's and not visible: the top is then our own group.
        inner = top / path.strip("/")
        folders += [f for f in (inner, *inner.parents) if f == top or top in f.parents]
    return [folder for folder in folders if folder.is_dir()]


def _limit(group: Path) -> int | None:
    limit = _number(group, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < 2**60 else None  # version 1's "no limit" is huge


def _number(group: Path, *names: str) -> int | None:
    texts = (_read(group / name) for name in names)
    return next((int(text) for text in texts if text is not None and text.isdigit()), None)


def _meminfo(name: str, root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def code_digest(root: Path = _CODE) -> str:
    """Digest of our own sources, C++ too: other kernels give other bits."""
    digest = hashlib.blake2b(digest_size=8)
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*")):
            if file.suffix in _SOURCES:
                digest.update(str(file.relative_to(root)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
