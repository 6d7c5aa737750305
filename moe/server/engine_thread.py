"""The thread that loads the model and steps its engine: `EngineThread`.

Greenlets belong to one thread, so only this one touches the engine. Between two steps it runs all
commands, which take no time, and one part of what else was asked of it (`Errands`). It hands the
tokens of a whole step to the event loop in one call. A `GenerationJob` is one HTTP request on its
way through `moe.server.engine_queue` and the thread.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from moe.completion import StreamEvent, places_of
from moe.engine.engine import StepLoop
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from moe.model import MoE
from moe.sequence import RunningSequence
from moe.server.metrics import TokenClock

if TYPE_CHECKING:  # its packages are optional
    from moe.server.telemetry import RequestTrace

Result = TypeVar("Result")


@dataclass(eq=False)
class GenerationJob:
    """One HTTP request: its sequence groups and their tokens. Both threads use it.

    The length of `queue` is bounded by the number of tokens that the client asked for, and by
    `RequestMemory`.

    Attributes:
        groups: one for each prompt; empty until they are built.
        preparing: builds the groups.
        accepted: done when the engine has accepted all groups, or refused one.
        queue: new tokens in order, or the exception that ended the job.
        timer: until the request's time is up.
        trace: of the request, if the server makes traces.
        error: what ended the job; None: nothing has.
        closed: `EngineQueue.close` has been called.
    """

    clock: TokenClock
    accepted: asyncio.Future[None]
    queue: asyncio.Queue[StreamEvent | Exception] = field(default_factory=asyncio.Queue)
    groups: Sequence[SequenceGroup] = ()
    preparing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    trace: RequestTrace | None = None
    error: BaseException | None = None
    closed: bool = False

    @property
    def places(self) -> dict[RunningSequence, tuple[int, int]]:
        """Each sequence's index of prompt and index of sample."""
        return places_of(self.groups)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.sequences[0].prompt_token_ids) for group in self.groups)

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield tokens until every sequence has ended. Raises the exception that ended the job."""
        left = len(self.places)
        while left:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.delta.finish_reason is not None
            yield event

    def accept(self) -> None:
        """Mark the job as accepted by the engine. Called in the event loop."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the job with an error, in any state; a second one changes nothing.

        Called in the event loop.
        """
        if self.error is not None:
            return
        self.error = error
        if self.preparing is not None:
            self.preparing.cancel()
        while not self.queue.empty():
            self.queue.get_nowait()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # read it: asyncio warns if no waiter is left to do so
        self.queue.put_nowait(error)


StepOutcomes = list[tuple[GenerationJob, StreamEvent | Exception]]


class Listener(Protocol):
    """Receives what happens in the engine thread. Its methods are called in the event loop."""

    def on_loaded(self, model: MoE) -> None: ...

    def on_step(self, outcomes: StepOutcomes) -> None: ...

    def on_wait(self, wait: tuple[int, int, float]) -> None:
        """A step waited for experts: when it began and ended, in Unix nanoseconds, and for how many
        seconds of that it waited."""

    def on_failure(self, error: BaseException) -> None:
        """Loading, or the engine as a whole, has failed. The engine thread ends."""


class _Errand(NamedTuple):
    parts: Iterator[Any]
    done: list[Any]
    future: Future[list[Any]]


class Errands:
    """Work that needs the model and is no sequence of the scheduler's, such as a text whose experts
    are shown: each delays the tokens of all, so one part of one errand runs between two steps.

    An errand that has begun goes on to its end, as it may hold memory; then the next caller has its
    turn. Any thread may add some.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Errand]] = {}  # in the order of turns
        self._begun: _Errand | None = None

    def add(self, caller: str, parts: Iterator[Result]) -> Future[list[Result]]:
        """Queue an errand; for the results of its parts. Cancelling the future ends it."""
        errand = _Errand(parts, [], Future())
        with self._lock:
            self._waiting.setdefault(caller, deque()).append(errand)
        return errand.future

    @property
    def idle(self) -> bool:
        return self._begun is None and not self._waiting

    def run_part(self) -> None:
        """Run the next part, if there is any."""
        errand = self._begun or self._next()
        while errand is not None and errand.future.cancelled():
            errand = self._next()
        self._begun = errand
        if errand is None:
            return
        try:
            errand.done.append(next(errand.parts))
            return
        except StopIteration:
            outcome: Exception | None = None
        except Exception as error:
            outcome = error
        self._begun = None
        if errand.future.set_running_or_notify_cancel():
            if outcome is None:
                errand.future.set_result(errand.done)
            else:
                errand.future.set_exception(outcome)

    def _next(self) -> _Errand | None:
        with self._lock:
            for caller, errands in self._waiting.items():
                errand = errands.popleft()
                del self._waiting[caller]
                if errands:
                    self._waiting[caller] = errands
                return errand
        return None


