"""The bounded queue in front of the engine thread, and the state of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from moe.engine.wave import Group
from moe.errors import RankLostError, StructureError
from moe.loading.progress import LoadProgress, Report
from moe.model import MoE
from moe.server.engine_thread import EngineThread, Outcomes
from moe.server.errors import GENERIC, APIError, api_error
from moe.server.guard import log_failure, logger
from moe.server.job import Job
from moe.server.metrics import Metrics, TokenClock
from offload.errors import OffloadError

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")
_POLL_S = 0.02


class Runner:
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
        self.state: State = "loading"
        self.progress = LoadProgress("starting")
        self.model: MoE | None = None
        self.failure: BaseException | None = None
        self.changed = asyncio.Event()
        self.metrics = Metrics(self._readings)
        self._max_waiting = max_waiting
        self._waiting: set[Job] = set()
        self._running: set[Job] = set()
        self.created = int(time.time())
        self._start = time.monotonic()
        # One thread: tokenizers are not made for several at once.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="moe-text")
        loop = asyncio.get_running_loop()
        self._engine = EngineThread(lambda: load(self._on_progress), self, loop)

    @property
    def seconds(self) -> float:
        """Seconds since the runner was made."""
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

    async def submit(self, build: Callable[[MoE], Sequence[Group]]) -> Job:
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
        job = Job(TokenClock(self.metrics), asyncio.get_running_loop().create_future())
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

    def close(self, job: Job) -> None:
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

    def on_step(self, outcomes: Outcomes) -> None:
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
