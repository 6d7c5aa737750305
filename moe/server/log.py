"""The log of ``moe serve``: a line for each request, beside what the server has to say itself.

    2026-11-28 18:40:12 INFO POST /v1/chat/completions 200 seconds=3.214 key=ann in=24 out=128 ...

`write_log` sends what all loggers say to stderr or a file, as text or as JSON lines. A thread
writes: a reader that stops, or a full disk, holds up no request; lines without room in its queue
or on the disk are dropped, and the next line says how many. `RequestLog` makes the lines of
requests. None has a text of a client: what an error message quotes is left out, and a path is the
route's.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from moe.errors import ProfileError
from moe.fair_pool import starts
from moe.server.errors import api_error

if TYPE_CHECKING:
    from moe.server.engine_thread import GenerationJob

LogForm = Literal["text", "json"]
_MOST_WAITING = 10_000
"""Lines that wait to be written; further ones are dropped, and counted in the next line."""
_LONGEST_MESSAGE = 300
_logger = logging.getLogger("moe.requests")
_QUOTED = re.compile(r"""(?s)'[^']*'|"[^"]*"|`[^`]*`|\[^\]*\]|\bgot .*""")


class RequestLog:
    """Notes one request; made when it arrives."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def end(
        self, scope: Mapping[str, Any], status: int, key: str | None, *, looks: bool = False
    ) -> None:
        """Write the line of a request that has ended.

        Args:
            scope: of ASGI, with what routes noted: ``request_id``; ``job``, the `GenerationJob` of
                its tokens; ``error``, the `APIError` that it was answered with.
            status: of the answer; 499: the client left before there was one.
            key: the name of the client's API key.
            looks: it only looks, as monitors do: shown at the level debug.
        """
        method, job = scope["method"], scope["job"]
        error = scope["error"] or (job and job.error)
        level = logging.DEBUG if looks else logging.INFO
        if not _logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": method,
            "route": getattr(scope.get("route"), "path", "-"),
            "status": status,
            "seconds": round(time.perf_counter() - self._start, 3),
        }
        if key:
            fields["key"] = key
        if job is not None:
            fields |= figures(job)
        if error is not None:
            fields["error"] = without_quotes(api_error(error).message)
        fields["request"] = scope["request_id"]
        first = (method, fields["route"], str(status))
        rest = (f"{name}={_word(fields[name])}" for name in list(fields)[3:])
        _logger.log(level, "%s", " ".join([*first, *rest]), extra={"fields": fields})


def figures(job: GenerationJob) -> dict[str, Any]:
    """Tokens and times of a request: ``in`` and ``cached`` tokens of its prompts, ``out`` of its
    answers, ``ttft`` in seconds and ``rate`` in tokens/s from the first token on."""
    sequences = [sequence for group in job.groups for sequence in group.sequences]
    new = sum(len(sequence.token_ids) for sequence in sequences)
    found: dict[str, Any] = {
        "in": job.num_prompt_tokens,
        "cached": max((sequence.num_cached_tokens for sequence in sequences), default=0),
        "out": new,
    }
    if job.clock.first_s is not None:
        found["ttft"] = round(job.clock.first_s, 3)
        if job.clock.decode_s > 0:
            found["rate"] = round((new - 1) / job.clock.decode_s, 1)
    found["finish"] = ",".join(sequence.finish_reason or "cancelled" for sequence in sequences)
    return found


def without_quotes(message: str) -> str:
    """A message without what it quotes: that may be a client's text."""
    cut = re.sub(r"\s+", " ", _QUOTED.sub("...", message))
    return "".join(filter(str.isprintable, cut))[:_LONGEST_MESSAGE]


class _Formatter(logging.Formatter):
    def __init__(self, form: LogForm) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        message, level = super().format(record), record.levelname
        if self._form == "text":
            return f"{self.formatTime(record, self.datefmt)} {level} {message}"
        fields = getattr(record, "fields", {"message": message})
        return json.dumps({"time": round(record.created, 3), "level": level.lower(), **fields})


def _word(value: object) -> str:
    text = str(value)
    return json.dumps(text) if re.search(r'[\s"=]', text) else text


class _Writer(logging.Handler):
    """Writes lines in a thread of its own; says how many found no room, and where.

    Args:
        file: without a buffer, so that a line is written or known to be lost.
        form: of the lines.
    """

    def __init__(self, file: io.RawIOBase, form: LogForm) -> None:
        super().__init__()
        self.setFormatter(_Formatter(form))
        self._file = file
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._dropped = self._lost = 0
        self._why_lost, self._is_torn = "", False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        if not starts(self._thread):  # lines are written where they come from
            self._thread = None

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self._thread is None:
            self._write(line)
            return
        try:
            self._waiting.put_nowait(line)
            if self._dropped:
                self._waiting.put_nowait(self._told(self._dropped, "it is not read in time"))
                self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def end(self, timeout_s: float = 2.0) -> None:
        """Write what waits, as far as the time allows."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._write(line)

    def _write(self, line: str) -> None:
        try:
            if self._lost:
                self._put(self._told(self._lost, self._why_lost))
                self._lost = 0
            self._put(line)
        except (OSError, ValueError) as error:  # a full disk, a reader that has gone: all goes on
            self._lost += 1
            self._why_lost = getattr(error, "strerror", None) or str(error)

    def _put(self, line: str) -> None:
        """Raises OSError if the whole line finds no room; its beginning may be there then."""
        data = f"{line}\n".encode(errors="backslashreplace")
        if self._is_torn:
            data = b"\n" + data
        while data:
            if not (size := self._file.write(data)):
                raise BlockingIOError(errno.EAGAIN, "it is not read in time")
            data, self._is_torn = data[size:], size < len(data)

    def _told(self, lines: int, why: str) -> str:
        told = f"{lines} lines of this log were dropped: {why}"
        return self.format(logging.LogRecord("moe", logging.WARNING, "", 0, told, None, None))


@contextmanager
def write_log(level: str, file: str | None, form: LogForm) -> Iterator[None]:
    """Write what the server logs, until the end of the block.

    Args:
        level: debug, info, warning or error; debug has requests that only look, too.
        file: the end of this file; None: stderr.
        form: a line of text, or one JSON object a line.

    Raises:
        ProfileError: the file cannot be written.
    """
    try:
        raw = io.FileIO(file, "a") if file is not None else _stderr()
    except OSError as error:
        raise ProfileError(f"--log-file {file!r} cannot be written: {error.strerror}") from None
    writer = _Writer(raw, form)
    everything, ours = logging.getLogger(), logging.getLogger("moe")
    levels = everything.level, ours.level
    everything.addHandler(writer)
    everything.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    ours.setLevel(level.upper())
    try:
        yield
    finally:
        everything.removeHandler(writer)
        everything.setLevel(levels[0])
        ours.setLevel(levels[1])
        writer.end()
        with suppress(OSError):
            raw.close()


def _stderr() -> io.FileIO:
    """The file of stderr; where there is none, the one that forgets."""
    try:
        return io.FileIO(sys.stderr.fileno(), "w", closefd=False)
    except (AttributeError, ValueError):  # closed from the start; replaced, as by a test
        return io.FileIO(os.devnull, "w")
