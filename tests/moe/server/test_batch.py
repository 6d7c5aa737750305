"""Offline batches: the server's answers, one line's mistakes, and kills at any byte."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe import MoE
from moe.commands.batch import BatchJob, open_files, run_batch
from moe.errors import RequestError, StructureError
from moe.sequence import RunningSequence
from offload.errors import OffloadError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 6}),
    (COMPLETIONS, {"prompt": ["one", "two"], "max_tokens": 4, "n": 2, "logprobs": 3}),
    (COMPLETIONS, {"prompt": [[40, 41], [42]], "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 9, "temperature": 1.0, "seed": 7, "n": 3}),
    (COMPLETIONS, {"prompt": "stop", "max_tokens": 30, "stop": ["a", "e", "o"]}),
    (COMPLETIONS, {"prompt": "echo", "max_tokens": 3, "echo": True, "logprobs": 1}),
    (CHAT, {"messages": HELLO, "max_tokens": 5}),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 4, "logit_bias": {"50": 100}}),
]


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": url}
    return json.dumps(request | {"body": {"model": "tiny"} | body}).encode() + b"\n"


LINES = [line(f"r{i}", url, **body) for i, (url, body) in enumerate(BODIES)]


class Files:
    """A pair of files in a folder of their own."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_bytes(content)

    def run(self, model: MoE) -> list[dict[str, Any]]:
        with open_files(self.source, self.target) as files:
            run_batch(model, "tiny", files)
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.target.read_bytes().splitlines()]


def by_id(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Choices of each answer, or its message."""
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {
        answer["id"]: answer["error"] or answer["response"]["body"]["choices"] for answer in answers
    }


def test_answers_are_those_of_the_server(model: MoE, server: Any, tmp_path: Path) -> None:
    answers = Files(tmp_path, b"".join(LINES)).run(model)
    assert {answer["custom_id"] for answer in answers} == {f"r{i}" for i in range(len(BODIES))}
    for answer in answers:
        url, body = BODIES[int(answer["custom_id"][1:])]
        expected = server.http.post(url, json={"model": "tiny"} | body).json()
        got = answer["response"]["body"]
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert got.keys() == expected.keys()
        for key in got.keys() - {"id", "created"}:
            assert got[key] == approximately(expected[key]), (body, key)


def approximately(value: Any) -> Any:
    """Log probabilities may differ in their last bits."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value


MISTAKES = [
    (b"{nonsense\n", 400, "not valid JSON"),
    (b"[1]\n", 400, "must be a JSON object"),
    (b"\xff\xfe\n", 400, "not valid JSON"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {}}\n', 400, "'custom_id' is missing"),
    (line("x", "/v1/embeddings", prompt="x"), 400, "url: Input should be"),
    (line("x").replace(b"POST", b"GET"), 400, "method: Input should be 'POST'"),
    (line("x"), 400, "'prompt' is missing"),
    (line("x", prompt="x", best_of=2), 400, "best_of is not supported: send n, and choose"),
    (line("x", prompt="x", temperature=9), 400, "temperature"),
    (line("x", prompt="x", stream=True), 400, "a batch cannot stream"),
    (line("x", prompt="x" * 500), 400, "and the context is 256 tokens, answer included"),
    (line("x", prompt="x", model="other"), 404, "no such model"),
    (line("good", prompt="x"), 400, "an earlier line has custom_id 'good'"),
]


@pytest.mark.parametrize(("mistake", "status", "message"), MISTAKES)
def test_a_line_that_is_wrong_stops_no_other(
    model: MoE, tmp_path: Path, mistake: bytes, status: int, message: str
) -> None:
    good = [line("good", prompt="a", max_tokens=2), line("last", prompt="b", max_tokens=2)]
    files = Files(tmp_path, good[0] + b"\n" + mistake + good[1])
    answers = {answer["id"]: answer for answer in files.run(model)}
    assert answers.keys() == {"batch_req_1", "batch_req_3", "batch_req_4"}
    refused = answers["batch_req_3"]
    assert refused["response"]["status_code"] == status
    assert message in refused["error"]["message"]
    assert refused["response"]["body"]["error"]["message"] == refused["error"]["message"]
    is_long = "the context is" in message
    assert (refused["error"]["code"] == "context_length_exceeded") == is_long
    assert answers["batch_req_1"]["error"] is answers["batch_req_4"]["error"] is None
    assert by_id(files.run(model)) == by_id([*answers.values()]), "a second run changes nothing"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mistakes=st.lists(st.sampled_from([None, *range(len(MISTAKES) - 1)]), min_size=1, max_size=5),
    mended=st.sets(st.integers(0, 4)),
)
def test_a_line_that_failed_is_tried_again(
    model: MoE,
    tmp_path_factory: pytest.TempPathFactory,
    mistakes: list[int | None],
    mended: set[int],
) -> None:
    """Whatever its mistake was, the answer to the mended line takes the place of the error."""
    good = [line(f"r{i}", prompt="a", max_tokens=1) for i in range(len(mistakes))]
    first = [own if wrong is None else MISTAKES[wrong][0].replace(b'"x"', b'"r%d"' % i, 1)
             for i, (own, wrong) in enumerate(zip(good, mistakes, strict=True))]  # fmt: skip
    files = Files(tmp_path_factory.mktemp("again"), b"".join(first))
    before = {answer["id"]: answer for answer in files.run(model)}
    files.target.chmod(0o640)
    second = [good[i] if i in mended else own for i, own in enumerate(first)]
    files.source.write_bytes(b"".join(second))
    after = {answer["id"]: answer for answer in files.run(model)}
    assert len(files.answers()) == len(after) == len(before) == len(good)
    for i, (name, wrong) in enumerate(zip(sorted(before), mistakes, strict=True)):
        assert (after[name]["error"] is None) == (wrong is None or i in mended)
        if wrong is None:
            assert after[name] == before[name], "an answer is kept"
    assert files.target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in files.target.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_failed_is_removed_from_the_file_that_a_link_names(model: MoE, tmp_path: Path) -> None:
    files = Files(tmp_path, line("x", prompt="x", best_of=2) + LINES[0])
    (tmp_path / "far").mkdir()
    files.target.symlink_to(tmp_path / "far/out")
    files.run(model)
    with open_files(files.source, files.target) as opened:
        assert (opened.tally.answered, opened.tally.failed) == (1, 0)
        assert opened.done == {"id:r0"}
        with (
            pytest.raises(RequestError, match="another batch is writing"),
            open_files(files.source, files.target),
        ):
            pass
    assert files.target.is_symlink()
    assert len(files.answers()) == 1


