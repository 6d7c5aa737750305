"""Helper processes: who is blamed for what ends one, and what such a process may not do."""

from __future__ import annotations

import base64
import ctypes
import errno
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from moe import helper_process, helpers
from moe.errors import BusyError
from moe.helper_process import NICENESS
from moe.helpers import HelperLimitError, Helpers
from moe.images import decode
from moe.sampling import constraint
from moe.text import chat
from tests.moe.text.test_prompts import make_tokenizer

TEMPLATE = make_tokenizer("{{ messages[0].content }}")


def _render() -> str:
    return chat.render(TEMPLATE, [{"role": "user", "content": "hi"}])


def _decode() -> tuple[int, int]:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return decode.decode([url], 100)[0].image.size


def _compile() -> str:
    constraint.faults.cache_clear()
    return constraint.fault("regex", "[ab]+")


USES: dict[str, tuple[Helpers, Callable[[], Any], Any]] = {
    "templates": (chat.RENDERERS, _render, "hi"),
    "images": (decode.DECODERS, _decode, (3, 2)),
    "structures": (constraint.COMPILERS, _compile, ""),
}


class Machine:
    """Does something to helper processes as they start: `meddle` is told how many have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meddle: Callable[[int, subprocess.Popen[bytes] | None], None] = lambda *_: None
        self.started: list[subprocess.Popen[bytes]] = []
        start = subprocess.Popen

        def starting(*what: Any, **how: Any) -> subprocess.Popen[bytes]:
            self.meddle(len(self.started), None)
            process = start(*what, **how)
            self.started.append(process)
            self.meddle(len(self.started), process)
            return process

        monkeypatch.setattr(helpers.subprocess, "Popen", starting)

    def send(self, number: int, times: int = 100) -> None:
        """Send a signal to so many processes as they start."""

        def meddle(count: int, process: subprocess.Popen[bytes] | None) -> None:
            if process is not None and count <= times:
                process.send_signal(number)

        self.meddle = meddle

    def starts_none(self, error: int) -> None:
        def meddle(_: int, process: subprocess.Popen[bytes] | None) -> None:
            raise OSError(error, os.strerror(error))

        self.meddle = meddle


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for used, _, _ in USES.values():
        used.close()
    yield Machine(monkeypatch)
    for used, _, _ in USES.values():
        used.close()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fault", ["killed once", "killed", "stopped", "no fork", "no descriptors"])
def test_b14_what_the_machine_does_to_helpers_is_no_fault_of_requests(
    use: str, fault: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work, expected = USES[use]
    if fault == "killed once":
        machine.send(signal.SIGKILL, times=1)
        assert work() == expected
        assert len(machine.started) == 2
        return
    if fault == "killed":
        machine.send(signal.SIGKILL)
    elif fault == "stopped":
        monkeypatch.setattr(helpers, "WALL_SECONDS", 0.2)
        machine.send(signal.SIGSTOP)
    else:
        machine.starts_none(errno.EAGAIN if fault == "no fork" else errno.EMFILE)
    why = {"killed": "ended a process", "stopped": "too busy to answer within 0.2 s"}
    with pytest.raises(BusyError, match=why.get(fault, "starts no more processes now")):
        work()
    assert all(process.poll() is not None for process in machine.started), "none is left"
    machine.meddle = lambda *_: None
    monkeypatch.setattr(helpers, "WALL_SECONDS", 30.0)
    assert work() == expected, "and it is over when it is over"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_b14_idle_helpers_that_were_killed_or_stopped_are_replaced(
    number: int, machine: Machine
) -> None:
    assert _render() == "hi"
    (process,) = machine.started
    process.send_signal(number)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
        time.sleep(0.001)
    assert _render() == "hi"
    assert len(machine.started) == 2
    machine.starts_none(errno.EAGAIN)
    assert _render() == "hi", "by the idle one"


def test_b14_all_idle_helpers_may_be_killed(machine: Machine) -> None:
    own, _, _ = USES["templates"]
    for helper in [own._take(own._memory) for _ in range(own._kept)]:
        own._give_back(helper)
    assert len(own._idle) == 2
    for process in machine.started:
        process.kill()
        process.wait()
    assert _render() == "hi"
    assert len(machine.started) == 3
    assert helpers.WALL_SECONDS == 30.0


def test_the_probe_of_a_template_is_not_spoilt_by_the_machine(machine: Machine) -> None:
    """Else a server would have no tools until it is started again."""
    from moe.text.tokenizer import TextCodec
    from tests.moe.text.tool_calls.templates import HERMES

    codec = TextCodec(make_tokenizer(HERMES), 64)
    machine.starts_none(errno.EAGAIN)
    with pytest.raises(BusyError):
        _ = codec.tools
    machine.meddle = lambda *_: None
    assert codec.tools == TextCodec(make_tokenizer(HERMES), 64).tools


PROGRAM = """
import ctypes, json, os, resource, signal, socket, sys, threading

tgkill, shmget = {"x86_64": (234, 29)}.get(os.uname().machine, (131, 194))

