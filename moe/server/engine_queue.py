"""The thread that loads the model, owns the engine and steps it (greenlets belong to one thread).

It obeys commands between steps, and hands the tokens of a whole step to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from moe.completion import StreamEvent, places_of
from moe.engine.engine import StepLoop
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RankLostError, RequestError, StructureError
from moe.loading.progress import LoadProgress, Report
from moe.model import MoE
from moe.sequence import RunningSequence
from moe.server.errors import GENERIC, APIError, api_error
from moe.server.guard import log_failure, logger
from moe.server.metrics import Metrics, TokenClock
from offload.errors import OffloadError

# ---- One HTTP request's work for the engine, as both threads see it.


@dataclass(eq=False)
class GenerationJob:
    """The prompts of a request and what has come back for them.

    What waits in `queue` for a client that does not read is bounded by the tokens it asked for.

    Attributes:
        groups: one for each prompt.
        accepted: done when the engine has taken all groups, or refused one.
        queue: new tokens in order, or the exception that ended the job.
        closed: nobody waits for it any more.
    """

    clock: TokenClock
    accepted: asyncio.Future[None]
    queue: asyncio.Queue[StreamEvent | Exception] = field(default_factory=asyncio.Queue)
    groups: Sequence[SequenceGroup] = ()
    closed: bool = False

    @property
    def places(self) -> dict[RunningSequence, tuple[int, int]]:
        """Index of prompt and sample of each sequence."""
        return places_of(self.groups)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.sequences[0].prompt_token_ids) for group in self.groups)

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Tokens as they come, until every sequence has ended. Raises what ended the job."""
        left = len(self.places)
        while left:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.delta.finish_reason is not None
            yield event

    def accept(self) -> None:
        """The engine has it. Called in the event loop."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: Exception) -> None:
        """End it with an error, wherever it is. Called in the event loop."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # the waiter may have gone
        self.queue.put_nowait(error)


# ----

StepOutcomes = list[tuple[GenerationJob, StreamEvent | Exception]]