def test_a_full_disk_is_said_with_the_file(model: MoE, tmp_path: Path) -> None:
    files = Files(tmp_path, LINES[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*out\.jsonl"):
            files.run(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(files.run(model)) == 1, "what was cut off is done again"


@pytest.fixture(scope="module")
def mixed(model: MoE, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """An input with all kinds of lines, and its whole output."""
    repeated = line("r0", prompt="again")
    content = b"".join([*LINES[:4], b"{nonsense\n", repeated, *LINES[4:]])
    files = Files(tmp_path_factory.mktemp("whole"), content)
    files.run(model)
    return content, files.target.read_bytes()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1))
def test_a_kill_at_any_byte_changes_nothing_in_the_end(
    model: MoE, tmp_path_factory: pytest.TempPathFactory, mixed: tuple[bytes, bytes], cut: float
) -> None:
    content, whole = mixed
    files = Files(tmp_path_factory.mktemp("cut"), content)
    files.target.write_bytes(whole[: int(cut * len(whole))])
    complete = files.target.read_bytes().splitlines(keepends=True)
    kept = [text for text in complete if text.endswith(b"\n") and b'"error": null}' in text]
    answers = files.run(model)
    assert files.target.read_bytes().startswith(b"".join(kept))
    expected = [json.loads(text) for text in whole.splitlines()]
    assert len(answers) == len(expected)
    assert by_id(answers) == approximately(by_id(expected))


def test_an_interrupt_keeps_what_is_done(
    model: MoE, tmp_path: Path, mixed: tuple[bytes, bytes]
) -> None:
    files = Files(tmp_path, mixed[0])

    def interrupt(tally: Any) -> None:
        if tally.answered == 2:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt, match=r"answers so far are in .*, and the same command"),
        open_files(files.source, files.target) as opened,
    ):
        run_batch(model, "tiny", opened, interrupt)
    assert 2 <= len(files.answers()) < len(BODIES) + 2
    assert len(files.run(model)) == len(BODIES) + 2


