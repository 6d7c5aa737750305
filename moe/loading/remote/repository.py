"""One repository of a hub at one commit: its files, read whole or by ranges.

huggingface_hub opens the connections, with its own settings: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`. What goes wrong becomes a `CheckpointError` that says what to do.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from experts.files import MAX_SMALL_BYTES
from moe.errors import CheckpointError
from moe.loading.remote.answers import ask, commit_of, list_files, pause, untrusted
from moe.loading.remote.names import ChosenFiles, HubName, choose_files


class HubUnreachableError(CheckpointError):
    """The hub gave no answer, or must not be asked."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at a commit.

    Attributes:
        path: in the repository, plain and relative.
        size: bytes.
        etag: hash of the content, in hex: SHA-256 of large files, git's of others.
        url: where it is read.
    """

    path: str
    size: int
    etag: str
    url: str

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes ``[start, stop)``, as they come, and no more.

        A transfer that breaks off goes on where it stopped. Raises `CheckpointError` for answers
        to another question, and what `hub_errors` translates.
        """
        failures = 0
        while start < stop:
            before = start
            try:
                for piece in self._pieces(start, stop):
                    start += len(piece)
                    yield piece
                reason = HTTPError("answers end without a byte")
            except HTTPError as error:
                reason = error
            failures = failures + 1 if start == before else 0
            if start < stop:
                pause(reason, failures)

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        whole = (start, stop) == (0, self.size)  # which a hub without ranges has, too
        headers = {} if whole else {"Range": f"bytes={start}-{stop - 1}"}
        with ask(self.url, **headers) as answer:
            status, given = answer.status_code, answer.headers.get("Content-Range", "")
            if status != (200 if whole else 206):
                raise untrusted(self.url, f"does not answer range requests (status {status})")
            if not whole and not given.startswith(f"bytes {start}-"):
                raise untrusted(self.url, f"answers {given!r} to bytes {start} to {stop - 1}")
            for piece in answer.iter_raw():
                start += len(piece)
                if start > stop:
                    raise untrusted(self.url, f"sends more than the {self.size} bytes it announced")
                yield piece

    def read(self, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from `offset`; returns its length. Raises as `stream`."""
        done = 0
        for piece in self.stream(offset, offset + len(view)):
            view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def content(self) -> bytes:
        """All of a small file, with the hash that was announced. Raises as `stream`."""
        if self.size > MAX_SMALL_BYTES:
            raise untrusted(self.url, f"has {self.size} bytes, {MAX_SMALL_BYTES} is the most")
        buffer, digest = bytearray(self.size), self.new_digest()
        self.read(memoryview(buffer))
        digest.update(buffer)
        self.check(digest.hexdigest())
        return bytes(buffer)

    def new_digest(self) -> hashlib._Hash:
        """Hashes the content as `etag` does."""
        if len(self.etag) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def check(self, found: str) -> None:
        """Raise `CheckpointError` where what came has another hash than was announced."""
        if found != self.etag:
            raise untrusted(
                self.url, f"sent what has the hash {found}, not {self.etag} as announced"
            )


@dataclass(frozen=True)
class Repository:
    """The files of a repository at one commit.

    Attributes:
        name: what was asked for.
        commit: what its revision is today.
        files: by path.
    """

    name: HubName
    commit: str
    files: dict[str, HubFile]

    @classmethod
    def find(cls, name: HubName) -> Repository:
        """Ask the hub.

        Raises:
            HubUnreachableError: there is no answer.
            CheckpointError: there is no such repository or revision, or it may not be read; or an
                answer is none that can be believed.
        """
        with hub_errors(name):
            commit = commit_of(name)
            files = {
                path: HubFile(path, size, etag, hf_hub_url(name.repository, path, revision=commit))
                for path, size, etag in list_files(name, commit)
            }
        return cls(name, commit, files)

    @cached_property
    def choice(self) -> ChosenFiles:
        """Which of the files the name means; raises `CheckpointError`."""
        return choose_files(self.name, {path: file.size for path, file in self.files.items()})


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Say in our words what goes wrong at the hub, and what to do."""
    page = f"{constants.ENDPOINT}/{name.repository}"
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its conditions at {page}, then set HF_TOKEN to a token of "
            "that account (hf auth login does so for good)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name.repository} has no revision {name.revision}; {page} lists its branches and tags"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no model directory {str(name)!r} here, and {constants.ENDPOINT} has no model of that "
            "id that this account may see; check the spelling, or set HF_TOKEN for a private one"
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachableError("HF_HUB_OFFLINE is set") from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise HubUnreachableError(
            f"{constants.ENDPOINT} gave no answer for {name}: {type(error).__name__}: {reason}"
        ) from error
    except OSError as error:
        where = f"{error.filename or constants.HF_HUB_CACHE}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk of {constants.HF_HUB_CACHE} is full; make room, or set HF_HOME to a "
                "larger one. The same command goes on where this one stopped"
            ) from error
        raise CheckpointError(
            f"cannot write {where}: {error.strerror or error}; HF_HOME names another place"
        ) from error
