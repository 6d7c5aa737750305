"""A helper process as a program: limits and confines itself, then answers requests one by one.

    python helper_process.py PROGRAM MEMORY

PROGRAM is a file with a function ``answer``: bytes of a request to bytes of an answer, and perhaps
``prepare``, which imports what that needs. MEMORY is its limit in bytes. A request on standard
input is its length and the seconds of a processor that it may take (8 bytes each, little-endian),
and its bytes; an answer on standard output its length and its bytes. `moe.helpers` is the other
side.

What such a process works on comes from strangers, so it may do less than its user may: it gets no
privileges, starts no processes, opens no sockets, reaches no other process, and reads only Python's
own files (Landlock and seccomp, where the kernel has them). It imports no module of ours: it starts
fast.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import math
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

NICENESS = 10
"""It gives way to what computes tokens."""
OUT_OF_MEMORY = 3
"""Its exit code then."""
REQUEST, ANSWER = struct.Struct("<QQ"), struct.Struct("<Q")

# From linux/prctl.h, linux/seccomp.h, linux/landlock.h, linux/audit.h, linux/capability.h.
_SET_SECCOMP, _SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many rights a version knows; 16 from 5 on
_CAPABILITIES, _READ_ANY_FILE = 0x20080522, 0b110
_X32 = 0x40000000
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The place of a call's number in a pair, and the number of the architecture."""
_FORBIDDEN = {
    "sockets": "socket 41 198, socketpair 53 199, io_uring_setup 425 425",
    "programs and processes": "execve 59 221, execveat 322 281, fork 57 -, vfork 58 -",
    "what others remember": "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, "
    "process_madvise 440 440, process_mrelease 448 448, kcmp 312 272, pidfd_getfd 438 438, "
    "move_pages 279 239, migrate_pages 256 238, perf_event_open 298 241, userfaultfd 323 282",
    "what others do": "kill 62 129, tkill 200 130, rt_sigqueueinfo 129 138, "
    "rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424, "
    "setpriority 141 140, sched_setaffinity 203 122, sched_setparam 142 118, "
    "sched_setscheduler 144 119, sched_setattr 314 274, ioprio_set 251 30",
    "files that cannot be opened": "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, "
    "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, "
    "futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, "
    "setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, "
    "removexattrat 466 466, file_setattr 469 469, truncate 76 45, open_by_handle_at 304 265",
    "what outlives it": "shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, "
    "mq_open 240 180, add_key 248 217, request_key 249 218, keyctl 250 219",
    "namespaces and the kernel": "unshare 272 97, setns 308 268, bpf 321 280",
}
"""Calls by what they reach, each with its numbers on x86_64 and on aarch64."""
_THREAD = 0x10000  # clone's flag
_CLONE, _CLONE3, _PRLIMIT, _TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
_READABLE = (
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"),
    *("/dev/null", "/dev/urandom", "/proc/cpuinfo", "/sys/devices/system/cpu"),
)


def confine(readable: list[str]) -> None:
    """Take from this process what it does not need, as far as the kernel can.

    Args:
        readable: files and folders that it may still open, to read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        _drop_capabilities(libc)
        _confine_files(libc, readable)
        _confine_calls(libc)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop root's capabilities, but for those to read files that other users keep to themselves."""
    header, held = struct.pack("=Ii", _CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, held) == 0:
        kept = held[1] & _READ_ANY_FILE  # effective, permitted, inheritable; then the upper halves
        libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept))


def _confine_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return
    handled = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    rules = (ctypes.c_uint64 * 1)(handled)
    ruleset = libc.syscall(_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
    for path in readable:
        with suppress(OSError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
            libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0)
            os.close(opened)
    libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _confine_calls(libc: ctypes.CDLL) -> None:
    column, architecture = _MACHINES.get(os.uname().machine, (0, 0))
    if architecture:
        code = _filter(column, architecture, os.getpid())
        packed = b"".join(struct.pack("=HBBI", *line) for line in code)
        program = _Program(len(code), packed)
        libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)


def _filter(column: int, architecture: int, pid: int) -> list[tuple[int, int, int, int]]:
    """A program of BPF: lines of operation, jumps if it is so and if it is not, and a number."""
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    calls = [call.split()[1 + column] for call in ", ".join(_FORBIDDEN.values()).split(", ")]
    allow, refuse, unknown = "allow", "refuse", "unknown"
    code: list[tuple[int, int, int | str, int | str]] = [
        (load, 4, 0, 0),
        (equal, architecture, 0, refuse),
        (load, 0, 0, 0),  # the number of the call
        (at_least, _X32, refuse, 0),
        *((equal, int(call), refuse, 0) for call in calls if call != "-"),
        (equal, _CLONE3[column], unknown, 0),  # its flags cannot be seen; libraries use clone then
    ]
    for call, check, right in (
        (_CLONE, has, _THREAD),  # a thread, and no process
        (_PRLIMIT, equal, 0),  # of this process
        (_TGKILL, equal, pid),
    ):
        code += [(equal, call[column], 0, 2), (load, 16, 0, 0), (check, right, allow, refuse)]
    code += [(give, 0x7FFF0000, 0, 0), (give, 0x50000 | errno.EPERM, 0, 0)]
    code += [(give, 0x50000 | errno.ENOSYS, 0, 0)]
    places = {allow: len(code) - 3, refuse: len(code) - 2, unknown: len(code) - 1}

    def jump(at: int, to: int | str) -> int:
        return places[to] - at - 1 if isinstance(to, str) else to

    return [(op, jump(at, yes), jump(at, no), k) for at, (op, k, yes, no) in enumerate(code)]


def main(program: str, memory: str) -> None:
    """Answer requests until standard input is closed."""
    for limit, value in (
        (resource.RLIMIT_AS, int(memory)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what programs print is no answer
    try:
        answer = _answer_of(program)  # what packages do when they are imported they may do
        confine([*_READABLE, sys.prefix, sys.base_prefix, program, *sys.path, *_libraries()])
        while header := sys.stdin.buffer.read(REQUEST.size):
            size, seconds = REQUEST.unpack(header)
            request = sys.stdin.buffer.read(size)
            # In whole seconds, of all that the process has done.
            most = math.ceil(time.process_time()) + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            made = answer(request)
            output.write(ANSWER.pack(len(made)))
            output.write(made)
            output.flush()
            del request, made
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer_of(program: str) -> Callable[[bytes], bytes]:
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()
    answer: Callable[[bytes], bytes] = module.answer
    return answer


def _libraries() -> list[str]:
    return os.environ.get("LD_LIBRARY_PATH", "").split(":")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules have common names
    main(*sys.argv[1:])
