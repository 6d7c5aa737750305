"""Requests to a hub, and answers that are checked before anything is made of them.

A mirror, or whoever is between on plain HTTP, may answer anything. So names are plain, hashes look
like hashes, answers are of the range that was asked for, are not compressed, and are read no
further than they may be long.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote, urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, Response
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from moe.errors import CheckpointError
from moe.loading.remote.names import HubName

TIMEOUT_S = 30
RETRIES = 5
"""Repetitions of a request that fails in a way that may pass."""
PAUSE_S = 0.5
"""Before another try, times the tries that brought nothing."""
MAX_PAUSE_S = 60.0
"""The longest pause that the hub may ask for."""
PASSING = (429, 500, 502, 503, 504)
MAX_ANSWER_BYTES = 64 << 20
"""Most bytes of JSON: far above a page of the list of files, which has a thousand."""
MAX_ERROR_BYTES = 64 << 10
MAX_PAGES = 100
MAX_REDIRECTS = 10
MAX_FILE_BYTES = 1 << 50
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255


def untrusted(url: str, what: str) -> CheckpointError:
    """The error of an answer that is not believed."""
    return CheckpointError(
        f"{url} {what}; try again, and if it stays so, use another hub (HF_ENDPOINT)"
    )


def _plain(path: str) -> str:
    """A path below the folder that it is joined to. Raises ValueError."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or len(part.encode()) > MAX_PART_BYTES for part in parts):
        raise ValueError("is no plain path")
    if len(path.encode()) > MAX_PATH_BYTES or re.search(r"[\x00-\x1f\x7f]", path):
        raise ValueError("is no plain path")
    return path


# Git's SHA-1, of commits and of what is in the repository itself; SHA-256 of large files
Sha1 = Annotated[str, Field(pattern=r"\A[0-9a-f]{40}\z")]
Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
FileSize = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]


class _Model(BaseModel):
    sha: Sha1


class _LargeFile(BaseModel):
    oid: Sha256


class _Entry(BaseModel):
    path: Annotated[str, AfterValidator(_plain)]
    size: FileSize = 0
    oid: Sha1
    lfs: _LargeFile | None = None
    type: str

    @property
    def etag(self) -> str:
        return self.oid if self.lfs is None else self.lfs.oid


_ENTRIES = TypeAdapter(list[_Entry])
_MODEL = TypeAdapter(_Model)


def commit_of(name: HubName) -> str:
    """The commit that a name's revision is today. Raises what `hub_errors` translates."""
    revision = "" if name.revision is None else f"/revision/{quote(name.revision, safe='')}"
    content, _ = _json(f"{_api(name)}{revision}", _MODEL)
    return content.sha


def list_files(name: HubName, commit: str) -> Iterator[tuple[str, int, str]]:
    """Path, size and hash of each file of a repository. Raises what `hub_errors` translates."""
    first = url = f"{_api(name)}/tree/{commit}?recursive=true"
    for _ in range(MAX_PAGES):
        entries, following = _json(url, _ENTRIES)
        yield from ((one.path, one.size, one.etag) for one in entries if one.type == "file")
        if following is None:
            return
        url = urljoin(url, following)
        if urlsplit(url)[:2] != urlsplit(first)[:2]:
            raise untrusted(first, "goes on at another server")
    raise untrusted(first, f"has more than {MAX_PAGES} pages")


def _api(name: HubName) -> str:
    return f"{constants.ENDPOINT}/api/models/{name.repository}"


def _json(url: str, kind: TypeAdapter[Any]) -> tuple[Any, str | None]:
    """An answer as `kind`, and where its list goes on."""
    for failures in range(1, RETRIES + 2):
        try:
            content, following = _content(url)
            break
        except HfHubHTTPError as error:  # others: nobody is there, which is said at once
            pause(error, failures)
    try:
        return kind.validate_json(content), following
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        given = repr(first["input"])[:100]
        raise untrusted(url, f"gives {where} as {given}: {first['msg']}") from error


def _content(url: str) -> tuple[bytes, str | None]:
    content = bytearray()
    with ask(url) as answer:
        for piece in answer.iter_raw():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise untrusted(url, f"answers more than {MAX_ANSWER_BYTES} bytes")
        return bytes(content), answer.links.get("next", {}).get("url")


def pause(error: HTTPError, failures: int) -> None:
    """Wait before another try. Raises the error where it will not pass, or did not so far."""
    wait = failures * PAUSE_S
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in PASSING:
            raise error
        after = error.response.headers.get("Retry-After", "")
        wait = min(float(after), MAX_PAUSE_S) if after.isdecimal() else wait
    if failures > RETRIES:
        raise error
    time.sleep(wait)


@contextmanager
def ask(url: str, **headers: str) -> Iterator[Response]:
    """An answer whose body was not read yet, and comes as it is sent.

    Raises `CheckpointError` for one that is compressed, or sends us where a hub has no files, and
    what `hub_errors` translates.
    """
    headers = {**build_hf_headers(), **headers, "Accept-Encoding": "identity"}
    at = url
    for _ in range(MAX_REDIRECTS + 1):
        with http_stream_backoff(
            # what breaks off is tried again by those who know how far it came
            "GET", at, headers=headers, timeout=TIMEOUT_S, retry_on_exceptions=(),
            retry_on_status_codes=(), follow_redirects=False,
        ) as answer:  # fmt: skip
            following = answer.next_request
            if following is None:
                encoding = answer.headers.get("Content-Encoding", "identity")
                if encoding != "identity":
                    raise untrusted(
                        url, f"answers in the encoding {encoding!r}, which was not asked for"
                    )
                if answer.status_code >= 400:
                    _skip(answer)
                hf_raise_for_status(answer)
                yield answer
                return
        _check_redirect(url, at, at := str(following.url))
        # Those of the client, which leave the token out at another host
        headers = {name: v for name, v in following.headers.items() if name.lower() != "host"}
    raise untrusted(url, f"redirects more than {MAX_REDIRECTS} times")


def _check_redirect(url: str, before: str, to: str) -> None:
    """Raise `CheckpointError` where an answer must not send us: files, servers of this machine and
    of its network (unless the hub is one), and from HTTPS to plain HTTP."""
    old, new = urlsplit(before), urlsplit(to)
    if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
        raise untrusted(url, f"redirects to {to!r:.200}, which is no {old.scheme} address")
    hub, host = urlsplit(url).hostname or "", new.hostname or ""
    if host != hub and _is_local(host) and not _is_local(hub):
        raise untrusted(url, f"redirects to {host!r:.200}, in the network of this machine")


def _is_local(host: str) -> bool:
    """Whether one of a host's addresses is none of the internet; a proxy may know others."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return not all(ipaddress.ip_address(address[0]).is_global for *_, address in found)


def _skip(answer: Response) -> None:
    """Read an error's body up to a limit, so that nobody else reads it without one."""
    length = 0
    for piece in answer.iter_raw():
        length += len(piece)
        if length > MAX_ERROR_BYTES:
            break
