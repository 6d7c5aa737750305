"""The log: a line a request, with figures and without anybody's text."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.errors import ProfileError
from moe.server.errors import APIError
from moe.server.log import RequestLog, without_quotes, write_log
from tests.moe.server.conftest import Serve

SECRET = "Zaphod"


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """Logs everything; gives the lines when there are as many."""
    path, written = tmp_path / "log", threading.Condition()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with written:
                written.notify()

    def read(count: int) -> list[dict[str, Any]]:
        with written:
            written.wait_for(lambda: len(path.read_text().splitlines()) >= count, timeout=20)
        return [json.loads(line) for line in path.read_text().splitlines()]

    told = Told()
    with write_log("debug", str(path), "json"):
        logging.getLogger("moe").addHandler(told)
        yield read
        logging.getLogger("moe").removeHandler(told)


def test_a_request_has_one_line_with_its_figures(
    serve: Serve, lines: Callable[[int], list[dict[str, Any]]]
) -> None:
    with serve(api_key="s3cret") as server:
        server.http.headers["authorization"] = "Bearer s3cret"
        body = {"prompt": SECRET, "max_tokens": 5, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body)
        streamed = server.http.post("/v1/completions", json=body | {"stream": True, "n": 2})
        server.http.get("/health")
        by_id = {line["request"]: line for line in lines(3)}
    usage = answer.json()["usage"]
    first = by_id.pop(answer.headers["x-request-id"])
    second = by_id.pop(streamed.headers["x-request-id"])
    (third,) = by_id.values()
    assert (first["in"], first["out"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert second["out"] == 2 * first["out"]
    assert second["finish"] == f"{first['finish']},{first['finish']}"
    for line in (first, second):
        assert (line["method"], line["route"]) == ("POST", "/v1/completions")
        assert (line["status"], line["level"]) == (200, "info")
        assert 0 < line["ttft"] <= line["seconds"]
        assert line["rate"] > 0
        assert line["key"]
    assert (third["route"], third["level"]) == ("/health", "debug")


def test_a_refusal_says_why_and_quotes_nobody(
    serve: Serve, lines: Callable[[int], list[dict[str, Any]]]
) -> None:
    wrong: list[dict[str, Any]] = [
        {"model": SECRET, "prompt": "x"},
        {"prompt": "x", "stop": {SECRET: 1}},
        {"prompt": "x", "temperature": SECRET},
        {"prompt": ["x", SECRET, 3]},
        {"messages": [{"role": SECRET, "content": "x"}]},
        {"prompt": "x", "response_format": {"type": SECRET}},
        {"prompt": SECRET * 5000},
        {"prompt": "x", "structured_outputs": {"regex": f"({SECRET}"}},
    ]
    with serve(unknown_fields="refuse") as server:
        server.http.post(f"/{SECRET}")
        for body in wrong:
            for route in ("completions", "chat/completions", "messages", "responses"):
                server.http.post(f"/v1/{route}", json=body)
        server.http.post("/v1/completions", content=f'{{"{SECRET}'.encode())
        count = 2 + 4 * len(wrong)
        found = lines(count)
    refused = [line for line in found if line["status"] >= 400]
    assert len(refused) > count - 6
    assert all(line["error"] for line in refused)
    assert refused[0]["route"] == "-"
    assert SECRET not in json.dumps(found)


def test_a_client_that_leaves_is_499(
    serve: Serve, gate: Any, lines: Callable[[int], list[dict[str, Any]]]
) -> None:
    with serve() as server:
        with server.in_flight({"model": "tiny", "prompt": "hello", "max_tokens": 9}):
            assert gate.reached.wait(20)
        (line,) = lines(1)
        gate.open.set()
    assert line["status"] == 499


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("model 'x y' is not here", "model ... is not here"),
        ('unknown field "a\nb"; got {"c": 1}', "unknown field ...; ..."),
        ("a\x1b[31m b", "a[31m b"),
        ("x" * 999, "x" * 300),
    ],
)
def test_quotes_are_left_out(message: str, shown: str) -> None:
    assert without_quotes(message) == shown


def test_text_has_the_same_fields(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with write_log("info", str(path), "text"):
        scope = {"method": "POST", "job": None, "error": APIError(429, "a b"), "request_id": "id"}
        RequestLog().end(scope, 429, "ann")
        RequestLog().end(scope | {"method": "GET", "error": None}, 503, None, looks=True)
        logging.getLogger("moe").warning("a notice")
        logging.getLogger("others").info("nothing")
    request, notice = path.read_text().splitlines()
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    line = rf'{at} INFO POST - 429 seconds=[\d.e-]+ key=ann error="a b" request=id'
    assert re.fullmatch(line, request)
    assert notice.endswith(" WARNING a notice")


def test_a_log_that_nobody_reads_holds_up_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A pipe is full after 64 KB: the lines that find no room are dropped, and said to be."""
    reader, end = os.pipe()
    path = f"/proc/self/fd/{end}"
    said: list[bytes] = []

    def drain() -> None:
        while data := os.read(reader, 1 << 16):
            said.append(data)

    draining = threading.Thread(target=drain)
    with write_log("info", path, "text"):
        for number in range(20_000):
            logging.getLogger("moe").info("a line of some length, number %d", number)
        draining.start()
        while not any(b"number 9000" in part for part in said):
            pass
        logging.getLogger("moe").info("the last one")
    os.close(end)
    draining.join()
    os.close(reader)
    text = b"".join(said)
    assert re.search(rb"\d+ lines of this log were dropped", text)
    assert b"the last one" in text


def test_a_disk_that_is_full_costs_its_lines_and_the_next_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system takes a part of a line, then nothing, then all again."""
    room, write = [60], io.FileIO.write

    class Disk(io.FileIO):
        def write(self, data: Any, /) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = write(self, data[: room[0]])
            room[0] -= taken
            return taken

    monkeypatch.setattr("moe.server.log.io.FileIO", Disk)
    monkeypatch.setattr("moe.server.log.starts", lambda _: False)  # lines are written at once
    path, logger = tmp_path / "log", logging.getLogger("moe")
    with write_log("info", str(path), "text"):
        for number in range(4):
            logger.info("line %d", number)
        room[0] = 10_000
        logger.info("line 4")
    assert capfd.readouterr().err == ""
    lines = [line.partition("INFO ")[2] or line for line in path.read_text().splitlines()]
    assert lines[0] == "line 0"
    assert lines[-1] == "line 4"
    assert lines[-2].endswith("WARNING 3 lines of this log were dropped: No space left on device")
    assert len(lines) == 4  # and the beginning of line 1


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    message = "--log-file '.*' cannot be written: No such file or directory"
    with pytest.raises(ProfileError, match=message):
        write_log("info", str(tmp_path / "no" / "log"), "text").__enter__()


def test_without_threads_lines_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    path = tmp_path / "log"
    with write_log("info", str(path), "text"), closing(httpx.Client()):
        logging.getLogger("moe").info("a line")
        assert path.read_text().endswith("INFO a line\n")
