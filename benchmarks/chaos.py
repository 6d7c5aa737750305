"""A server whose disk fails, whose process stops or dies, whose clients leave: who is told what.

    python -m benchmarks.chaos [--minutes 10] [--clients 8] [--seed 0] [--ranks 2]

Converts the demo model and serves it with a part of its experts in memory (with ``--ranks`` on
several ranks of one machine, all experts in memory), and drives it with greedy requests whose
answers are known from a server without faults. Meanwhile, at random: reads of experts fail or take
long, the disk under ``memory.prefix_dir`` is full, the clock jumps by hours, the system starts no
thread and no process (and ends the server's helpers), a process is stopped for a while, a process
is killed and the server started again, and clients leave. The server lives in a control group that
allows 128 MiB a rank more than it had without faults (its plan has 31 MiB for one rank), and at
times a neighbour in that group takes what is left: the kernel takes back all pages of files, then
ends the neighbour. Where no group can be made, the result says so. Every request must be accounted
for: answered as without faults, refused, told by an error, left by its client, or cut off by a
kill. Nothing is killed in the second half, so that the server lives long enough: its memory when
idle must not grow by more than 5 % and a few MB between kills. Ends with exit code 0 or 1 and one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.memory_group import GIB, MemoryGroup, memory_group
from benchmarks.soak import MALLOC, WORDS, idle_occupancy

ROOT = Path(__file__).parents[1]
PROMPTS = [" ".join(WORDS[at : at + 4 + at % 40]) for at in range(0, 900, 60)]
CHAT = [{"role": "user", "content": "Once upon a time"}]
CHATS = 0.2
"""Of the requests."""
TOKENS = 24
ANSWER_S = 60.0
READY_S = 600.0  # on a machine that does much else, and kernels may be compiled first
SLOW_S = 0.05
PAUSE_S = 10.0  # of a second: this process, so the machine, stood still
FINE = frozenset(
    {"as without faults", "refused", "told", "left", "cut off by a kill", "cut off by a pause"}
)
MAX_GROWTH, MAX_GROWTH_MB = 0.05, 8.0
ROUNDS = 8
"""Of which the first half has kills. Memory is measured when a round is over."""
MORE_BYTES = 128 << 20
"""What the control group allows a rank beyond what it had without faults. With less the kernel ends
a rank rather than its neighbour: it counts libraries (200 MB), which count for no limit."""
# Takes memory until the kernel ends it, the first of its group.
_NEIGHBOUR = """
open("/proc/self/oom_score_adj", "w").write("1000")
taken = []
while True:
    taken.append(b"x" * (1 << 20))
