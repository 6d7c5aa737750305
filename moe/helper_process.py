"""A helper process as a program: limits and confines itself, then answers requests one by one.

    python helper_process.py PROGRAM MEMORY

PROGRAM is a file with a function ``answer``: bytes of a request to bytes of an answer, and perhaps
``prepare``, which imports what that needs. MEMORY is its limit in bytes. A request on standard
input is its length and the seconds of a processor that it may take (8 bytes each, little-endian),
and its bytes; an answer on standard output its length and its bytes. `moe.helpers` is the other
side.

What such a process works on comes from strangers, so it may have less than its user may: it gets no
privileges, starts no processes, opens no sockets, and reads only Python's own files (Landlock and
seccomp, where the kernel has them). It imports no module of ours, so that it starts fast.
"""

from __future__ import annotations

import ctypes
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

# From linux/prctl.h, linux/seccomp.h, linux/landlock.h, linux/audit.h.
_SET_SECCOMP, _SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many rights a version knows; 16 from 5 on
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_X32 = 0x40000000
# socket, socketpair, execve, execveat, fork, vfork, ptrace, process_vm_readv and _writev,
# io_uring_setup, pidfd_getfd.
_FORBIDDEN = {
    "x86_64": (0xC000003E, (41, 53, 59, 322, 57, 58, 101, 310, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 199, 221, 281, 117, 270, 271, 425, 438)),
}
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
        _confine_files(libc, readable)
        _confine_calls(libc)


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
    known = _FORBIDDEN.get(os.uname().machine)
    if known is None:
        return
    architecture, calls = known
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    # Behind the checks of the calls stand two answers: first "allowed", then "refused".
    checks = [(equal, call, len(calls) - at, 0) for at, call in enumerate(calls)]
    code = [
        (load, 4, 0, 0),  # the architecture
        (equal, architecture, 0, len(calls) + 3),  # another: refused
        (load, 0, 0, 0),  # the number of the call
        (at_least, _X32, len(calls) + 1, 0),
        *checks,
        (give, _ALLOW, 0, 0),
        (give, _REFUSE, 0, 0),
    ]
    packed = b"".join(struct.pack("=HBBI", op, yes, no, k) for op, k, yes, no in code)
    program = _Program(len(code), packed)
    libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)


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
