"""Fuzz what reads bytes that others wrote, with coverage as the guide; for a bounded time.

    python -m tests.fuzz [--seconds S] [TARGET ...]    (S: of each target, 60 where not given)

Targets of atheris (libFuzzer for Python): header (safetensors), manifest (stores), config, gguf,
wire (messages of ranks), greeting (of a rank that is a stranger) and grammar (structures of
requests). `http` sends requests that schemathesis makes of the server's own description, fresh
ones each time. What raises anything but the error that its caller expects is a finding, and what
takes 20 s of processor time: exit code 1, and the input is kept in build/fuzz. Inputs that reached
something new stay in build/fuzz/TARGET, where the next run begins. tests/corpora/TARGET has some of
them, and those that found something; the suite reads them too (tests/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "fuzz"
CORPORA = Path(__file__).with_name("corpora")
_LIMIT_S = 20
"""Of one input. libFuzzer counts by the clock: a pause of the process looks like a slow input."""
_MEMORY = Path("/dev/shm")  # a disk would take most of the time
_SCRATCH = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
_DIRECTORY = Path(_SCRATCH.name)
_INSTRUMENTED = [
    *("experts.manifest", "experts.safetensors_io", "moe.loading.gguf", "moe.loading.hub"),
    *("moe.parallel.transport", "moe.sampling.grammar", "json"),
]


def header(data: bytes) -> None:
    from experts.files import HeaderError
    from experts.safetensors_io import read_header

    file = _DIRECTORY / "header.safetensors"
    file.write_bytes(data)
    with file.open("rb") as stream, contextlib.suppress(HeaderError):
        read_header(stream.fileno(), len(data), file)


def manifest(data: bytes) -> None:
    from experts.manifest import MANIFEST_NAME, StoreError, _digest, read_manifest

    try:  # with the digest that it should have, else nothing behind it is reached
        store = json.loads(data)
        data = json.dumps({"store": store, "digest": _digest(store)}).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    (_DIRECTORY / MANIFEST_NAME).write_bytes(data)
    with contextlib.suppress(StoreError):
        read_manifest(_DIRECTORY)


def config(data: bytes) -> None:
    from moe.errors import MoEError
    from moe.loading.hub import read_config

    (_DIRECTORY / "config.json").write_bytes(data)
    with contextlib.suppress(MoEError):
        read_config(_DIRECTORY)


def gguf(data: bytes) -> None:
    from experts.files import HeaderError
    from moe.errors import MoEError
    from moe.loading.gguf.config import gguf_config
    from moe.loading.gguf.header import read_gguf

    for size in (len(data), 1 << 40):  # as if the tensors came behind, else few headers are good
        with contextlib.suppress(HeaderError, ValueError):  # `open_gguf` makes one of both
            found = read_gguf(io.BytesIO(data), size, Path("x.gguf"))
            break
    else:
        return
    with contextlib.suppress(HeaderError, MoEError):
        gguf_config(*found, {})


def wire(data: bytes) -> None:
    from moe.parallel.transport import Connection, WireError

    ours, theirs = socket.socketpair()
    theirs.sendall(data[:60000])
    theirs.close()
    connection = Connection(ours)
    try:
        while True:
            connection.receive()
    except WireError:
        pass
    finally:
        connection.close()


class _Listener:
    """Gives `accept` a connection from which these bytes come."""

    def __init__(self, data: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        theirs.sendall(struct.pack("!I", len(data)) + data)
        theirs.shutdown(socket.SHUT_WR)
        self._theirs = theirs  # else the answer has no reader

    def accept(self) -> tuple[socket.socket, None]:
        return self.socket, None


def greeting(data: bytes) -> None:
    from moe.parallel.transport import WireError, accept

    with contextlib.suppress(WireError):
        accept(_Listener(data[:60000]), b"secret", 5.0)  # type: ignore[arg-type]


def grammar(data: bytes) -> None:
    from moe.sampling.constraint import fault
    from moe.sampling.grammar import answer

    kind = ("json_schema", "regex", "lark")[data[0] % 3] if data else "regex"
    source = data[1:].decode(errors="replace")
    if "torch" in sys.modules:  # whose threads a fork would lose: the suite
        fault(kind, source)
    elif not (process := os.fork()):  # what `faults` does, a hundred times as often
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (2, 3))
            resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
            answer(json.dumps([[kind, source]]).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    else:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status <= 0, "its process failed otherwise than by its limits"


TARGETS: dict[str, Callable[[bytes], None]] = {
    **{"header": header, "manifest": manifest, "config": config, "gguf": gguf},
    **{"wire": wire, "greeting": greeting, "grammar": grammar},
}


_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": [1, None, "b"]}]},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    {"type": "array", "prefixItems": [{"const": 1}], "minItems": 1, "maxItems": 9},
    {"type": "string", "format": "date-time", "minLength": 2, "maxLength": 30},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 1e9, "multipleOf": 0.5},
    {"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 1},
]
_REGEXES = [
    b"[a-z]{2,5}(x|y)*",
    rb"\d+(\.\d*)?|(?i:inf)",
    rb"(a|b){3,}\p{L}[^\x00-\x1f]",
    b"a.*b&~c",
]
_LARKS = [
    b'start: "a" /b+/ | start "c"',
    b'start: x{1,3} Y? ("z" | x)*\nx: "(" x ")" | Y\nY: /[0-9]+/ & ~/0/\n%ignore /\\s+/',
    b'start: %json {"type": "boolean"} w\nw[max_tokens=3]: /.*/\n%import common.INT',
]


def seeds(target: str) -> list[bytes]:
    """Valid inputs, from which the fuzzer goes on."""
    if target == "header":
        import torch

        from experts.safetensors_io import Entry, encode_header

        return [encode_header([Entry("a", torch.float32, (0,))]), encode_header([])]
    if target == "gguf":
        from examples.models.gguf_files import write_model
        from examples.models.tiny import tiny_model
        from moe.loading.gguf.header import open_gguf

        headers = []
        for name in ("mixtral", "deepseek_v2", "gpt_oss", "qwen3_next"):
            file = _DIRECTORY / "seed.gguf"
            write_model(tiny_model(name), file)
            opened = open_gguf(file)
            os.close(opened.fd)
            headers.append(file.read_bytes()[: min(t.start for t in opened.tensors.values())])
        return headers
    if target == "config":
        from transformers import MixtralConfig

        return [MixtralConfig().to_json_string(use_diff=False).encode()]
    if target in ("wire", "greeting"):
        text = b'{"who": {"rank": 1}, "proof": "00", "challenge": "00"}'
        return [text if target == "greeting" else struct.pack("!I", len(text)) + text]
    if target == "grammar":
        return [  # many: what is compiled tells the fuzzer nothing
            *(b"\0" + json.dumps(schema).encode() for schema in _SCHEMAS),
            *(b"\1" + regex for regex in _REGEXES),
            *(b"\2" + lark for lark in _LARKS),
        ]
    return [b'{"version": 1, "layers": [], "files": {}}']


def fuzz(target: str, seconds: int) -> None:
    """Run libFuzzer in this process, which it ends."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=_INSTRUMENTED, enable_loader_override=False):
        TARGETS[target](b"{}")
    corpus = FOLDER / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-timeout={_LIMIT_S}", "-rss_limit_mb=4096"]
    options += [f"-artifact_prefix={FOLDER}/{target}-", "-print_final_stats=1", "-verbosity=0"]
    options += ["-max_len=65536"]
    known = [str(path) for path in [CORPORA / target] if path.is_dir()]
    atheris.Setup([sys.argv[0], *options, str(corpus), *known], TARGETS[target])
    atheris.Fuzz()