class EngineThread:
    """Loads the model and steps its engine. Its public methods may be called from any thread.

    Args:
        load: loads the model.
        listener: receives tokens and failures, in `loop`.
        reports_waits: it also receives how long each step waited for experts.

    Attributes:
        occupancy: `Engine.occupancy` after the last step or command.
        status: `Engine.status` then, and ``kv_tokens_limit``.
    """

    def __init__(
        self,
        load: Callable[[], MoE],
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        *,
        reports_waits: bool = False,
    ) -> None:
        self.occupancy: dict[str, int] = {}
        self.status: dict[str, Any] = {}
        self._load = load
        self._listener = listener
        self._loop = loop
        self._reports_waits = reports_waits
        self._places: dict[RunningSequence, tuple[GenerationJob, int, int]] = {}
        self._errands = Errands()
        self._commands: queue.SimpleQueue[Callable[[StepLoop], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe-engine", daemon=True)
        self._thread.start()

    def take(self, job: GenerationJob) -> None:
        """Submit a job's groups to the engine; ``job.accepted`` has the outcome."""
        self._commands.put(lambda engine: self._take(engine, job))

    def ask(self, work: Callable[[StepLoop], Result]) -> Future[Result]:
        """Run work that takes no time between two steps; for its result."""
        future: Future[Result] = Future()

        def run(engine: StepLoop) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(engine))
                except Exception as error:
                    future.set_exception(error)

        self._commands.put(run)
        return future

    def run(self, parts: Iterator[Result], caller: str) -> Future[list[Result]]:
        """Run an errand, a part between two steps; for the results of its parts."""
        future = self._errands.add(caller, parts)
        self._commands.put(lambda _: None)  # it may wait for one
        return future

    def drop(self, job: GenerationJob) -> None:
        """Cancel a job's unfinished sequences."""
        self._commands.put(lambda engine: self._drop(engine, job))

    def expire(self, job: GenerationJob) -> None:
        """Let each of a job's sequences end with its next token."""

        def expire(_: StepLoop) -> None:
            for sequence in job.places:
                sequence.expire()

        self._commands.put(expire)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its step; returns whether it ended within the time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with closing(self._load()) as model:
                self._serve(model)
        except BaseException as error:  # else the thread would end without a trace
            self._post(self._listener.on_failure, error)

    def _serve(self, model: MoE) -> None:
        engine = model.loop()
        model.on_rank_loss(partial(self._post, self._listener.on_failure))
        self._publish_status(engine)
        self._post(self._listener.on_loaded, model)
        watched = self._reports_waits
        while self._run_commands(engine):
            self._errands.run_part()
            start_ns, waited = time.time_ns(), model.expert_wait_seconds if watched else 0.0
            outcomes = [] if engine.idle else self._step(engine)
            if watched and (seconds := model.expert_wait_seconds - waited) > 0:
                self._post(self._listener.on_wait, (start_ns, time.time_ns(), seconds))
            self._publish_status(engine)  # before the listener hears of the step
            if outcomes:
                self._post(self._listener.on_step, outcomes)

    def _publish_status(self, engine: StepLoop) -> None:
        limit = engine.kv_tokens
        self.occupancy = engine.occupancy()
        self.status = engine.status() | {
            "kv_tokens_limit": int(limit) if math.isfinite(limit) else None
        }

    def _run_commands(self, engine: StepLoop) -> bool:
        """Run queued commands; waits for one if there is nothing to do. False: the thread must
        end."""
        block = engine.idle and self._errands.idle
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)
            block = False

    def _step(self, engine: StepLoop) -> StepOutcomes:
        outcomes: StepOutcomes = []
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

    def _take(self, engine: StepLoop, job: GenerationJob) -> None:
        try:
            for group in job.groups:
                engine.submit(group)
        except RequestError as error:
            self._drop(engine, job)
            self._post(job.fail, error)
            return
        self._places |= {sequence: (job, *place) for sequence, place in job.places.items()}
        self._post(job.accept)

    def _drop(self, engine: StepLoop, job: GenerationJob) -> None:
        for group in job.groups:
            engine.cancel(group)
        for sequence in job.places:
            self._places.pop(sequence, None)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)
