"""A hub on localhost: repositories are directories, and every answer is in a log.

It speaks what huggingface_hub asks for: a repository's commit, its tree, files by HEAD and by GET,
whole or in ranges, each at a commit. Tests say which repositories are gated, which connections
break off, and look at what was sent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

CHUNK = 1 << 16
LFS = 1 << 10
"""Bytes from which on files are stored as the hub stores large ones."""
MOST_HASHED = 1 << 26
"""Bytes up to which hashes are true: that of a sparse file of 60 GB would take long."""


@dataclass(frozen=True)
class Sent:
    """One answer: of which path, bytes of its body, and the token that it was asked with."""

    path: str
    method: str
    nbytes: int
    start: int
    token: str


Lie = Callable[[str, dict[str, str], Any], tuple[dict[str, str], Any]]


@dataclass
class FakeHub:
    """The state of the server.

    Attributes:
        root: ``org/name`` below it are the repositories.
        gated: repositories that want the token.
        down: nothing is answered.
        on_piece: called with the path before each piece of a body; raises to break the connection.
        ranges: whether range requests are answered as such.
        lie: called with the kind of an answer ("model", "tree", "file"), its headers, and its body:
            JSON, or the pieces of a file. Gives others, the status among the headers.
    """

    root: Path
    gated: set[str] = field(default_factory=set)
    token: str = "let-me-in"
    ranges: bool = True
    down: bool = False
    on_piece: Callable[[str], object] = lambda _: None
    lie: Lie | None = None
    log: list[Sent] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    url: str = ""

    def repository(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def bytes_sent(self, what: str = "") -> int:
        with self.lock:
            return sum(one.nbytes for one in self.log if what in one.path)

    def files_sent(self) -> set[str]:
        """Names of files that were sent, in whole or in part."""
        with self.lock:
            sent = [one.path for one in self.log if one.nbytes and "/resolve/" in one.path]
        return {path.rpartition("/")[2] for path in sent}


def commit_of(repository: Path) -> str:
    """Changes with every file's size and time."""
    seen = sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in repository.rglob("*"))
    return hashlib.sha1(repr(seen).encode()).hexdigest()


def etag_of(file: Path) -> str:
    """The hash that a hub states: git's, or SHA-256 of large files."""
    status = file.stat()
    return _hash_of(file, status.st_size, status.st_mtime_ns)


@lru_cache
def _hash_of(file: Path, size: int, time_ns: int) -> str:
    if size > MOST_HASHED:
        return hashlib.sha256(repr((file.name, size, time_ns)).encode()).hexdigest()
    content = file.read_bytes()
    if size >= LFS:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % size + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        if self.hub.down:
            self.close_connection = True
            return
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        name = found[1] if found else ""
        repository = self.hub.root / name
        if not found or not repository.is_dir():
            self._refuse(404, "RepoNotFound", "Repository not found")
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if name in self.hub.gated and token != self.hub.token:
            self._refuse(401 if not token else 403, "GatedRepo", "Access is restricted")
            return
        commit = commit_of(repository)
        revision = found[3 if api else 2] if found.lastindex and found.lastindex > 1 else "main"
        if revision not in ("main", "v1", commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if api and found[2] == "tree":
            files = sorted(file for file in repository.rglob("*") if file.is_file())
            self._send_json("tree", [_entry(file, repository) for file in files])
        elif api:
            answer: dict[str, Any] = {"id": name, "sha": commit, "siblings": [], "gated": False}
            self._send_json("model", answer)
        elif not (repository / found[3]).is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            self._send_file(repository / found[3], commit)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self._log(0)

    def _send_json(self, kind: str, content: Any) -> None:
        headers = {"Content-Type": "application/json"}
        if self.hub.lie is not None:
            headers, content = self.hub.lie(kind, headers, content)
        if isinstance(content, (dict, list)):
            content = [json.dumps(content).encode()]
            headers = {"Content-Length": str(len(content[0]))} | headers
        self._begin(200, headers)
        self._send(content)

    def _send(self, pieces: Iterable[bytes], start: int = 0) -> None:
        sent = 0
        try:
            for piece in pieces:
                sent += self.wfile.write(piece)
        except (OSError, ConnectionBreak):
            self.close_connection = True
        finally:
            self._log(sent, start)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(int(headers.pop("status", status)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, file: Path, commit: str) -> None:
        size = file.stat().st_size
        start, stop = 0, size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.hub.ranges:
            start = int(asked[1])
            stop = min(int(asked[2]) + 1 if asked[2] else size, size)
        ranged = bool(asked) and self.hub.ranges
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if ranged else {}
        headers |= {"Content-Length": str(stop - start), "ETag": f'"{etag_of(file)}"'}
        headers |= {"X-Repo-Commit": commit}
        pieces = self._pieces(file, start, stop)
        if self.hub.lie is not None:
            headers, pieces = self.hub.lie("file", headers, pieces)
        self._begin(206 if ranged else 200, headers)
        self._send(pieces if self.command == "GET" else [], start)

    def _pieces(self, file: Path, start: int, stop: int) -> Iterator[bytes]:
        with file.open("rb") as source:
            source.seek(start)
            while start < stop:
                self.hub.on_piece(file.name)
                piece = source.read(min(CHUNK, stop - start))
                start += len(piece)
                yield piece

    def _log(self, nbytes: int, start: int = 0) -> None:
        token = self.headers.get("Authorization", "")
        with self.hub.lock:
            self.hub.log.append(Sent(self.path, self.command, nbytes, start, token))


class ConnectionBreak(Exception):
    """Raised by `FakeHub.on_piece`: the connection ends here."""


def _entry(file: Path, repository: Path) -> dict[str, Any]:
    size, tag = file.stat().st_size, etag_of(file)
    entry = {"type": "file", "path": str(file.relative_to(repository)), "size": size, "oid": tag}
    if size >= LFS:
        entry["lfs"] = {"oid": tag, "size": size, "pointerSize": 134}
        entry["oid"] = hashlib.sha1(tag.encode()).hexdigest()  # of the pointer
    return entry


@contextmanager
def fake_hub(root: Path) -> Iterator[FakeHub]:
    """The server, which this process's huggingface_hub uses meanwhile, with an empty cache."""
    hub = FakeHub(root / "hub")
    hub.root.mkdir(parents=True)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(constants, "ENDPOINT", hub.url)
            template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "HF_HUB_CACHE", str(root / "cache"))
            patch.delenv("HF_TOKEN", raising=False)
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
