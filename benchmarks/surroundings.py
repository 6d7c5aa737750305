"""A server in bad surroundings: what does its user see, and what must hold?

    python -m benchmarks.surroundings [--only WORD]

Each row starts the shipped model where something is wrong that the kernel itself brings about: full
and read-only disks (mounts that only the process sees), no more processes and threads (a control
group), files of a store or of saved prefixes that others change, ranks that are killed or stopped.
It asks what a user would ask, and says what it was told, in which time. Mounts and groups take
root; rows that cannot be made say why, and count for nothing. Faults that need no kernel have
tests, and `benchmarks.chaos` brings them at random. Ends with exit code 0 or 1 and one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.chaos import ChaosServer
from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.memory_group import JOIN, MemoryGroup
from benchmarks.servers import Server, ServerError, moe_serve

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "demo-model"
READ_ONLY = 'read_only() { mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; }\n'
LONG = "def function(argument):\n    return argument\n\n\n"
QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once upon"}]},
    "/v1/completions": {"prompt": "def f", "structured_outputs": {"regex": "[a-z]{5}"}},
    "/tokenize": {"messages": [{"role": "user", "content": "Once upon"}]},
}
GREEDY = {"max_tokens": 8, "temperature": 0}
TIMEOUT_S = 6.0  # of ranks that are silent
KEPT = ("memory.prefix_tokens=512", "memory.kv_tokens=4096", "engine.max_batch_size=4")
LITTLE = (
    *("memory.reserve_gib=0", "memory.device_gib=0.03", "offload.hot_set=false"),
    *("memory.kv_tokens=4000", "engine.max_batch_size=8", "prefill.wave_tokens=256"),
)


class NotMade(Exception):
    """The surroundings cannot be made here."""


class Told(NamedTuple):
    """An answer, as its user sees it; a status of 0: the connection was cut."""

    status: int
    text: str
    seconds: float


class Inside:
    """A command behind a shell that changes its mounts first, which nobody else sees."""

    def __init__(self, setup: str) -> None:
        self._setup = READ_ONLY + setup

    def command(self, command: Sequence[str]) -> list[str]:
        try:
            subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotMade(f"no mounts of its own: {error}") from error
        return ["unshare", "-m", "sh", "-ec", f'{self._setup}\nexec "$@"', "sh", *command]


class ProcessGroup:
    """A control group that counts processes and threads."""

    def __init__(self, closing: ExitStack) -> None:
        for base in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
            folder = base / f"moe-surroundings-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            closing.callback(folder.rmdir)
            if (folder / "pids.max").exists():
                self._folder = folder
                return
        raise NotMade("no control group that counts processes")

    def command(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", JOIN, str(self._folder / "cgroup.procs"), *command]

    def allow_no_more(self) -> None:
        (self._folder / "pids.max").write_text((self._folder / "pids.current").read_text())

    def allow_all(self) -> None:
        (self._folder / "pids.max").write_text("max")


def ask(url: str, path: str, **body: Any) -> Told:
    """Ask one question."""
    begin = time.perf_counter()
    try:
        answer = httpx.post(f"{url}{path}", json=body, timeout=120)
    except httpx.HTTPError as error:
        return Told(0, type(error).__name__, time.perf_counter() - begin)
    taken, found = time.perf_counter() - begin, answer.json()
    if answer.status_code != 200:
        return Told(answer.status_code, found["error"]["message"], taken)
    (choice,) = found.get("choices", [{"text": str(found.get("tokens"))}])
    return Told(200, choice.get("text") or choice["message"]["content"], taken)


def ask_all(url: str) -> list[Told]:
    """Ask each of the `QUESTIONS`: what a process renders, what one compiles, and a text."""
    return [
        ask(url, path, **body, **({} if path == "/tokenize" else GREEDY))
        for path, body in QUESTIONS.items()
    ]


def prompts(server: Server, count: int = 6) -> list[Told]:
    """Ask long prompts, of which each has blocks of its own."""
    url = server.endpoint.url
    return [
        ask(url, "/v1/completions", prompt=f"# {n}\n{LONG * 12}", **GREEDY) for n in range(count)
    ]


def seen(told: Sequence[Told]) -> str:
    """Say it in a line."""
    kinds = Counter(str(t.status) if t.status == 200 else f"{t.status} {t.text}" for t in told)
    counted = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{counted}; {max(t.seconds for t in told):.1f} s at most"


def wait_for(happened: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether it happens in time."""
    until = time.monotonic() + seconds
    while not (has := happened()) and time.monotonic() < until:
        time.sleep(0.05)
    return has