class Listener(Protocol):
    """Who hears of what happens; called in the event loop."""

    def on_loaded(self, model: MoE) -> None: ...

    def on_step(self, outcomes: StepOutcomes) -> None: ...

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
        self._places: dict[RunningSequence, tuple[GenerationJob, int, int]] = {}
        self._commands: queue.SimpleQueue[Callable[[StepLoop], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe-engine", daemon=True)
        self._thread.start()

    def take(self, job: GenerationJob) -> None:
        """Queue a job's groups; ``job.accepted`` says whether that went well."""
        self._commands.put(lambda engine: self._take(engine, job))

    def drop(self, job: GenerationJob) -> None:
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


# ---- The bounded queue in front of the engine thread, and the state of the server.

ServerState = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")
_POLL_S = 0.02


class EngineQueue:
    """Runs requests through one model. Made and called in the event loop.

    Args:
        load: makes the model, and reports how far it is; called in the engine thread.
        max_waiting: requests without a first token; more are refused with 429.

    Attributes:
        state: ``loading``, ``ready``, ``draining`` (no new requests) or ``failed`` (for good).
        progress: of loading.
        model: the loaded model.
        failure: why it failed.
        changed: set when the model is loaded; set again when the state becomes ``failed``.
    """

    def __init__(self, load: Callable[[Report], MoE], max_waiting: int) -> None:
        self.state: ServerState = "loading"
        self.progress = LoadProgress("starting")
        self.model: MoE | None = None
        self.failure: BaseException | None = None
        self.changed = asyncio.Event()
        self.metrics = Metrics(self._readings)
        self._max_waiting = max_waiting
        self._waiting: set[GenerationJob] = set()
        self._running: set[GenerationJob] = set()
        self.created = int(time.time())
        self._start = time.monotonic()
        # One thread: tokenizers are not made for several at once.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="moe-text")
        loop = asyncio.get_running_loop()
        self._engine = EngineThread(lambda: load(self._on_progress), self, loop)

    @property
    def seconds(self) -> float:
        """Seconds since the server started."""
        return time.monotonic() - self._start

    @property
    def engine_status(self) -> dict[str, Any]:
        """Prefill choice and known prefixes; see `Engine.status`. Empty while loading."""
        return self._engine.status

    def occupancy(self) -> dict[str, int]:
        """Requests here, and sequences and tokens of keys and values in the engine."""
        requests = {
            "waiting_requests": len(self._waiting),
            "running_requests": len(self._running),
        }
        return requests | self._engine.occupancy

    def ready_model(self) -> MoE:
        """The model. Raises `APIError` 503 while there is none, or no requests are taken."""
        if self.state == "ready" and self.model is not None:
            return self.model
        why = {
            "loading": f"the model is loading, for {self.seconds:.0f} s so far",
            "draining": "the server is shutting down",
        }.get(self.state, "the engine has failed; the server must be started again")
        raise APIError(503, why, code=self.state, retry_after_s=5)

    async def text(self, work: Callable[[MoE], Result]) -> Result:
        """Run work with the tokenizer, off the event loop. Raises what it raises."""
        model = self.ready_model()
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work, model)

    async def submit(self, build: Callable[[MoE], Sequence[SequenceGroup]]) -> GenerationJob:
        """Make a request and queue it; `close` must follow.

        Args:
            build: turns the request into groups; runs beside the event loop.

        Raises:
            APIError: 429 where too many requests wait, 503 where none are taken.
            RequestError: the request is not valid; nothing is left of it.
        """
        self.ready_model()
        if len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting)} requests wait already (server.max_waiting); try again"
            raise APIError(429, message, code="queue_full", retry_after_s=1)
        job = GenerationJob(TokenClock(self.metrics), asyncio.get_running_loop().create_future())
        self._waiting.add(job)
        self._count()
        try:
            job.groups = await self.text(build)
            self._engine.take(job)
            await job.accepted
        except BaseException:
            self.close(job)
            raise
        self.metrics.prompt_tokens.inc(job.num_prompt_tokens)
        return job

    def close(self, job: GenerationJob) -> None:
        """Forget a job, finished or not; what still runs of it is cancelled."""
        if job.closed:
            return
        job.closed = True
        self._waiting.discard(job)
        self._running.discard(job)
        self._count()
        self._engine.drop(job)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; return when the running ones are done or had their time."""
        if self.state != "failed":
            self.state = "draining"
        deadline = time.monotonic() + timeout_s
        while (self._waiting or self._running) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._fail_all(APIError(503, "the server is shutting down", code="draining"))

    def stop(self, timeout_s: float) -> bool:
        """End the threads; whether they have ended within the time."""
        self._text_thread.shutdown(wait=False, cancel_futures=True)
        return self._engine.stop(timeout_s)

    def on_loaded(self, model: MoE) -> None:
        self.model = model
        if self.state == "loading":
            self.state = "ready"
        self.changed.set()

    def on_step(self, outcomes: StepOutcomes) -> None:
        for job, outcome in outcomes:
            if job.closed:
                continue
            if isinstance(outcome, OffloadError):
                logger.error("weights could not be read: %s", outcome)
            if isinstance(outcome, (OffloadError, StructureError)):
                outcome = api_error(outcome)
            if isinstance(outcome, Exception):
                job.fail(outcome)
                continue
            if job in self._waiting:
                self._waiting.discard(job)
                self._running.add(job)
                self._count()
            job.clock.tick(outcome.prompt, outcome.sample)
            job.queue.put_nowait(outcome)

    def on_failure(self, error: BaseException) -> None:
        if self.state == "failed":
            return
        if self.model is not None:  # `serve` reports why loading failed
            log_failure("(every one)", error)
        self.state, self.failure = "failed", error
        if isinstance(error, RankLostError):
            self._fail_all(APIError(500, f"{error}; ask again later", code="rank_lost"))
        self._fail_all(APIError(500, GENERIC, code="engine_failed"))
        self.changed.set()

    def _on_progress(self, progress: LoadProgress) -> None:
        self.progress = progress

    def _readings(self) -> dict[str, dict[str, Any]]:
        stats = self.model.stats() if self.model else {}
        return {"stats": stats, "engine": self.engine_status, "occupancy": self.occupancy()}

    def _fail_all(self, error: Exception) -> None:
        for job in [*self._waiting, *self._running]:
            job.fail(error)

    def _count(self) -> None:
        self.metrics.waiting.set(len(self._waiting))
        self.metrics.running.set(len(self._running))