"""
_FAULTS = "MOE_TEST_FAULTS"


class ChaosServer:
    """``moe serve``, which can be given faults, stopped, killed and started again."""

    def __init__(
        self, model: Path, folder: Path, ranks: int, settings: list[str], group: MemoryGroup
    ) -> None:
        self.group = group
        self.faults = folder / "faults.json"
        self._model, self._ranks, self._settings = model, ranks, settings
        self.log = folder / "log"
        self._log = self.log.open("ab")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.url = ""
        self.kills = 0
        self.set_faults()

    def set_faults(
        self,
        fail: float = 0.0,
        slow: float = 0.0,
        full: bool = False,
        clock: float = 0.0,
        short: bool = False,
    ) -> None:
        """So many of the reads of experts fail or are slow; a full disk; seconds added to the time
        of day; no threads and processes are started."""
        fresh = self.faults.with_suffix(".new")
        now = {"fail": fail, "slow": slow, "full": full, "clock": clock, "short": short}
        fresh.write_text(json.dumps(now))
        fresh.replace(self.faults)

    def start(self) -> None:
        """Start all ranks. Call it in the main thread: Linux ends ranks with the thread that
        started them."""
        port, meeting = _free_port(), _free_port()
        command = [sys.executable, "-m", "benchmarks.chaos", "--serve", "serve", str(self._model)]
        command += ["--port", str(port)]
        for setting in self._settings:
            command += ["--set", setting]
        command = self.group.command(command)
        self.url = f"http://127.0.0.1:{port}"
        for rank in range(self._ranks):
            ranks = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
                **{"WORLD_SIZE": str(self._ranks), "LOCAL_SIZE": str(self._ranks)},
                **{"MASTER_PORT": str(meeting)},
            }
            environ = {**os.environ, **MALLOC, "HF_HUB_OFFLINE": "1", _FAULTS: str(self.faults)}
            environ |= ranks if self._ranks > 1 else {}
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environ, stdout=self._log, stderr=self._log)
            )

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if it does not get ready."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.processes[0].poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"the server did not get ready; see {self.log}")

    def kill_helpers(self) -> None:
        """Kill the processes that the server has started."""
        for process in self.processes:
            for tasks in Path(f"/proc/{process.pid}/task").glob("*/children"):
                for child in map(int, tasks.read_text().split()):
                    os.kill(child, signal.SIGKILL)

    def kill(self) -> list[int | None]:
        """Kill one process, wait until all have ended, and give their exit codes."""
        self.kills += 1
        self.processes[self.kills % len(self.processes)].kill()
        return self.end(signal.SIGTERM if len(self.processes) == 1 else None)

    def end(self, number: int | None = signal.SIGTERM) -> list[int | None]:
        """Tell rank 0 to end; the exit codes of all, None of one that had to be killed."""
        codes: list[int | None] = []
        if number is not None and self.processes and self.processes[0].poll() is None:
            self.processes[0].send_signal(number)
        for process in self.processes:
            try:
                codes.append(process.wait(60))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        self.processes = []
        return codes


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Chaos:
    """Clients and faults of one run, and what became of the requests."""

    def __init__(self, server: ChaosServer, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.expected: dict[str, str] = {}
        self.chat_ids: list[int] = []
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.memory: list[list[float]] = []
        self.codes: list[list[int | None]] = []
        self.ends_of_neighbours: list[int] = []

    async def learn(self) -> None:
        """The answers without faults, each prompt alone."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=ANSWER_S) as http:
            for prompt in PROMPTS:
                answer = await http.post("/v1/completions", json=_body(prompt, stream=False))
                self.expected[prompt] = answer.json()["choices"][0]["text"]
            answer = await http.post("/tokenize", json={"messages": CHAT})
            self.chat_ids = answer.json()["tokens"]

    async def client(self, seed: str, until: float) -> None:
        """Ask until then."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            kills, begun = self.server.kills, time.monotonic()
            leaves = rng.random() < 0.2
            try:
                outcome = await self._within(rng.random() if leaves else ANSWER_S, self._ask(rng))
            except asyncio.TimeoutError:
                outcome = "left" if leaves else f"no answer within {ANSWER_S:g} s"
            except (httpx.HTTPError, OSError) as error:
                outcome = f"cut off: {type(error).__name__}"
                if self.stood_still_at > begun:  # and the server with it, whose limits passed
                    outcome = "cut off by a pause"
                elif self.server.kills != kills or self.is_down:
                    outcome = "cut off by a kill"
                    await asyncio.sleep(0.2)
            self.outcomes[outcome] += 1

    is_down = False
    stood_still_at = -1.0

    async def _within(self, seconds: float, what: Coroutine[Any, Any, str]) -> str:
        """As `asyncio.wait_for`; but where this process is stopped, which a machine that measures
        does to others, that counts as a second."""
        task = asyncio.ensure_future(what)
        while seconds > 0 and not task.done():
            begun = time.monotonic()
            await asyncio.wait({task}, timeout=min(seconds, 1.0))
            if time.monotonic() - begun > PAUSE_S:
                self.stood_still_at = time.monotonic()
            seconds -= 1.0
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise asyncio.TimeoutError
        return task.result()

    async def _render(self) -> str:
        """A chat, which a process of its own renders."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=None) as http:
            answer = await http.post("/tokenize", json={"messages": CHAT})
        if answer.status_code == 200:
            same = answer.json()["tokens"] == self.chat_ids
            return "as without faults" if same else "another answer"
        blamed = f"status {answer.status_code} for what is right"
        return "refused" if answer.status_code in (429, 503) else blamed

    async def _ask(self, rng: random.Random) -> str:
        if rng.random() < CHATS:
            return await self._render()
        prompt, stream = rng.choice(PROMPTS), rng.random() < 0.5
        body = _body(prompt, stream)
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=None) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            if answer.status_code in (429, 503):
                await asyncio.sleep(0.1)
                return "refused"
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                return "told" if error["message"] else f"status {answer.status_code}, no reason"
            if not stream:
                choice = json.loads(await answer.aread())["choices"][0]
                return self._judged(prompt, choice["text"])
            parts: list[str] = []
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self._judged(prompt, "".join(parts))
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "told"
                    parts += [choice["text"] for choice in event["choices"]]
        return "a stream that ends without a word"

    def _judged(self, prompt: str, text: str) -> str:
        return "as without faults" if text == self.expected[prompt] else "another answer"

    async def make_trouble(self, until: float, kills: bool) -> None:
        """One kind after the other, at random, with pauses."""
        kinds = [
            "reads fail",
            "reads are slow",
            "disk full",
            "clock",
            "no thread, no process",
            "stopped",
            "nothing",
            *(["killed"] if kills else []),
            *(["little memory"] if self.server.group.folder else []),
        ]
        while time.monotonic() < until:
            kind = self.rng.choice(kinds)
            self.events[kind] += 1
            print(f"{time.strftime('%X')} {kind}", file=sys.stderr)
            if kind == "reads fail":
                self.server.set_faults(fail=self.rng.choice((0.002, 0.05)))
            elif kind == "reads are slow":
                self.server.set_faults(slow=0.2)
            elif kind == "disk full":
                self.server.set_faults(full=True)
            elif kind == "clock":
                self.server.set_faults(clock=self.rng.choice((-7200.0, 7200.0)))
            elif kind == "no thread, no process":
                self.server.set_faults(short=True)
                self.server.kill_helpers()
            elif kind == "stopped":
                await self._stop_for(self.rng.choice((0.5, 3.0)))
            elif kind == "killed":
                await self._kill()
            elif kind == "little memory":
                await self._press(self.rng.choice((1, 3)))
            await asyncio.sleep(self.rng.uniform(2.0, 6.0))
            self.server.set_faults()

    async def _stop_for(self, seconds: float) -> None:
        process = self.rng.choice(self.server.processes)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    async def _press(self, times: int) -> None:
        command = self.server.group.command([sys.executable, "-S", "-c", _NEIGHBOUR])
        for _ in range(times):
            neighbour = await asyncio.create_subprocess_exec(*command)
            self.ends_of_neighbours.append(await neighbour.wait())

    async def _kill(self) -> None:
        self.is_down = True
        self.codes.append(await asyncio.to_thread(self.server.kill))
        self.server.start()
        await asyncio.to_thread(self.server.wait_until_ready)
        self.is_down = False
        self.memory.append([])

    async def run(self, clients: int, minutes: float) -> None:
        """All of it, in rounds between which memory is measured."""
        self.memory.append([])
        for number in range(ROUNDS):
            until, kills = time.monotonic() + 60 * minutes / ROUNDS, number < ROUNDS / 2
            asking = (self.client(f"{number}:{index}", until) for index in range(clients))
            await asyncio.gather(self.make_trouble(until, kills), *asking)
            if codes := [code for each in self.server.processes if (code := each.poll())]:
                self.outcomes[f"a process ended by itself with {codes}"] += 1
                return
            async with httpx.AsyncClient(base_url=self.server.url, timeout=ANSWER_S) as http:
                left = await idle_occupancy(http)
            self.outcomes.update({f"left in the engine: {k}": v for k, v in left.items() if v})
            each = (anonymous_mb(process.pid) for process in self.server.processes)
            self.memory[-1].append(sum(each))


