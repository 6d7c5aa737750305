"""The two files of a batch: lines of requests, and lines of answers that survive a kill."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field
from pydantic_core import from_json

from moe.errors import RequestError
from moe.server.base import RequestBody
from moe.server.fields import Json

DUPLICATE = "duplicate_custom_id"
_ID = "batch_req_"
_FIRST = f'{{"id": "{_ID}'.encode()  # what every answer begins with


class BatchLine(RequestBody):
    """One line of the input."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass
class Tally:
    """Answers in the output file, those of earlier runs included."""

    answered: int = 0
    failed: int = 0

    def add(self, answer: Json) -> None:
        self.answered += answer["error"] is None
        self.failed += answer["error"] is not None


@dataclass
class BatchFiles:
    """Both files, open; answers are only ever appended."""

    source: BinaryIO
    target: BinaryIO
    tally: Tally
    done: set[str]

    def write(self, answer: Json) -> None:
        try:
            self.target.write(json.dumps(answer).encode() + b"\n")
            self.target.flush()
        except OSError as error:  # a full disk: the system does not say which file
            error.filename = self.target.name
            with suppress(OSError):
                self.target.close()  # which tries once more
            raise
        self.tally.add(answer)


@contextmanager
def open_files(source: Path, target: Path) -> Iterator[BatchFiles]:
    """Open both, and find out what ``target`` has already.

    Raises:
        RequestError: a file cannot be used, or another process writes to ``target``.
        KeyboardInterrupt: says what is kept.
    """
    with ExitStack() as closing:
        try:
            lines = closing.enter_context(source.open("rb"))
            if not lines.seekable():
                raise RequestError(f"{source} is no file but a pipe; --batch reads its lines twice")
            if target.exists() and not target.is_file():  # /dev/full can be read for ever
                raise RequestError(f"{target} is no file; --out keeps answers to go on from")
            answers = closing.enter_context(target.open("a+b"))
            if os.path.samefile(source, target):
                raise RequestError(f"--batch and --out are the same file {source}; name two")
            _lock(answers, target)
            tally = Tally()
            files = BatchFiles(lines, answers, tally, _repair(answers, target, tally))
        except OSError as error:
            what = error.filename or target
            raise RequestError(f"cannot use {what}: {error.strerror}") from error
        try:
            yield files
        except KeyboardInterrupt as stop:
            kept = f"; answers so far are in {target}, and the same command goes on from there"
            raise KeyboardInterrupt(kept) from stop


def _lock(answers: BinaryIO, target: Path) -> None:
    try:
        fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"another batch is writing to {target}; name another --out") from None


def line_key(number: int, custom_id: str | None) -> str:
    """What tells a line of the input that is answered already."""
    return f"#{number}" if custom_id is None else f"id:{custom_id}"


def _repair(answers: BinaryIO, target: Path, tally: Tally) -> set[str]:
    """Cut off what a kill left unfinished; `line_key` of every answer that is there."""
    done: set[str] = set()
    end = 0
    answers.seek(0)
    for count, line in enumerate(answers, 1):
        if not line.endswith(b"\n") and _FIRST.startswith(line[: len(_FIRST)]):
            break
        try:
            answer = from_json(line)
            number = int(answer["id"].removeprefix(_ID))
            repeated = (answer["error"] or {}).get("code") == DUPLICATE
            done.add(line_key(number, None if repeated else answer["custom_id"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(
                f"line {count} of {target} is not an answer of a batch; name another --out"
            ) from None
        tally.add(answer)
        end += len(line)
    answers.truncate(end)
    return done


def output(
    number: int,
    custom_id: str | None,
    status: int,
    request_id: str,
    body: Json,
    error: Json | None,
) -> Json:
    return {
        "id": f"{_ID}{number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": error,
    }


def custom_id_of(data: bytes) -> str | None:
    """That of a line that may otherwise be wrong."""
    try:
        line = from_json(data)
    except ValueError:
        return None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return custom_id if isinstance(custom_id, str) else None