def test_lines_are_read_as_they_are_needed(text_checkpoint: Path) -> None:
    model = MoE.from_pretrained(text_checkpoint, engine={"max_batch_size": 2})
    read = written = furthest = 0

    def lines() -> Iterator[tuple[int, bytes]]:
        nonlocal read
        for read in range(1, 31):
            yield read, line(f"r{read}", prompt="x", max_tokens=2)

    def write(_: Any) -> None:
        nonlocal written, furthest
        written += 1
        furthest = max(furthest, read - written)

    BatchJob(model, "tiny", write).run(lines(), set())
    assert written == 30
    assert furthest <= 4


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RuntimeError("broken"), 500, None),
        (OffloadError("/secret/store cannot be read"), 503, "weights_unreadable"),
        (StructureError("too many states"), 400, "structure_too_complex"),
    ],
)
def test_a_sequence_that_fails_concerns_its_line_only(
    error: Exception,
    status: int,
    code: str | None,
    model: MoE,
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is answered as the server would."""
    append = RunningSequence.append_token

    def failing(sequence: RunningSequence, token: Any) -> Any:
        if sequence.prompt_token_ids == model.codec.encode("unlucky"):
            raise error
        return append(sequence, token)

    monkeypatch.setattr(RunningSequence, "append_token", failing)
    unlucky = line("bad", prompt=["fine", "unlucky"], n=2, max_tokens=3)
    files = Files(tmp_path, unlucky + line("good", prompt="fine", max_tokens=3))
    answers = {answer["custom_id"]: answer for answer in files.run(model)}
    bad = answers["bad"]["response"]
    assert bad["status_code"] == status
    assert bad["body"]["error"]["code"] == code
    assert answers["good"]["error"] is None
    assert ("line 1 failed" in caplog.text) == (status >= 500)
    answer = server.http.post(COMPLETIONS, json={"prompt": "unlucky", "max_tokens": 3})
    assert (answer.status_code, answer.json()) == (status, bad["body"])


def test_what_fails_while_files_are_open_is_not_blamed_on_them(tmp_path: Path) -> None:
    files = Files(tmp_path, LINES[0])
    with pytest.raises(ConnectionError, match="a rank"), open_files(files.source, files.target):
        raise ConnectionError("a rank is gone")


def test_files_that_cannot_be_used_are_left_alone(tmp_path: Path) -> None:
    files = Files(tmp_path, LINES[0])
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")

    def refused(source: Path, target: Path, why: str) -> None:
        with pytest.raises(RequestError, match=why), open_files(source, target):
            pass

    refused(files.source, files.source, "are the same file")
    refused(
        files.source, Path("/dev/zero"), r"/dev/zero is not a regular file"
    )  # it has no last answer
    refused(files.source, notes, r"line 1 of .*notes.txt is not an answer of a batch")
    notes.write_text("my notes")  # one line without an end, which no kill has left
    refused(files.source, notes, r"line 1 of .*notes.txt is not an answer of a batch")
    reading, writing = os.pipe()  # as of <(jq ...) in a shell
    refused(Path(f"/dev/fd/{reading}"), files.target, "is a pipe, and")
    os.close(reading)
    os.close(writing)
    refused(tmp_path / "absent", files.target, r"cannot use .*absent: No such file")
    with open_files(files.source, files.target):
        refused(files.source, files.target, "another batch is writing")
    assert notes.read_text() == "my notes"
    assert files.source.read_bytes() == LINES[0]


def test_fields_without_effect_are_taken(model: MoE, tmp_path: Path) -> None:
    (answer,) = Files(tmp_path, line("x", prompt="x", max_tokens=1, nonsense=1)).run(model)
    assert answer["response"]["status_code"] == 200
