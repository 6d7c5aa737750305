"""Clients that others wrote, against this server: `make world`.

    python -m tests.world [--only NAME ...] [--fresh] [--list]

Each client is installed below build/world/clients and started as docs/server.md says, with a home
directory of its own, a dummy key, and an address on 127.0.0.1. Agents go through one round of a
tool, of a model whose text is scripted (`tests/world/scripted.py` says what is real); load
generators and lm-eval measure the shipped model. What a client printed and asked stays in
build/world/home. Schemas of MCP servers' tools (`tests/world/mcp.py`) and tests that read files of
others (`tests/world/files.py`) come last. A table, and one JSON object as the last line; the exit
code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.world import files, mcp
from tests.world.clients import CLIENTS, FILE, ROOT, WORD, Client, Failure, Run, script
from tests.world.files import LLAMA_CPP, SOURCES, WORLD
from tests.world.install import FOLDERS, installed
from tests.world.recipes import at
from tests.world.scripted import World, checkpoint, serving

TEMPLATE = "models/templates/Qwen-Qwen3-0.6B.jinja"
CONTEXT = 200_000
SECONDS = 900


@dataclass
class Row:
    """One line of the table.

    Attributes:
        model: "scripted" or "shipped"; of tests of files: "".
        ignored: fields that the server has taken without honouring them.
    """

    client: str
    version: str
    model: str
    passed: bool
    result: str
    seconds: float
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        mark = "ok    " if self.passed else "FAILS "
        ignored = f" (ignored: {', '.join(self.ignored)})" if self.ignored else ""
        name = f"{self.client:<20}{self.version:<12}{self.model:<10}"
        return f"{name}{self.seconds:5.0f} s  {mark}{self.result}{ignored}"


def run_client(client: Client, world: World, fresh: bool) -> Row:
    """Installs a client where it is missing, starts it, and looks at what came of it."""
    model = "scripted" if client.scripted else "shipped"
    try:
        place = installed(client.folder, fresh)
        version = FOLDERS[client.folder].version(place, client.package)
    except (subprocess.SubprocessError, OSError) as error:
        return Row(client.name, "", model, False, f"cannot be installed: {error}", 0)
    begin, first = time.monotonic(), len(world.exchanges)
    output, code, folder = start(client, world, place)
    run = Run(output, code, folder, world.exchanges[first:])
    (folder.parent / "output.txt").write_text(output)
    (folder.parent / "exchanges.json").write_text(json.dumps([e.told() for e in run.exchanges]))
    try:
        passed, result = True, client.check(run)
    except (Failure, OSError, ValueError, LookupError) as error:
        passed, result = False, " ".join(f"{type(error).__name__}: {error}".split())
    ignored = sorted({name for exchange in run.exchanges for name in exchange.ignored})
    taken = time.monotonic() - begin
    return Row(client.name, version, model, passed, result, taken, tuple(ignored))


def start(client: Client, world: World, place: Path) -> tuple[str, int | None, Path]:
    """Output, exit code (None: it took too long and was ended) and folder of a client's run."""
    home = WORLD / "home" / re.sub(r"\W+", "-", client.name.lower())
    shutil.rmtree(home, ignore_errors=True)
    folder = home / "work"
    wanted = client.files | {FILE: f"The word is {WORD}\n"}
    words = {"MODEL": world.model, "DIRECTORY": str(world.directory), "TASK": "heldout"}
    commands = []
    for block in client.blocks():
        text = at(block.text, world.url, **words)
        if not block.file:
            commands.append(text)
        elif block.file.startswith("~/"):
            write(home / block.file[2:], text)
        else:
            wanted[block.file] = text
    for name, text in wanted.items():
        write(folder / name, text)
    # Agents look for the root of a repository, and would take this one's for their project.
    subprocess.run(["git", "init", "--quiet", folder], check=True, timeout=60)
    programs = FOLDERS[client.folder].programs(place)
    if programs.name == ".bin":
        (folder / "node_modules").symlink_to(programs.parent)
    with serving_files(folder) as address:
        environ = {
            **{name: os.environ[name] for name in ("LANG", "SSL_CERT_FILE") if name in os.environ},
            **{"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "NO_COLOR": "1"},
            **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "FILES": address},
            **{"OMP_NUM_THREADS": "1", "TERM": "dumb", "PORT": free_port()},
        }
        # The last line of what is shown starts the client; a function of that name adds to it.
        program = commands[-1].strip().replace("\\\n", " ").splitlines()[-1].split()[0]
        arguments = at(client.arguments, world.url, **words)
        adds = f'{program}() {{ command {program} "$@" {arguments}; }}\n'
        return bounded(["bash", "-c", adds + "\n".join(commands)], folder, environ) + (folder,)


