"""The queue of requests in front of the engine: `EngineQueue`, in the event loop.

It bounds what waits, and knows the state of the server. Its requests (`GenerationJob`) are run by
the thread of `moe.server.engine_thread`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moe.engine.engine import StepLoop
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RankLostError, StructureError
from moe.fair_pool import FairPool
from moe.loading.progress import LoadProgress, Report
from moe.model import MoE
from moe.server.engine_thread import EngineThread, GenerationJob, StepOutcomes
from moe.server.errors import GENERIC, APIError, api_error
from moe.server.guard import log_failure, logger
from moe.server.metrics import Metrics, TokenClock
from moe.server.request_memory import RequestMemory, bytes_of
from offload.errors import OffloadError

if TYPE_CHECKING:  # its packages are optional
    from moe.server.telemetry import RequestTrace, Telemetry

ServerState = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")
_POLL_S = 0.02
TEXT_THREADS = 4
_EACH, _HEAVY = 3, 2  # of them: for one caller, and for heavy work of all callers


class EngineQueue:
    """Runs requests through one model. Made and called in the event loop.

    Args:
        load: loads the model and reports its progress; called in the engine thread.
        max_waiting: most requests without a first token; further ones are refused with 429.
        telemetry: makes traces of requests; None: there are none.
        before: prepare a request that the engine takes next.

    Attributes:
        telemetry: as given.
        state: ``loading``, ``ready``, ``draining`` (no new requests) or ``failed`` (for good).
        progress: of loading.
        model: None until it is loaded.
        failure: the exception behind the state ``failed``.
        changed: set when the model is loaded; set again when the state becomes ``failed``.
        memory: what requests hold.
        created: Unix time, in seconds, at which the server started.
    """

    def __init__(
        self,
        load: Callable[[Report], MoE],
        max_waiting: int,
        telemetry: Telemetry | None = None,
        before: Sequence[Callable[[Sequence[SequenceGroup]], Awaitable[object]]] = (),
    ) -> None:
        self.telemetry, self._before = telemetry, before
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
        self.memory = RequestMemory()
        self._num_texts = 0
        self._text = FairPool(TEXT_THREADS, "moe-text", each=_EACH, heavy=_HEAVY, nice=True)
        loop = asyncio.get_running_loop()
        self._engine = EngineThread(
            lambda: load(self._on_progress), self, loop, reports_waits=telemetry is not None
        )

    @property
    def seconds(self) -> float:
        """Seconds since the server started."""
        return time.monotonic() - self._start

    @property
    def engine_status(self) -> dict[str, Any]:
        """See `Engine.status`. Empty while loading."""
        return self._engine.status

    def occupancy(self) -> dict[str, int]:
        """Number of requests in this queue, and the engine's sequences and KV tokens."""
        requests = {
            "waiting_requests": len(self._waiting),
            "running_requests": len(self._running),
        }
        return requests | self._engine.occupancy

    def ready_model(self) -> MoE:
        """The model. Raises `APIError` 503 unless the state is ``ready``."""
        if self.state == "ready" and self.model is not None:
            return self.model
        why = {
            "loading": f"the model is loading, for {self.seconds:.0f} s so far",
            "draining": "the server is shutting down",
        }.get(self.state, "the engine has failed; the server must be started again")
        raise APIError(503, why, code=self.state, retry_after_s=5)

    async def text(
        self, work: Callable[[MoE], Result], caller: str = "", *, heavy: bool = False
    ) -> Result:
        """Run work that uses the tokenizer in a text thread; it counts as a waiting request.

        Args:
            work: cancelled if it has not begun when this call is cancelled.
            caller: who asks; callers take turns.
            heavy: it may take longer than a moment.

        Raises:
            APIError: as `submit`; and whatever the work raises.
        """
        with self._waits():
            return await self._run_text(work, caller, heavy=heavy)

    async def expert_choices(self, token_ids: list[int], caller: str) -> list[list[list[int]]]:
        """See `MoE.expert_choices`; for all tokens. It counts as a waiting request.

        Raises:
            APIError: as `submit`.
            RequestError: several ranks share the model.
        """
        with self._waits():
            parts = await self.beside(self.ready_model().expert_choices(token_ids), caller)
        return [list(chain.from_iterable(layers)) for layers in zip(*parts, strict=True)]

    async def submit(
        self,
        build: Callable[[MoE], Sequence[SequenceGroup]],
        caller: str = "",
        *,
        heavy: bool = False,
        timeout_s: float | None = None,
        trace: RequestTrace | None = None,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> GenerationJob:
        """Build a request and queue it. The caller must `close` the job in the end.

        Args:
            build: makes the sequence groups, as the work of `text`.
            timeout_s: after which the answer ends with what is there; None: never.
            trace: of the request; it ends with the job.
            before: fetches what `build` needs.

        Raises:
            APIError: 429 if too many requests wait, 503 unless the state is ``ready``, 504 if the
                time is up.
            RequestError: the request is not valid; the job is closed already.
        """
        self.ready_model()
        self._check_room()
        job = GenerationJob(TokenClock(self.metrics), asyncio.get_running_loop().create_future())
        job.trace = trace
        self._waiting.add(job)
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(timeout_s, self._expire, job, timeout_s)
        self._count()

        async def prepare() -> None:
            if before is not None:
                await before()
            job.groups = await self._run_text(build, caller, heavy=heavy)
            for step in self._before:
                await step(job.groups)

        job.preparing = asyncio.ensure_future(prepare())
        try:
            await job.preparing
            self._engine.take(job)
            await job.accepted
        except BaseException as error:
            job.error = job.error or error
            self.close(job)
            raise job.error from None  # what failed the job has cancelled its preparation
        self.metrics.prompt_tokens.inc(job.num_prompt_tokens)
        return job

    async def beside(self, parts: Iterator[Result], caller: str = "") -> list[Result]:
        """Run an errand in the engine's thread; no sequence gets a token during a part of it."""
        return await asyncio.wrap_future(self._engine.run(parts, caller))

    def ask(self, work: Callable[[StepLoop], Result]) -> asyncio.Future[Result]:
        """Run work on the engine, between two steps."""
        return asyncio.wrap_future(self._engine.ask(work))

    async def _run_text(self, work: Callable[[MoE], Result], caller: str, *, heavy: bool) -> Result:
        run = partial(work, self.ready_model())
        return await asyncio.wrap_future(self._text.submit(caller, run, heavy=heavy))

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Count something other than a job as a waiting request. Raises `APIError` as `submit`."""
        self.ready_model()
        self._check_room()
        self._num_texts += 1
        try:
            yield
        finally:
            self._num_texts -= 1

    def _check_room(self) -> None:
        waiting = len(self._waiting) + self._num_texts
        if waiting >= self._max_waiting:
            message = f"{waiting} requests wait already (server.max_waiting); try again"
            raise APIError(429, message, code="queue_full", retry_after_s=1)

    def close(self, job: GenerationJob) -> None:
        """Forget a job, and cancel its unfinished sequences. Closing again does nothing."""
        if job.closed:
            return
        job.closed = True
        if job.timer is not None:
            job.timer.cancel()
        self._waiting.discard(job)
        self._running.discard(job)
        self.memory.give_back(job)
        self._count()
        self._engine.drop(job)
        if job.trace is not None:
            job.trace.end(job.error, job.groups)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for the running ones; those left at the end fail."""
        if self.state != "failed":
            self.state = "draining"
        deadline = time.monotonic() + timeout_s
        while (self._waiting or self._running) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._fail_all(APIError(503, "the server is shutting down", code="draining"))

    def stop(self, timeout_s: float) -> bool:
        """End the engine's thread; returns whether it ended within the time."""
        return self._engine.stop(timeout_s)

    def on_loaded(self, model: MoE) -> None:
        self.model = model
        self.memory.allow(model.memory_plan.request_bytes)
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
            if job.trace is not None:
                job.trace.tick()
            job.queue.put_nowait(outcome)
            self.memory.take(job, bytes_of(outcome))
        while self.memory.is_exceeded and self._drop_largest():
            pass

    def _expire(self, job: GenerationJob, timeout_s: float) -> None:
        """The time of a request is up: end its answer, or refuse it if none has begun."""
        self.metrics.timeouts.inc()
        if job in self._running:
            self._engine.expire(job)
            return
        message = f"no token came within {timeout_s:g} s (timeout, server.request_timeout_s)"
        job.fail(APIError(504, message, code="timeout"))
        self._engine.drop(job)

    def _drop_largest(self) -> bool:
        """End the request whose answer holds the most memory; False if there is none."""
        largest = self.memory.largest(lambda owner: isinstance(owner, GenerationJob))
        if not isinstance(largest, GenerationJob):
            return False
        self.memory.give_back(largest)
        largest.fail(
            APIError(
                400,
                f"answers that are not sent yet may hold {self.memory.limit >> 20} MiB together "
                "(half of memory.reserve_gib), and this one holds most: ask for fewer "
                "log probabilities, tokens or samples, or stream them",
                code="out_of_memory",
            )
        )
        self._engine.drop(largest)
        return True

    def on_wait(self, wait: tuple[int, int, float]) -> None:
        if self.telemetry is not None:
            self.telemetry.on_wait(wait)

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
