"""``/v1/experts/stream``: the experts at work, as server-sent events for any number of viewers.

An `ExpertsFeed` takes one snapshot at a time and gives its text to every viewer. It rests while
nobody looks, and after each snapshot long enough that snapshots take at most `MAX_SHARE` of a
processor. Snapshots hold counters since loading, so a viewer that misses some loses nothing. They
hold numbers only: no text and no token of any client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter
from prometheus_client import Counter, Histogram
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from moe.server.engine_queue import EngineQueue
from moe.server.errors import APIError
from moe.server.event_stream import EventStream
from moe.server.fields import Json

INTERVAL_S = 1.0
"""Least time between two snapshots."""
MAX_SHARE = 0.005
"""Most of a processor's time that snapshots may take."""
MAX_VIEWERS = 64
LAYOUT_EVERY = 10
"""The layout is looked at once in so many snapshots: only ranks that move experts change it."""
_POLL_S = 0.25
router = APIRouter()


@dataclass(eq=False)
class Viewer:
    """One client of the stream. What it has not read when the next snapshot comes, it misses.

    Attributes:
        latest: layout and snapshot, both as text; None when the stream ends; or why it broke.
    """

    latest: asyncio.Queue[tuple[str, str] | Exception | None] = field(
        default_factory=lambda: asyncio.Queue(1)
    )

    def give(self, item: tuple[str, str] | Exception | None) -> None:
        if self.latest.full():
            self.latest.get_nowait()
        self.latest.put_nowait(item)

    async def events(self) -> AsyncIterator[str]:
        """The layout first, and again when it has changed; then snapshots, until the server stops.

        Raises the exception that ended the feed.
        """
        seen = ""
        while (item := await self.latest.get()) is not None:
            if isinstance(item, Exception):
                raise item
            layout, snapshot = item
            if layout and layout != seen:
                seen = layout
                yield layout
            yield snapshot


class ExpertsFeed:
    """Snapshots of one server for its viewers. Lives in the event loop.

    Args:
        queue: of the server.

    Attributes:
        snapshots: how many have been taken.
        viewers: who gets the next one.
    """

    def __init__(self, queue: EngineQueue) -> None:
        self.snapshots = 0
        self.viewers: set[Viewer] = set()
        self._queue = queue
        self._work: asyncio.Task[None] | None = None
        self._last: tuple[str, str] | None = None

    def join(self) -> Viewer:
        """A new viewer, which the caller must `leave` with. Raises `APIError` 429 at too many."""
        if len(self.viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} clients read this stream already; close one of them"
            raise APIError(429, message, code="too_many_viewers", retry_after_s=5)
        viewer = Viewer()
        self.viewers.add(viewer)
        if self._last is not None:
            viewer.give(self._last)
        if self._work is None:
            self._work = asyncio.create_task(self._watch())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forget a viewer; without any, no more snapshots are taken."""
        self.viewers.discard(viewer)
        if not self.viewers and self._work is not None:
            self._work.cancel()
            self._work = self._last = None

    async def _watch(self) -> None:
        """Take snapshots until the server stops."""
        try:
            while True:
                self._last, seconds = await run_in_threadpool(self._take)
                self._give(self._last)
                until = time.monotonic() + max(INTERVAL_S, seconds / MAX_SHARE)
                while (now := time.monotonic()) < until:
                    if self._queue.state not in ("loading", "ready"):
                        return self._end(None)
                    await asyncio.sleep(min(_POLL_S, until - now))
        except Exception as error:
            self._end(error)

    def _end(self, why: Exception | None) -> None:
        """End the streams. A viewer that comes later starts the feed again."""
        self._give(why)
        self._work = self._last = None

    def _give(self, item: tuple[str, str] | Exception | None) -> None:
        for viewer in self.viewers:
            viewer.give(item)

    def _take(self) -> tuple[tuple[str, str], float]:
        """The layout and a snapshot, and the processor time that they took, in seconds."""
        start = time.thread_time()
        layout = self._last[0] if self._last is not None else ""
        if not layout or self.snapshots % LAYOUT_EVERY == 0:
            layout = layout_text(self._queue)
        self.snapshots += 1
        texts = layout, _text(snapshot_event(self._queue) | {"number": self.snapshots})
        return texts, time.thread_time() - start


def layout_text(queue: EngineQueue) -> str:
    """Return what changes seldom: bits and ranks of experts, the memory plan, what runs how and
    why. Empty before the model is loaded."""
    model = queue.model
    if model is None:
        return ""
    return _text(
        {
            "type": "layout",
            **model.expert_layout(),
            "memory_plan": model.memory_plan.as_dict(),
            "status": model.status(),
            "context_length": model.context_length,
        }
    )


def snapshot_event(queue: EngineQueue) -> Json:
    """Counters since the start, and what is going on now."""
    metrics, engine, model = queue.metrics, queue.engine_status, queue.model
    occupancy = queue.occupancy()
    about: Json = {
        "type": "snapshot",
        "time": time.time(),
        "state": queue.state,
        "progress": queue.progress.as_dict() if queue.state == "loading" else None,
        "prompt_tokens": int(_totals(metrics.prompt_tokens)["total"]),
        "generated_tokens": int(_totals(metrics.new_tokens)["total"]),
        "first_token": _histogram(metrics.first_token),
        "between_tokens": _histogram(metrics.between_tokens),
        "occupancy": occupancy,
        "kv_tokens_limit": engine.get("kv_tokens_limit"),
        "prefixes": engine.get("prefixes"),
    }
    nothing: Json = {"layers": [], "cache": None, "drafts": None, "ranks": None}
    return about | (nothing if model is None else model.expert_activity())


def _histogram(metric: Histogram) -> Json:
    """Number of observations, and their sum in seconds."""
    totals = _totals(metric)
    return {"count": int(totals["count"]), "seconds": totals["sum"]}


def _totals(metric: Counter | Histogram) -> dict[str, float]:
    """Values of a metric without labels by the ends of their names."""
    (family,) = metric.collect()
    return {sample.name.removeprefix(f"{family.name}_"): sample.value for sample in family.samples}


def _text(event: Json) -> str:
    return json.dumps(event, separators=(",", ":"))


@router.get("/v1/experts/stream", responses={200: {"content": {"text/event-stream": {}}}})
async def experts_stream(request: Request) -> Response:
    """The experts at work, as server-sent events, at most one a second; see docs/server.md."""
    feed: ExpertsFeed = request.app.state.feed
    viewer = feed.join()
    return EventStream(
        viewer.events(),
        lambda error: [_text(error.body())],
        partial(feed.leave, viewer),
        request.app.state.settings.send_timeout_s,
    )
