"""``moe generate --batch-file``: requests in, answers out, both files in OpenAI's batch format.

`BatchJob` reads lines as fast as the engine takes them, answers each with the code that answers
HTTP requests, and writes each answer when it is complete. It skips lines that the output file
already answers, so that a batch that was killed can be continued. An invalid line gets an error as
its answer; the others go on. The next run tries lines with an error again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field
from pydantic_core import from_json, to_json

from moe.commands.console import step_bar
from moe.commands.terminal import load
from moe.completion import StreamEvent, places_of
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import BusyError, RequestError, StructureError
from moe.loading.local import public_name
from moe.model import MoE
from moe.sequence import RunningSequence
from moe.server.bodies import RequestBody, parse
from moe.server.errors import APIError, api_error
from moe.server.fields import Json
from moe.server.generation import ANY_MODEL, check_model, make_groups
from moe.server.ignored import Ignored
from moe.server.openai.answers import ChatAnswer, CompletionAnswer, OpenAIAnswer
from moe.server.openai.request import ChatRequest, CompletionRequest
from moe.settings.profile import LoadedProfile

DUPLICATE = "duplicate_custom_id"
_ID = "batch_req_"
_START = f'{{"id": "{_ID}'.encode()  # of every answer
BODIES: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
logger = logging.getLogger("moe.batch")


@dataclass(eq=False)
class _Request:
    """A line whose sequences run; ``left`` of them have not ended."""

    number: int
    custom_id: str
    body: ChatRequest | CompletionRequest
    groups: Sequence[SequenceGroup]
    left: int
    events: list[StreamEvent] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.sequences[0].prompt_token_ids) for group in self.groups)


class BatchJob:
    """Runs requests through an engine of its own.

    Args:
        model: the model that answers.
        model_name: the name by which requests ask for it.
        write: called with each answer when it is complete.
    """

    def __init__(self, model: MoE, model_name: str, write: Callable[[Json], object]) -> None:
        self._model = model
        self._name = model_name
        self._write = write
        self._engine = model.loop()
        self._most_open = 2 * model.profile.profile.engine.max_batch_size
        self._places: dict[RunningSequence, tuple[_Request, int, int]] = {}

    def run(self, lines: Iterator[tuple[int, bytes]], done: set[str]) -> None:
        """Answer numbered lines, except those whose `line_key` is in ``done``."""
        seen: set[str] = set()
        while True:
            while len(self._places) < self._most_open and (line := next(lines, None)) is not None:
                self._take(*line, seen, done)
            if self._engine.idle:
                break
            self._step()

    def _take(self, number: int, data: bytes, seen: set[str], done: set[str]) -> None:
        custom_id = custom_id_of(data)
        repeated = custom_id in seen
        if custom_id is not None:
            seen.add(custom_id)
        if line_key(number, None if repeated else custom_id) in done:
            return
        try:
            if repeated:
                raise APIError(400, f"an earlier line has custom_id {custom_id!r}", code=DUPLICATE)
            self._submit(number, parse(BatchLine, data))
        except (APIError, RequestError, BusyError) as error:
            self._refuse(number, custom_id, api_error(error))

    def _submit(self, number: int, line: BatchLine) -> None:
        settings = self._model.profile.profile.server
        ignored = Ignored() if settings.unknown_fields == "take" else None
        body = parse(BODIES[line.url], to_json(line.body), ignored)
        check_model([self._name, *([ANY_MODEL] if settings.any_model else [])], body.model)
        if body.stream:
            raise APIError(400, "a batch cannot stream; remove it", param="stream")
        groups = make_groups(self._model, body)
        if ignored is not None:
            ignored.log(f"line {number}")
        try:
            for group in groups:
                self._engine.submit(group)
        except (RequestError, BusyError):
            self._cancel(groups)
            raise
        places = places_of(groups)
        request = _Request(number, line.custom_id, body, groups, len(places))
        self._places |= {sequence: (request, *place) for sequence, place in places.items()}

    def _step(self) -> None:
        for sequence, outcome in self._engine.step():
            if sequence not in self._places:  # another sequence of its request failed in this step
                continue
            request, prompt, sample = self._places[sequence]
            if isinstance(outcome, Exception):
                self._cancel(request.groups)
                if not isinstance(outcome, StructureError):
                    logger.error("line %d failed", request.number, exc_info=outcome)
                self._refuse(request.number, request.custom_id, api_error(outcome))
                continue
            request.events.append(StreamEvent(prompt, sample, outcome, sequence.prompt_token_ids))
            if outcome.finish_reason is not None:
                del self._places[sequence]
                request.left -= 1
                if not request.left:
                    self._finish(request)

    def _finish(self, request: _Request) -> None:
        request_id = uuid.uuid4().hex
        body, about = request.body, (self._model.codec, request_id, self._name)
        answer: OpenAIAnswer
        if isinstance(body, ChatRequest):
            answer = ChatAnswer(body, *about)
        else:
            answer = CompletionAnswer(body, *about)
        whole = answer.whole(request.num_prompt_tokens, request.events)
        self._write(output(request.number, request.custom_id, 200, request_id, whole, None))

    def _refuse(self, number: int, custom_id: str | None, error: APIError) -> None:
        reason = {"code": error.code or "request_failed", "message": error.message}
        request_id = uuid.uuid4().hex
        self._write(output(number, custom_id, error.status, request_id, error.body(), reason))

    def _cancel(self, groups: Sequence[SequenceGroup]) -> None:
        for group in groups:
            self._engine.cancel(group)
            for sequence in group.sequences:
                self._places.pop(sequence, None)


def run_batch(
    model: MoE,
    model_name: str,
    files: BatchFiles,
    on_answer: Callable[[Tally], object] = lambda _: None,
) -> Tally:
    """Answer every line that has no answer yet.

    Args:
        on_answer: called at the start and after every answer.
    """

    def write(answer: Json) -> None:
        files.write(answer)
        on_answer(files.tally)

    on_answer(files.tally)
    lines = ((number, line) for number, line in enumerate(files.source, 1) if line.strip())
    BatchJob(model, model_name, write).run(lines, files.done)
    return files.tally


class BatchLine(RequestBody):
    """One line of the input."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass
