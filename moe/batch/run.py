"""Offline batches: a file of requests in, a file of answers out, in OpenAI's batch format.

Lines are read as the engine takes them, answered by the code that answers HTTP requests, and
written as they finish. What is in the output file already is not done again, so a batch that was
killed goes on where it was. A line that is wrong gets an answer that says so and stops no other.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic_core import to_json

from moe.batch.files import DUPLICATE, BatchFiles, BatchLine, Tally, custom_id_of, line_key, output
from moe.completion import StreamEvent, places_of
from moe.engine.sequence import RunningSequence
from moe.engine.wave import Group
from moe.errors import RequestError, StructureError
from moe.model import MoE
from moe.server.bodies import parse
from moe.server.errors import APIError, api_error
from moe.server.fields import Json
from moe.server.generation import check_model, make_groups
from moe.server.openai.answer import OpenAIAnswer
from moe.server.openai.chat import ChatAnswer
from moe.server.openai.completion import CompletionAnswer
from moe.server.openai.request import ChatRequest, CompletionRequest

BODIES: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
logger = logging.getLogger("moe.batch")


@dataclass(eq=False)
class _Request:
    """A line that runs."""

    number: int
    custom_id: str
    body: ChatRequest | CompletionRequest
    groups: Sequence[Group]
    left: int
    events: list[StreamEvent] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.sequences[0].prompt_token_ids) for group in self.groups)


class Batch:
    """Runs requests through an engine of its own.

    Args:
        model: what answers.
        model_name: what requests must call it.
        write: takes each answer, in the order in which they are done.
    """

    def __init__(self, model: MoE, model_name: str, write: Callable[[Json], object]) -> None:
        self._model = model
        self._name = model_name
        self._write = write
        self._engine = model.loop()
        self._most_open = 2 * model.profile.profile.engine.max_batch_size
        self._places: dict[RunningSequence, tuple[_Request, int, int]] = {}

    def run(self, lines: Iterator[tuple[int, bytes]], done: set[str]) -> None:
        """Answer numbered lines, but for those whose `line_key` is in ``done``."""
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
        except (APIError, RequestError) as error:
            self._refuse(number, custom_id, api_error(error))

    def _submit(self, number: int, line: BatchLine) -> None:
        body = parse(BODIES[line.url], to_json(line.body))
        check_model([self._name], body.model)
        if body.stream:
            raise APIError(400, "a batch cannot stream; remove it", param="stream")
        groups = make_groups(self._model, body)
        try:
            for group in groups:
                self._engine.submit(group)
        except RequestError:
            self._cancel(groups)
            raise
        places = places_of(groups)
        request = _Request(number, line.custom_id, body, groups, len(places))
        self._places |= {sequence: (request, *place) for sequence, place in places.items()}

    def _step(self) -> None:
        for sequence, outcome in self._engine.step():
            if sequence not in self._places:  # its request has failed in this step
                continue
            request, prompt, sample = self._places[sequence]
            if isinstance(outcome, Exception):
                self._cancel(request.groups)
                self._refuse(request.number, request.custom_id, _told(request.number, outcome))
                continue
            request.events.append(StreamEvent(prompt, sample, outcome, sequence.prompt_token_ids))
            if outcome.finish_reason is not None:
                del self._places[sequence]
                request.left -= 1
                if not request.left:
                    self._finish(request)

    def _finish(self, request: _Request) -> None:
        request_id = uuid.uuid4().hex
        answer = self._answer(request.body, request_id)
        whole = answer.whole(request.num_prompt_tokens, request.events)
        self._write(output(request.number, request.custom_id, 200, request_id, whole, None))

    def _answer(self, body: ChatRequest | CompletionRequest, request_id: str) -> OpenAIAnswer:
        if isinstance(body, ChatRequest):
            return ChatAnswer(body, self._model.codec, request_id, self._name)
        return CompletionAnswer(body, self._model.codec, request_id, self._name)

    def _refuse(self, number: int, custom_id: str | None, error: APIError) -> None:
        reason = {"code": error.code or "request_failed", "message": error.message}
        request_id = uuid.uuid4().hex
        self._write(output(number, custom_id, error.status, request_id, error.body(), reason))

    def _cancel(self, groups: Sequence[Group]) -> None:
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
    Batch(model, model_name, write).run(lines, files.done)
    return files.tally


def _told(number: int, error: Exception) -> APIError:
    """What the answer to a line says of what ended it."""
    if not isinstance(error, StructureError):
        logger.error("line %d failed", number, exc_info=error)
    return api_error(error)