def same(told: Sequence[Told], expected: Sequence[Told]) -> bool:
    return [t[:2] for t in told] == [t[:2] for t in expected]


class Rows:
    """The rows; each returns what was seen, and whether that is right.

    Args:
        folder: for the files of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self) -> list[Told]:
        if not hasattr(self, "_answers"):
            with moe_serve(MODEL) as server:
                self._answers = ask_all(server.endpoint.url)
        return self._answers

    def serve_inside(self, setup: str, says: str = "", exact: bool = True) -> tuple[str, bool]:
        """Serve behind a shell's commands, and expect the usual answers."""
        expected = self.answers()
        with moe_serve(MODEL, within=Inside(setup)) as server:
            told = ask_all(server.endpoint.url)
            said = server.said()
        good = same(told, expected) if exact else all(t.status == 200 for t in told)
        return seen(told), good and says in said and server.process.returncode == 0

    def full_log(self) -> tuple[str, bool]:
        return self.serve_inside("exec >/dev/full 2>&1")

    def no_temporary_folder(self) -> tuple[str, bool]:
        folders = f"/tmp /var/tmp /dev/shm {ROOT}"
        return self.serve_inside(f"for each in {folders}; do read_only $each; done; cd {ROOT}")

    def no_cache_folder(self) -> tuple[str, bool]:
        setup = f"export XDG_CACHE_HOME={self.folder}/no; mkdir -p {self.folder}/no"
        setup += f"; read_only {self.folder}/no"
        return self.serve_inside(setup, "set XDG_CACHE_HOME to a directory that can", exact=False)

    def full_store(self) -> tuple[str, bool]:
        disk = self.folder / "small"
        inside = Inside(f"mkdir {disk}; mount -t tmpfs -o size=12m none {disk}")
        return self.command(inside.command(_moe("convert", MODEL, disk / "store")), 2, "make room")

    def full_output(self) -> tuple[str, bool]:
        generate = _moe("generate", MODEL, "--prompt", "x", "--max-new-tokens", "4")
        return self.command(["sh", "-c", 'exec "$@" >/dev/full', "sh", *generate], 1, "output")

    def command(self, command: Sequence[str], code: int, says: str) -> tuple[str, bool]:
        begin = time.perf_counter()
        run = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300)
        taken, said = time.perf_counter() - begin, (run.stderr.splitlines() or [""])[-1]
        holds = run.returncode == code and says in said
        return f"exit {run.returncode}: {said}; {taken:.1f} s", holds

    def full_prefixes(self) -> tuple[str, bool]:
        disk = self.folder / "prefixes-full"
        inside = Inside(f"mkdir {disk}; mount -t tmpfs -o size=64k,mode=700 none {disk}")
        with moe_serve(MODEL, *KEPT, f"memory.prefix_dir={disk}", within=inside) as server:
            told = prompts(server)
            stops = wait_for(lambda: "no more prefixes are saved" in server.said())
        good = stops and all(t.status == 200 for t in told) and server.process.returncode == 0
        return f"{seen(told)}; the log says why no more are saved: {stops}", good

    def poisoned_prefixes(self) -> tuple[str, bool]:
        """Files are damaged, replaced and added between two runs; then two servers use them."""
        kept, victim = self.folder / "prefixes", self.folder / "victim"
        settings = (*KEPT, f"memory.prefix_dir={kept}")
        with moe_serve(MODEL, *settings) as server:
            expected = prompts(server)
        files = sorted(kept.glob("*/*.kv"))
        if len(files) < 6:
            return f"only {len(files)} files were saved", False
        victim.write_text("of somebody else")
        files[0].write_bytes(os.urandom(files[0].stat().st_size))
        files[1].write_bytes(files[2].read_bytes())
        os.truncate(files[2], 100)
        for file, replace in ((files[3], partial(os.symlink, victim)), (files[4], os.mkfifo)):
            file.unlink()
            replace(file)
        foreign = files[0].with_name("notes.txt")
        foreign.write_text("not ours")
        with ExitStack() as closing:
            servers = [closing.enter_context(moe_serve(MODEL, *settings)) for _ in range(2)]
            told = list(closing.enter_context(ThreadPoolExecutor(2)).map(prompts, servers))
        untouched = victim.read_text() == "of somebody else" and foreign.read_text() == "not ours"
        good = untouched and all(same(each, expected) for each in told)
        good = good and not any(server.process.returncode for server in servers)
        return seen([t for each in told for t in each]), good

    def no_process(self) -> tuple[str, bool]:
        with ExitStack() as closing:
            group = ProcessGroup(closing)
            with moe_serve(MODEL, within=group) as server:
                url = server.endpoint.url
                group.allow_no_more()
                short = [*ask_all(url), *ask_all(url)]
                alive = httpx.get(f"{url}/health").status_code == 200
                group.allow_all()
                time.sleep(1)  # it says so: "try again later"
                told = ask_all(url)
            busy = all(t.status in (200, 503) and t.seconds < 5 for t in short)
            good = busy and alive and same(told, self.answers()) and not server.process.returncode
        return f"{seen(short)}; then {seen(told)}", good

    def changed_store(self) -> tuple[str, bool]:
        """The store is moved away, then its files are overwritten while they are open."""
        store, away = self.folder / "store", self.folder / "away"
        subprocess.run(
            _moe("convert", MODEL, store, "--bits", "8"), cwd=ROOT, check=True, capture_output=True
        )
        with moe_serve(store, "memory.prefix_tokens=0", *LITTLE) as server:
            expected = prompts(server)
            store.rename(away)
            shutil.copytree(MODEL, store)
            moved = prompts(server)
            for file in away.glob("experts-*"):
                with file.open("r+b") as out:
                    out.write(os.urandom(file.stat().st_size))
            changed = prompts(server)
            alive = httpx.get(f"{server.endpoint.url}/health").status_code == 200
        told = [t for t in changed if t.status != 200]
        right = [t[:2] == e[:2] for t, e in zip(changed, expected, strict=True) if t.status == 200]
        good = same(moved, expected) and all(right) and bool(told) and alive
        return f"moved: {seen(moved)}; overwritten: {seen(changed)}", good

    def lost_rank(self, rank: int, number: int) -> tuple[str, bool]:
        settings = ["parallel.enabled=true", f"parallel.timeout_s={TIMEOUT_S}"]
        server = ChaosServer(MODEL, self.folder, 2, settings, MemoryGroup(None, 0))
        question = {"prompt": "import os", "max_tokens": 2000, "ignore_eos": True}
        try:
            server.start()
            server.wait_until_ready()
            with ThreadPoolExecutor(4) as pool:
                asked = [
                    pool.submit(ask, server.url, "/v1/completions", **question) for _ in "1234"
                ]
                while not _running(server.url):
                    time.sleep(0.05)
                begin = time.perf_counter()
                server.processes[rank].send_signal(number)
                told = [each.result() for each in asked]
                taken = time.perf_counter() - begin
        finally:
            codes = server.end(None)
        # Callers of a killed rank 0 see that their connection ends, at once.
        cut = (rank, number) == (0, signal.SIGKILL)
        good = all(t.status == (0 if cut else 500) for t in told) and None not in codes
        line = f"{seen(told)}; {taken:.1f} s behind it; exit codes {codes}"
        return line, good and taken < TIMEOUT_S + 10