def again(target: str, file: Path) -> None:
    """Read one input when nothing is left to import; SIGPROF ends what takes too long."""
    data = file.read_bytes()
    TARGETS[target](seeds(target)[0])
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
    start = time.process_time()
    TARGETS[target](data)
    print(f"{file.name}: {time.process_time() - start:.3f} s of processor time", flush=True)


def is_slow(target: str, file: Path) -> bool:
    """Whether an input takes as long by itself, in processor time (or waits for ever)."""
    command = [sys.executable, "-m", "tests.fuzz", "--again", str(file), target]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=30 * _LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def finds(target: str, seconds: int) -> bool:
    """Whether libFuzzer finds something; it goes on behind pauses that it took for slow inputs."""
    until = time.monotonic() + seconds
    command = [sys.executable, "-m", "tests.fuzz", "--inside", target, "--seconds"]
    while (left := round(until - time.monotonic())) > 0:
        if subprocess.run([*command, str(left)], cwd=ROOT).returncode == 0:
            return False
        slow = list(FOLDER.glob(f"{target}-timeout-*"))
        if not slow or any(is_slow(target, file) for file in slow):
            return True
        for file in slow:
            file.unlink()
    return False


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wrong = set(options.targets) - {*TARGETS, "http"}
    if wrong:
        parser.error(f"no such target: {', '.join(sorted(wrong))}")
    if options.again:
        again(options.targets[0], options.again)
        return 0
    if options.inside:
        fuzz(options.targets[0], options.seconds)
        return 0
    found = []
    for target in options.targets or [*TARGETS, "http"]:
        print(f"fuzz {target}: {options.seconds} s", flush=True)
        if target == "http":
            command = [sys.executable, "-m", "pytest", "-q", "tests/moe/server/test_openapi.py"]
            environment = {**os.environ, "FUZZ_EXAMPLES": str(options.seconds)}
            failed = subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
        else:
            failed = finds(target, options.seconds)
        if failed:
            found.append(target)
    print(f"found something in: {', '.join(found)}" if found else "found nothing")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