def anonymous_mb(pid: int) -> float:
    """Memory that no file has, so that pressure takes none of it away."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1e3  # type: ignore[index]


def _body(prompt: str, stream: bool) -> dict[str, Any]:
    return {
        **{"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0},
        **{"stream": stream, "ignore_eos": True},
    }


def faults(chaos: Chaos, codes: list[int | None]) -> list[str]:
    """Return what must not be."""
    found = [f"{count} x {what}" for what, count in chaos.outcomes.items() if what not in FINE]
    if all(len(life) <= 2 for life in chaos.memory):
        found.append(f"no life was long enough to show flat memory: {chaos.memory}")
    for life in chaos.memory:
        if len(life) > 2 and life[-1] > life[1] * (1 + MAX_GROWTH) + MAX_GROWTH_MB:
            found.append(f"memory grew: {life}")
    if alive := [code for code in chaos.ends_of_neighbours if code != -signal.SIGKILL]:
        found.append(f"memory was not short: neighbours ended with {alive}")
    found += [f"a process had to be killed: {each}" for each in chaos.codes if None in each]
    if any(codes):
        found.append(f"the server ended with {codes}")
    if not chaos.outcomes["as without faults"]:
        found.append("nothing was answered")
    return found


def _while_it_runs(
    server: ChaosServer, what: Callable[[], Coroutine[Any, Any, None]]
) -> list[int | None]:
    """Exit codes of a server that ran as long as this."""
    try:
        server.start()
        server.wait_until_ready()
        asyncio.run(what())
    except BaseException:
        print(server.log.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        codes = server.end()
    return codes


def serve(arguments: list[str]) -> None:
    """The command ``moe``, whose disk and clock are as the file of faults says."""
    from moe.cli import main
    from moe.kv import prefix_store
    from offload import open_store
    from offload.errors import OffloadError

    file = Path(os.environ.pop(_FAULTS))
    rng, known = random.Random(0), dict[str, Any]()
    clocks = time.time, time.time_ns

    def fault(name: str) -> Any:
        changed = file.stat().st_mtime_ns
        if changed != known.get("changed"):
            known.update(json.loads(file.read_text()), changed=changed)
        return known[name]

    time.time = lambda: clocks[0]() + fault("clock")
    time.time_ns = lambda: clocks[1]() + int(1e9 * fault("clock"))
    encode_block = prefix_store.encode_block

    def encode_unless_full(stored: Any, token_ids: Any) -> Any:
        if fault("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return encode_block(stored, token_ids)

    prefix_store.encode_block = encode_unless_full
    start, begin_process = threading.Thread.start, subprocess.Popen.__init__

    def start_if_any(thread: threading.Thread) -> None:
        if fault("short"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def begin_if_any(process: Any, *what: Any, **how: Any) -> None:
        if fault("short"):
            process._child_created = False  # or Popen's end complains
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        begin_process(process, *what, **how)

    threads: Any = threading.Thread
    threads.start = start_if_any
    processes: Any = subprocess.Popen
    processes.__init__ = begin_if_any

    class Meddled:
        """A transfer that is late or fails."""

        def __init__(self, transfer: Any, what: str, fails: bool) -> None:
            self._transfer, self._what, self._fails = transfer, what, fails
            self.cancel, self.hasten = transfer.cancel, transfer.hasten

        @property
        def done(self) -> bool:
            return bool(self._transfer.done)

        @property
        def failed(self) -> Exception | None:
            return self._failure() if self.done else None

        def _failure(self) -> Exception | None:
            if self._fails:
                return OffloadError(f"cannot read {self._what}: Input/output error")
            return self._transfer.failed

        def wait(self) -> float:
            waited = float(self._transfer.wait())
            if self._fails:
                raise self._failure() or OffloadError(self._what)
            time.sleep(SLOW_S)
            return waited + SLOW_S

    class Meddling:
        """A reader with faults."""

        def __init__(self, reader: Any) -> None:
            self._reader = reader
            self.name, self.reason, self.close = reader.name, reader.reason, reader.close

        def submit(self, reads: Any, *, urgent: bool, what: str = "") -> Any:
            transfer = self._reader.submit(reads, urgent=urgent, what=what)
            if rng.random() < fault("fail"):
                return Meddled(transfer, what, True)
            return Meddled(transfer, what, False) if rng.random() < fault("slow") else transfer

    begin = open_store.DiskSource.__init__

    def meddled(self: Any, store: Any, bits: Any, reader: Any, *rest: Any) -> None:
        faulty: Any = Meddling(reader)
        begin(self, store, bits, faulty, *rest)

    source: Any = open_store.DiskSource
    source.__init__ = meddled
    sys.exit(main(arguments))


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--ranks", type=int, default=1)
    add("--set", action="append", default=[], help="further settings of the profile")
    add("--memory-gib", type=float, default=0.03, help="of one rank; half of the experts fit")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server outlives this
    facts = environment()
    print_header(facts)
    with tempfile.TemporaryDirectory() as made:
        folder, model = Path(made), Path(made) / "model"
        convert = [sys.executable, "-m", "moe", "convert", "examples/demo-model", str(model)]
        subprocess.run(convert, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        settings = ["memory.kv_tokens=4000", "engine.max_batch_size=8"]
        settings += [f"memory.prefix_dir={folder / 'prefixes'}"]
        if options.ranks > 1:
            settings += ["parallel.enabled=true", "parallel.timeout_s=10"]
        else:
            settings += ["memory.reserve_gib=0", "prefill.wave_tokens=256"]
            settings += [f"memory.device_gib={options.memory_gib}", "offload.hot_set=false"]
        settings += options.set  # the last counts
        print(f"log: {folder / 'log'}", file=sys.stderr)
        ranks = options.ranks
        with memory_group(32 * GIB) as group:  # more than it takes: to learn how much that is
            server = ChaosServer(model, folder, ranks, settings, group)
            chaos = Chaos(server, random.Random(options.seed))
            codes = _while_it_runs(server, chaos.learn)
            taken = group.usage().peak_anonymous_bytes
        with memory_group(taken + ranks * MORE_BYTES) as group:
            server.group = group
            codes += _while_it_runs(server, lambda: chaos.run(options.clients, options.minutes))
            memory = {"without_faults_bytes": taken, **asdict(group.usage())}
    result = {
        "outcomes": dict(chaos.outcomes.most_common()),
        "events": dict(chaos.events),
        "memory_mb_by_life": chaos.memory,
        "group": memory if group.folder else f"no memory limit: {group.reason}",
        "exit_codes_of_kills": chaos.codes,
        "faults": faults(chaos, codes),
    }
    print_table("chaos", ["figure", "value"], list(result.items()))
    print_json({**facts, "minutes": options.minutes, "ranks": options.ranks, **result})
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
