"""A model behind a socket: loads, serves, drains. `serve.py` is its process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from moe.loading.progress import Report
from moe.model import MoE
from moe.profile import LoadedProfile
from moe.server.app import create_app
from moe.server.connection import TimedProtocol
from moe.server.guard import LOOPBACK_NAMES
from moe.server.runner import Runner

HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 2048
_CLOSE_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Service:
    """A model behind a bound socket.

    Args:
        load: makes the model, and reports how far it is.
        model_names: what clients call it, one of these.
        profile: its ``server`` section is used here.
        listener: bound; closed in the end.
        api_key: what clients must send; None lets everybody in.

    Attributes:
        runner: while it runs, and afterwards.
        stopping: `stop` has been called.
        is_stuck: the engine thread did not end in time.
    """

    load: Callable[[Report], MoE]
    model_names: Sequence[str]
    profile: LoadedProfile
    listener: socket.socket
    api_key: str | None = None

    def __post_init__(self) -> None:
        self.stopping = False
        self.is_stuck = False
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.runner: Runner | None = None

    @property
    def address(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, on_ready: Callable[[], object]) -> int:
        """Serve until `stop` or a failure; returns the exit code.

        Raises whatever made loading fail.
        """
        self._loop = asyncio.get_running_loop()
        settings = self.profile.profile.server
        self.runner = runner = Runner(self.load, settings.max_waiting)
        app = create_app(runner, self.model_names, settings, self.api_key, self._host_names())
        server = _Server(_uvicorn_config(app, settings.read_timeout_s))
        serving = asyncio.create_task(server.serve([self.listener]))
        try:
            await self._first(runner.changed.wait(), self._stop.wait())
            if runner.state == "ready":
                on_ready()
                runner.changed.clear()
                await self._first(runner.changed.wait(), self._stop.wait())
            await runner.drain(settings.drain_timeout_s)
        finally:
            server.should_exit = True
            await serving
            # Loading cannot be interrupted, and nothing of it has to be finished.
            self.is_stuck = not runner.stop(_CLOSE_TIMEOUT_S if runner.model else 0)
        if runner.failure is not None:
            if runner.model is None:
                raise runner.failure
            return 1
        return 0

    def stop(self) -> None:
        """Begin to drain. May be called from any thread."""
        self.stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    @property
    def is_open_to_all(self) -> bool:
        """Other machines can connect, and there is no key."""
        host = self.listener.getsockname()[0]
        return self.api_key is None and host != "::1" and not host.startswith("127.")

    def _host_names(self) -> set[str] | None:
        """On a loopback address without a key, only its own names; see `Guard`."""
        if self.api_key is not None or self.is_open_to_all:
            return None
        return {*LOOPBACK_NAMES, self.listener.getsockname()[0]}

    @staticmethod
    async def _first(*waits: Coroutine[object, object, object]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def _uvicorn_config(app: ASGIApp, read_timeout_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, partial(TimedProtocol, read_timeout_s=read_timeout_s)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