def bounded(argv: list[str], folder: Path, environ: dict[str, str]) -> tuple[str, int | None]:
    """Output and exit code of a command and all that it starts, which end after `SECONDS`."""
    process = subprocess.Popen(
        ["nice", *argv],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=SECONDS)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return output.decode(errors="replace"), code


def free_port() -> str:
    """A port of 127.0.0.1 that nobody listens on, for clients that are servers, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    """The address of a server of these files, for clients that would fetch them elsewhere."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


MCP = "MCP servers"


def run_mcp(fresh: bool) -> Row:
    """The schemas of the tools of MCP servers."""
    begin = time.monotonic()
    try:
        passed, result = True, mcp.schemas_are_followed(fresh)
    except (AssertionError, subprocess.SubprocessError, OSError, LookupError) as error:
        passed, result = False, " ".join(f"{type(error).__name__}: {error}".split())
    return Row(MCP, "", "", passed, result, time.monotonic() - begin)


def tests_of_files() -> list[str]:
    """The files of tests that read what `tests.world.files` fetches."""
    own = Path(__file__).parent
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT / "tests"))
        for file in files
        if file.parent != own and "tests.world.files" in file.read_text()
    ]


def run_tests(name: str) -> Row:
    """One of `tests_of_files`, the deep tests, too."""
    begin = time.monotonic()
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_WORLD": str(WORLD)}
    output, code = bounded([*argv, f"tests/{name}"], ROOT, environ)
    result = output.strip().splitlines()[-1] if output.strip() else ""
    result = f"did not end in {SECONDS} s" if code is None else result
    return Row(name, "", "", code == 0, result, time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description="clients that others wrote, against this server")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows, as --list names them")
    parser.add_argument("--fresh", action="store_true", help="install today's releases")
    parser.add_argument("--list", action="store_true", help="names of the rows")
    options = parser.parse_args()
    names = [*(client.name for client in CLIENTS), MCP, *tests_of_files()]
    wanted = set(options.only or names)
    if options.list or wanted - set(names):
        print(*names, sep="\n")
        return 0 if options.list else 2
    chosen = [client for client in CLIENTS if client.name in wanted]
    for folder in SOURCES:
        if not folder.is_dir():
            files.fetch(folder)
    rows: list[Row] = []
    tiny = WORLD / "models" / "scripted"
    if chosen and not tiny.exists():
        checkpoint(tiny, (LLAMA_CPP / TEMPLATE).read_text(), CONTEXT)
    fresh = {client.folder for client in chosen} if options.fresh else set()
    for directory, says in ((tiny, script), (ROOT / "examples" / "demo-model", None)):
        clients = [client for client in chosen if client.scripted is (says is not None)]
        if clients:
            with serving(directory, says) as world:
                for client in clients:
                    rows.append(run_client(client, world, client.folder in fresh))
                    fresh.discard(client.folder)
                    print(rows[-1], flush=True)
    if MCP in wanted:
        rows.append(run_mcp(options.fresh))
        print(rows[-1], flush=True)
    for name in tests_of_files():
        if name in wanted:
            rows.append(run_tests(name))
            print(rows[-1], flush=True)
    failed = [row.client for row in rows if not row.passed]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} hold", *failed, sep="\n  FAILS ")
    print(json.dumps({"rows": [asdict(row) for row in rows], "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