def call(*what):
    if (code := ctypes.CDLL(None, use_errno=True).syscall(*what)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return code

def answer(request):
    asked = request.decode()
    if asked == "memory":
        return bytes(2**40)
    if asked == "time":
        while True:
            pass
    if asked == "much":
        return b"x" * 5000
    if asked == "overflow":
        os.abort()
    def tried(what):
        try:
            return bool(what()) or True
        except OSError as error:
            return error.strerror
    return json.dumps({
        "read": tried(lambda: open(asked).read()),
        "list": tried(lambda: os.listdir(os.path.dirname(asked))),
        "write": tried(lambda: open(asked + ".new", "w")),
        "socket": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
        "exec": tried(lambda: os.execv("/bin/true", ["true"])),
        "fork": tried(lambda: os.fork() or os._exit(0)),
        "signal": tried(lambda: os.kill(os.getppid(), 0)),
        "thread signal": tried(lambda: call(tgkill, os.getppid(), os.getppid(), 0)),
        "limit": tried(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE)),
        "mode": tried(lambda: os.chmod(asked, 0o666)),
        "memory": tried(lambda: call(shmget, 0, 4096, 0o1600)),
        "own signal": tried(lambda: signal.raise_signal(signal.SIGCONT)),
        "python": tried(lambda: __import__("colorsys").rgb_to_hsv(0, 0, 0)),
        "thread": tried(lambda: threading.Thread(target=int).start()),
        "environment": sorted(os.environ),
        "limits": [resource.getrlimit(each) for each in
                   (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)],
    }).encode()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Helpers]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    made = Helpers(file, memory=2**28, seconds=1, most_bytes=4096, kept=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("memory", "takes more than 256 MiB of memory"),
        ("time", "takes more than 1 s of a processor"),
        ("much", "makes more than 4096 bytes"),
        ("overflow", r"ended the process that works on it \(signal 6\)"),
    ],
)
def test_a7_what_reaches_its_own_limit_is_refused(asked: str, why: str, program: Helpers) -> None:
    with pytest.raises(HelperLimitError, match=why):
        program.ask(asked.encode())
    assert not program._idle


def test_a_request_larger_than_a_pipe_does_not_wait_for_a_stopped_process(
    program: Helpers, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "WALL_SECONDS", 0.2)
    machine.send(signal.SIGSTOP)
    with pytest.raises(BusyError, match="too busy"):
        program.ask(b"x" * 2**22)


def test_a7_a_helper_may_open_nothing_start_nothing_and_knows_no_secret(
    program: Helpers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOE_API_KEY", "MOE_LAUNCH_SECRET", "HF_TOKEN", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "secret")
    secret = tmp_path / "keys.yaml"
    secret.write_text("alice: s3cret")
    done = json.loads(program.ask(str(secret).encode()))
    known = {*helpers._PASSED_ON, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}
    assert {*done["environment"]} <= known
    assert done["limits"] == [[2**28] * 2, [0, 0], [0, 0]]
    assert (done["python"], done["thread"]) == (True, True)
    pid = program._idle[0]._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS, "and gives way to the model"
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert int(status.partition("CapEff:\t")[2].split()[0], 16) & ~0b110 == 0
    assert done["own signal"] is True
    if "Seccomp:\t2" in status:
        reached = ("socket", "exec", "fork", "signal", "thread signal", "limit", "mode", "memory")
        assert {what: done[what] for what in reached} == dict.fromkeys(
            reached, os.strerror(errno.EPERM)
        )
    if ctypes.CDLL(None).syscall(444, None, 0, 1) > 0:  # the version of Landlock
        refused = os.strerror(errno.EACCES)
        assert [done[what] for what in ("read", "list", "write")] == [refused] * 3


def test_where_the_kernel_confines_nothing_nothing_else_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old:
        calls = 0

        def syscall(self, *_: object) -> int:
            self.calls += 1
            return -1

    old: Any = Old()
    helper_process._confine_files(old, ["/usr"])
    assert old.calls == 1, "for the version"
    monkeypatch.setattr(helper_process, "_MACHINES", {})
    helper_process._confine_calls(old)  # it has no prctl


@pytest.mark.parametrize(
    ("column", "headers"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")]
)
def test_calls_have_the_kernel_s_numbers(column: int, headers: str) -> None:
    """As far as the headers of this machine know them."""
    file = Path("/usr/include", headers)
    if not file.exists():
        pytest.skip(f"wants {file}")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
    named = ", ".join(helper_process._FORBIDDEN.values()).split(", ")
    rows = {name: numbers[column] for name, *numbers in map(str.split, named)}
    for name in ("clone", "clone3", "prlimit", "tgkill"):
        rows[{"prlimit": "prlimit64"}.get(name, name)] = str(
            getattr(helper_process, f"_{name.upper()}")[column]
        )
    assert {name: known.get(name, "-") for name in rows if name in known or rows[name] == "-"} == {
        name: number for name, number in rows.items() if name in known or number == "-"
    }
    numbers = [number for number in rows.values() if number != "-"]
    assert len(set(numbers)) == len(numbers) > 50