class Tally:
    """Number of answers in the output file, including those of earlier runs that did not fail."""

    answered: int = 0
    failed: int = 0

    def add(self, answer: Json) -> None:
        self.answered += answer["error"] is None
        self.failed += answer["error"] is not None


@dataclass
class BatchFiles:
    """The open input and output files; answers are appended to the output."""

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
                self.target.close()  # it tries to flush again
            raise
        self.tally.add(answer)


@contextmanager
def open_files(source: Path, target: Path) -> Iterator[BatchFiles]:
    """Open both files, and read which answers ``target`` has already.

    Answers with an error are removed from ``target``: their lines are tried again.

    Raises:
        RequestError: a file cannot be used, or another process writes to ``target``.
        KeyboardInterrupt: the message says that the answers so far are kept.
    """
    with ExitStack() as closing:
        try:
            lines = closing.enter_context(source.open("rb"))
            if not lines.seekable():
                raise RequestError(
                    f"{source} is a pipe, and --batch-file reads its lines twice; name a file"
                )
            if target.exists() and not target.is_file():  # /dev/full can be read for ever
                raise RequestError(f"{target} is not a regular file; --out must keep its answers")
            answers = closing.enter_context(target.open("a+b"))
            if os.path.samefile(source, target):
                raise RequestError(f"--batch-file and --out are the same file {source}; name two")
            _lock(answers, target)
            tally = Tally()
            done = _repair(answers, target, tally)
            if tally.failed:
                _remove_failures(answers, target)  # the lock on the old file lasts to the end
                tally.failed = 0
                answers = closing.enter_context(target.open("a+b"))
                _lock(answers, target)
            files = BatchFiles(lines, answers, tally, done)
        except OSError as error:
            what = error.filename or target
            raise RequestError(f"cannot use {what}: {error.strerror}") from error
        try:
            yield files
        except KeyboardInterrupt as stop:
            kept = f"; answers so far are in {target}, and the same command goes on from there"
            raise KeyboardInterrupt(kept) from stop


def line_key(number: int, custom_id: str | None) -> str:
    """Identifies a line of the input among the answers of earlier runs."""
    return f"#{number}" if custom_id is None else f"id:{custom_id}"


def _lock(answers: BinaryIO, target: Path) -> None:
    try:
        fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"another batch is writing to {target}; name another --out") from None


def _remove_failures(answers: BinaryIO, target: Path) -> None:
    """Put a file without the answers that have an error in the place of ``target``.

    A kill at any time leaves the old file or the new one, whole.
    """
    target = target.resolve()  # a link stays one
    new = target.with_name(f".{target.name}.moe-batch")
    answers.seek(0)
    try:
        with new.open("wb") as kept:
            shutil.copymode(target, new)
            kept.writelines(line for line in answers if from_json(line)["error"] is None)
            kept.flush()
            os.fsync(kept.fileno())
        new.replace(target)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _repair(answers: BinaryIO, target: Path, tally: Tally) -> set[str]:
    """Remove an incomplete last answer; returns the `line_key` of every one without an error."""
    done: set[str] = set()
    end = 0
    answers.seek(0)
    for count, line in enumerate(answers, 1):
        if not line.endswith(b"\n") and _START.startswith(line[: len(_START)]):
            break
        try:
            answer = from_json(line)
            number = int(answer["id"].removeprefix(_ID))
            if answer["error"] is None:
                done.add(line_key(number, answer["custom_id"]))
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
    """The custom_id of a line that may be invalid otherwise."""
    try:
        line = from_json(data)
    except ValueError:
        return None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def batch(name: str | Path, profile: LoadedProfile, source: Path, target: Path) -> int:
    """``moe generate --batch-file``: 0 if every line was answered, 1 if some failed."""
    with open_files(source, target) as files:
        model = load(name, profile)
        total = sum(1 for line in files.source if line.strip())
        files.source.seek(0)
        with step_bar() as on_step:

            def show(now: Tally) -> None:
                done = now.answered + now.failed
                on_step(f"answering, {now.failed} failed", done, total)

            tally = run_batch(model, public_name(name), files, show)
    failed = (
        f", {tally.failed} failed: their lines say why, and the same command tries them again"
        if tally.failed
        else ""
    )
    print(f"moe: {tally.answered} answered{failed}; see {target}", file=sys.stderr)
    return 1 if tally.failed else 0
