"""API keys: one from the command line, or several from a file, each with a name and limits.

The file is YAML, a name for each key::

    alice: a-secret
    bob: {key: another, requests_per_minute: 60, requests_at_once: 4, tokens_per_day: 1000000}

It is read again when it changes, so that a key can be revoked while the server runs. Keys are
bytes: headers are not text in any one encoding.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from starlette.requests import Request

from experts.files import read_small
from moe.errors import MoEError
from moe.server.errors import APIError

_MINUTE_S, _DAY_S = 60.0, 86400
_MOST_BYTES = 2**20
WATCH_S = 2.0
"""Seconds between two looks at the file."""
logger = logging.getLogger("moe.server")


class KeyRecord(BaseModel):
    """A key as the file has it; a limit of null is none."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: SecretStr
    requests_per_minute: int | None = Field(default=None, ge=1, le=100_000)
    requests_at_once: int | None = Field(default=None, ge=1, le=100_000)
    tokens_per_day: int | None = Field(default=None, ge=1)


class ApiKey:
    """A key, and what its requests have used. Used in the event loop only.

    Args:
        name: for the log; never the key.
        key: what clients send.
        limits: of its requests.
    """

    def __init__(self, name: str, key: bytes, limits: KeyRecord | None = None) -> None:
        self.name = name
        self.renew(key, limits)
        self._begun: deque[float] = deque()  # times within the last minute
        self._now = 0
        self._tokens = 0
        self._day_ends = 0.0  # of `time.monotonic`: the clock may be set meanwhile

    def renew(self, key: bytes, limits: KeyRecord | None) -> None:
        """Change the key and its limits; what has been used stays used."""
        self.digest = hashlib.sha256(key).digest()
        self._limits = limits

    def begin(self) -> None:
        """Count a request, which has to `end`.

        Raises `APIError` 429 if a limit forbids it; then it counts for none.
        """
        limits, now = self._limits, time.monotonic()
        if limits is not None:
            while self._begun and self._begun[0] <= now - _MINUTE_S:
                self._begun.popleft()
            if (most := limits.requests_per_minute) is not None and len(self._begun) >= most:
                wait = int(self._begun[-most] + _MINUTE_S - now) + 1
                raise _too_many(f"{most} requests a minute", wait)
            if limits.requests_at_once is not None and self._now >= limits.requests_at_once:
                raise _too_many(f"{limits.requests_at_once} requests at once", 1)
            if limits.tokens_per_day is not None and self._today() >= limits.tokens_per_day:
                wait = math.ceil(self._day_ends - time.monotonic())
                raise _too_many(f"{limits.tokens_per_day} tokens a day (UTC)", wait)
            if limits.requests_per_minute is not None:
                self._begun.append(now)
        self._now += 1

    def end(self) -> None:
        """A request has been answered."""
        self._now -= 1

    def spend(self, tokens: int) -> None:
        """Count tokens that were read or generated."""
        self._tokens = self._today() + tokens

    def _today(self) -> int:
        now = time.monotonic()
        if now >= self._day_ends:
            left = _DAY_S - time.time() % _DAY_S
            if self._day_ends and left < _DAY_S / 2:  # the clock went back: this day has been
                left += _DAY_S
            self._day_ends = now + left
            self._tokens = 0
        return self._tokens


def _too_many(limit: str, wait_s: int) -> APIError:
    message = f"this API key may have {limit}; try again later"
    return APIError(429, message, code="key_limit", retry_after_s=wait_s)


class ApiKeys:
    """All keys of a server.

    Args:
        keys: at least one.
        file: where those of the file come from; None: there is no file.
        fixed: how many of the keys, the first ones, are not of the file.
    """

    def __init__(
        self, keys: Iterable[ApiKey], file: Path | None = None, fixed: int | None = None
    ) -> None:
        self._keys = list(keys)
        assert self._keys
        self._fixed = self._keys[:fixed]
        self._file, self._stamp = file, _stamp(file)

    def find(self, sent: bytes) -> ApiKey | None:
        """The key that was sent, in a time that does not say how much of it is right."""
        digest, found = hashlib.sha256(sent.strip(b" \t")).digest(), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until this is cancelled."""
        while self._file is not None:
            await asyncio.sleep(WATCH_S)
            if _stamp(self._file) != self._stamp:
                await self.reload()

    async def reload(self) -> None:
        """Read the file again. What cannot be read changes nothing, and is logged."""
        if self._file is None:
            return
        self._stamp = _stamp(self._file)
        try:
            records = await asyncio.to_thread(_read, self._file)
        except (MoEError, RuntimeError) as error:  # no thread to be had
            logger.error("the API keys stay as they were: %s", error)
            return
        known = {key.name: key for key in self._keys[len(self._fixed) :]}
        read = []
        for name, (secret, limits) in records.items():
            key = known.get(name) or ApiKey(name, secret, limits)
            key.renew(secret, limits)
            read.append(key)
        self._keys = [*self._fixed, *read]
        gone = ", ".join(known.keys() - records.keys())
        logger.warning("API keys read again: %d%s", len(read), gone and f", without {gone}")


def caller_of(request: Request) -> str:
    """Whose turn it is when the request's text is worked on: the client's key and address."""
    key = request.scope["api_key"]
    address = request.client.host if request.client is not None else ""
    return address if key is None else f"{key.name} {address}"


def _stamp(file: Path | None) -> tuple[int, ...] | None:
    """Return numbers that change with the file; None if it cannot be found."""
    try:
        found = os.stat(file or "")
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def make_keys(api_key: str | None, file: str | None) -> ApiKeys | None:
    """The keys of ``--api-key`` and ``--api-key-file``; None without both.

    Raises `MoEError` for an empty key, and for a file that is not valid.
    """
    keys = []
    if api_key is not None:
        keys.append(ApiKey("(command line)", _as_bytes(api_key, "--api-key or MOE_API_KEY")))
    fixed, path = len(keys), None if file is None else Path(file)
    if path is not None:
        keys += [ApiKey(name, *about) for name, about in _read(path).items()]
    return ApiKeys(keys, path, fixed) if keys else None


def _as_bytes(key: str, where: str) -> bytes:
    key = key.strip(" \t\r\n")  # a secret read from a file may end with a line break
    if not key:
        raise MoEError(f"the API key of {where} is empty; give one, or leave it out")
    return os.fsencode(key)


def _read(path: Path) -> dict[str, tuple[bytes, KeyRecord]]:
    """The keys of a file and their limits, by name. Raises `MoEError`."""
    try:
        content = yaml.safe_load(read_small(path, _MOST_BYTES))
    except OSError as error:
        raise MoEError(f"cannot read the API keys in {path}: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise MoEError(f"the API keys in {path} are not YAML: {type(error).__name__}") from None
    if not isinstance(content, dict) or not content:
        raise MoEError(f"{path} must have a line NAME: KEY for each API key")
    keys = {}
    for name, value in content.items():
        try:
            record = KeyRecord.model_validate(value if isinstance(value, dict) else {"key": value})
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise MoEError(f"{path}: {name!s:.100}: {where}: {first['msg']}") from None
        key = _as_bytes(record.key.get_secret_value(), f"{name!s:.100} in {path}")
        keys[str(name)] = key, record
    return keys
