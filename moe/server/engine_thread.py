"""The thread that loads the model, owns the engine and steps it (greenlets belong to one thread).

It obeys commands between steps, and hands the tokens of a whole step to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, Protocol

from moe.completion import StreamEvent
from moe.engine.engine import StepLoop
from moe.engine.sequence import RunningSequence
from moe.errors import RequestError
from moe.model import MoE
from moe.server.job import Job

Outcomes = list[tuple[Job, StreamEvent | Exception]]


class Listener(Protocol):
    """Who hears of what happens; called in the event loop."""

    def on_loaded(self, model: MoE) -> None: ...

    def on_step(self, outcomes: Outcomes) -> None: ...

    def on_failure(self, error: BaseException) -> None:
        """Loading or the engine as a whole has failed; the thread has ended."""


class EngineThread:
    """Commands may come from any thread.

    Args:
        load: makes the model.
        listener: hears of tokens and failures, in `loop`.

    Attributes:
        occupancy: of the engine after the last step or command; see `Engine.occupancy`.
        status: of the engine then; see `Engine.status`, and ``kv_tokens_limit``.
    """

    def __init__(
        self, load: Callable[[], MoE], listener: Listener, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.occupancy: dict[str, int] = {}
        self.status: dict[str, Any] = {}
        self._load = load
        self._listener = listener
        self._loop = loop
        self._places: dict[RunningSequence, tuple[Job, int, int]] = {}
        self._commands: queue.SimpleQueue[Callable[[StepLoop], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe-engine", daemon=True)
        self._thread.start()

    def take(self, job: Job) -> None:
        """Queue a job's groups; ``job.accepted`` says whether that went well."""
        self._commands.put(lambda engine: self._take(engine, job))

    def drop(self, job: Job) -> None:
        """Cancel what still runs of a job."""
        self._commands.put(lambda engine: self._drop(engine, job))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its step; whether it has ended within the time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with closing(self._load()) as model:
                self._serve(model)
        except BaseException as error:  # nobody else sees what ends a thread
            self._post(self._listener.on_failure, error)

    def _serve(self, model: MoE) -> None:
        engine = model.loop()
        model.on_rank_loss(partial(self._post, self._listener.on_failure))
        self._look(engine)
        self._post(self._listener.on_loaded, model)
        while self._obey(engine):
            outcomes = [] if engine.idle else self._step(engine)
            self._look(engine)  # before anybody hears of the step, and asks
            if outcomes:
                self._post(self._listener.on_step, outcomes)

    def _look(self, engine: StepLoop) -> None:
        limit = engine.kv_tokens
        self.occupancy = engine.occupancy()
        self.status = engine.status() | {
            "kv_tokens_limit": int(limit) if math.isfinite(limit) else None
        }

    def _obey(self, engine: StepLoop) -> bool:
        """Carry out the commands there are; wait for one when idle. False: it was the last."""
        block = engine.idle
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)
            block = False

    def _step(self, engine: StepLoop) -> Outcomes:
        outcomes: Outcomes = []
        for sequence, outcome in engine.step():
            if sequence not in self._places:  # its job has failed in this step
                continue
            job, prompt, sample = self._places[sequence]
            if isinstance(outcome, Exception):
                outcomes.append((job, outcome))
                self._drop(engine, job)
                continue
            event = StreamEvent(prompt, sample, outcome, sequence.prompt_token_ids)
            outcomes.append((job, event))
            if outcome.finish_reason is not None:
                del self._places[sequence]
        return outcomes

    def _take(self, engine: StepLoop, job: Job) -> None:
        try:
            for group in job.groups:
                engine.submit(group)
        except RequestError as error:
            self._drop(engine, job)
            self._post(job.fail, error)
            return
        self._places |= {sequence: (job, *place) for sequence, place in job.places.items()}
        self._post(job.accept)

    def _drop(self, engine: StepLoop, job: Job) -> None:
        for group in job.groups:
            engine.cancel(group)
        for sequence in job.places:
            self._places.pop(sequence, None)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)
