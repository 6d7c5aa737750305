"""One repository of a hub at one commit: its files, read whole or by ranges.

huggingface_hub speaks to the hub, with its own settings: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`. What goes wrong becomes a `CheckpointError` that says what to do.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    Response,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from moe.errors import CheckpointError
from moe.loading.remote.names import ChosenFiles, HubName, choose_files

RETRIES = 5
"""Of a transfer that breaks off, without a byte in between."""
PAUSE_S = 0.5
"""Before another try, times the tries that brought nothing."""
TIMEOUT_S = 30


class HubUnreachableError(CheckpointError):
    """The hub gave no answer, or must not be asked."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at a commit.

    Attributes:
        path: in the repository.
        size: bytes.
        etag: hash of the content.
        url: where it is read.
    """

    path: str
    size: int
    etag: str
    url: str

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes ``[start, stop)``, as they come.

        A transfer that breaks off goes on where it stopped. Raises what `hub_errors` translates.
        """
        failures = 0
        while start < stop:
            before = start
            try:
                with self._request(start, stop) as answer:
                    for piece in answer.iter_bytes():
                        start += len(piece)
                        yield piece
            except HfHubHTTPError:
                raise
            except HTTPError:
                failures = failures + 1 if start == before else 0
                if failures > RETRIES:
                    raise
                time.sleep(failures * PAUSE_S)

    @contextmanager
    def _request(self, start: int, stop: int) -> Iterator[Response]:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={start}-{stop - 1}"
        with http_stream_backoff(
            # what breaks off is tried again by `stream`, which knows how far it came
            "GET", self.url, headers=headers, timeout=TIMEOUT_S, retry_on_exceptions=()
        ) as answer:  # fmt: skip
            hf_raise_for_status(answer)
            if answer.status_code != 206:
                raise CheckpointError(
                    f"{self.url} does not answer range requests (status {answer.status_code}); use "
                    "another HF_ENDPOINT"
                )
            yield answer

    def read(self, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from `offset`; returns its length. Raises as `stream`."""
        done = 0
        for piece in self.stream(offset, offset + len(view)):
            view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def content(self) -> bytes:
        """All of it."""
        buffer = bytearray(self.size)
        self.read(memoryview(buffer))
        return bytes(buffer)


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
            CheckpointError: there is no such repository or revision, or it may not be read.
        """
        api = HfApi()
        with hub_errors(name):
            commit = api.model_info(name.repository, revision=name.revision).sha
            assert commit is not None
            tree = list(api.list_repo_tree(name.repository, revision=commit, recursive=True))
        files = {
            item.path: HubFile(
                item.path,
                item.size,
                item.blob_id if item.lfs is None else item.lfs.sha256,
                hf_hub_url(name.repository, item.path, revision=commit),
            )
            for item in tree
            if isinstance(item, RepoFile)
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
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise CheckpointError(
                f"the disk of {constants.HF_HUB_CACHE} is full; make room, or set HF_HOME to a "
                "larger one. The same command goes on where this one stopped"
            ) from error
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise HubUnreachableError(
            f"{constants.ENDPOINT} gave no answer for {name}: {type(error).__name__}: {reason}"
        ) from error