def _moe(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "moe", *map(str, arguments)]


def _running(url: str) -> bool:
    status = httpx.get(f"{url}/v1/status", timeout=60).json()
    return bool(status["occupancy"]["running_requests"] == 4)


def table(rows: Rows) -> dict[str, Callable[[], tuple[str, bool]]]:
    return {
        "the log's disk is full": rows.full_log,
        "temporary folders and /dev/shm are read-only": rows.no_temporary_folder,
        "the cache folder is read-only": rows.no_cache_folder,
        "a store's disk is full": rows.full_store,
        "standard output's disk is full": rows.full_output,
        "the disk of prefixes is full": rows.full_prefixes,
        "prefixes poisoned, linked, foreign; two servers": rows.poisoned_prefixes,
        "no thread, no process": rows.no_process,
        "a store moved, then overwritten": rows.changed_store,
        "rank 0 killed": partial(rows.lost_rank, 0, signal.SIGKILL),
        "rank 0 stopped": partial(rows.lost_rank, 0, signal.SIGSTOP),
        "rank 1 killed": partial(rows.lost_rank, 1, signal.SIGKILL),
        "rank 1 stopped": partial(rows.lost_rank, 1, signal.SIGSTOP),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", help="rows whose name has the word")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for name, row in table(Rows(Path(made))).items():
            if (options.only or "") in name:
                try:
                    line, holds = row()
                except NotMade as error:
                    line, holds = f"not made here: {error}", None
                except (ServerError, RuntimeError) as error:
                    line, holds = str(error), False
                found.append({"row": name, "seen": line, "holds": holds})
                print(f"{name}: {line}: {holds}", file=sys.stderr, flush=True)
    print_table("bad surroundings", list(found[0]), [list(each.values()) for each in found])
    print_json({**facts, "rows": found})
    return int(any(each["holds"] is False for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
