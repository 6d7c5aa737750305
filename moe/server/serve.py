"""The process of ``moe serve``: `serve` runs a `Service` until a signal or a failure ends it.

The socket is bound before the model is loaded, so health probes get answers meanwhile. SIGTERM or
Ctrl-C drains; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp

from moe.errors import MoEError, ProfileError
from moe.extras import install_line, is_installed
from moe.loading.local import public_name
from moe.loading.memory_plan import MemoryPlan
from moe.loading.progress import LoadProgress, Report, reporting
from moe.model import MoE
from moe.server.app import create_app
from moe.server.connections import Acceptor, Crowd, TimedProtocol, most_connections
from moe.server.engine_queue import EngineQueue
from moe.server.generation import ANY_MODEL
from moe.server.guard import LOOPBACK_NAMES
from moe.server.interpreter import rest_from_collecting, turns_of_threads
from moe.server.keys import ApiKeys, make_keys
from moe.server.roles import SERVER_ROLES, ServerRole
from moe.settings import ServerSettings
from moe.settings.profile import LoadedProfile

if TYPE_CHECKING:  # its packages are optional
    from moe.server.telemetry import Telemetry

HEADER_BYTES = 32 * 1024
_CLOSE_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """uvicorn that accepts connections by `Acceptor`, and without its signal handlers, which would
    end the process without draining.

    Args:
        crowd: of all connections.
        tls: for HTTPS; None: HTTP.
    """

    def __init__(self, config: uvicorn.Config, crowd: Crowd, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._crowd, self._tls = crowd, tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        accepting = [Acceptor(each, make, self._crowd, self._tls) for each in sockets or ()]
        self.servers = cast(Any, accepting)
        self.started = True


@dataclass
class Service:
    """A model behind a bound socket: loads it, serves it, drains.

    Args:
        load: loads the model and reports its progress.
        model_names: names that requests may use for the model.
        profile: its ``server`` section is used here.
        listener: a bound socket; `run` closes it.
        keys: clients must send one of them; None: no key is needed.
        tls: for HTTPS; None: HTTP.
        telemetry: makes traces of requests; None: there are none. `run` closes it.
        roles: the server's roles beside others. `run` closes them.

    Attributes:
        queue: None before `run`.
        stopping: `stop` has been called.
        is_stuck: the engine thread did not end in time.
    """

    load: Callable[[Report], MoE]
    model_names: Sequence[str]
    profile: LoadedProfile
    listener: socket.socket
    keys: ApiKeys | None = None
    tls: ssl.SSLContext | None = None
    telemetry: Telemetry | None = None
    roles: Sequence[ServerRole] = ()

    def __post_init__(self) -> None:
        self.stopping = False
        self.is_stuck = False
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.queue: EngineQueue | None = None

    @property
    def address(self) -> str:
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def run(self, on_ready: Callable[[], object]) -> int:
        """Serve until `stop` or a failure; returns the exit code.

        Raises whatever made loading fail.
        """
        self._loop = asyncio.get_running_loop()
        settings = self.profile.profile.server
        before = [role.before for role in self.roles]
        self.queue = queue = EngineQueue(self.load, settings.max_waiting, self.telemetry, before)
        for role in self.roles:
            role.attach(queue)
        app = create_app(
            queue,
            self.model_names,
            settings,
            self.keys,
            self._host_names(),
            [role.router for role in self.roles if role.router is not None],
        )
        count = queue.metrics.connections_closed
        crowd = Crowd(most_connections(), on_close=lambda why: count.labels(why).inc())
        server = _Server(_uvicorn_config(app, settings, crowd), crowd, self.tls)
        serving = asyncio.create_task(server.serve([self.listener]))
        watching = asyncio.ensure_future(self.keys.watch()) if self.keys is not None else None
        try:
            await self._first(queue.changed.wait(), self._stop.wait())
            if queue.state == "ready":
                if queue.model is not None:
                    queue.model.codec.warm_up()
                on_ready()
                queue.changed.clear()
                await self._first(queue.changed.wait(), self._stop.wait())
            await queue.drain(settings.drain_timeout_s)
        finally:
            server.should_exit = True
            await serving
            if watching is not None:
                watching.cancel()
            # Loading cannot be interrupted, and need not be finished.
            self.is_stuck = not queue.stop(_CLOSE_TIMEOUT_S if queue.model else 0)
            for role in self.roles:
                role.close()
            if self.telemetry is not None:
                await asyncio.to_thread(self.telemetry.close)
        if queue.failure is not None:
            if queue.model is None:
                raise queue.failure
            return 1
        return 0

    def stop(self) -> None:
        """Begin to drain. May be called from any thread."""
        self.stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def reload_keys(self) -> None:
        """Read the file of keys again, if there is one. Called in the event loop."""
        if self.keys is not None:
            self._reloading = asyncio.ensure_future(self.keys.reload())

    @property
    def is_open_to_all(self) -> bool:
        """Other machines can connect, and there is no key."""
        host = self.listener.getsockname()[0]
        return self.keys is None and host != "::1" and not host.startswith("127.")

    def _host_names(self) -> set[str] | None:
        """Names that the Host header may have, on a loopback address without a key; see `Guard`."""
        if self.keys is not None or self.is_open_to_all:
            return None
        return {*LOOPBACK_NAMES, self.listener.getsockname()[0]}

    @staticmethod
    async def _first(*waits: Coroutine[object, object, object]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def _uvicorn_config(app: ASGIApp, settings: ServerSettings, crowd: Crowd) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, partial(TimedProtocol, read_timeout_s=settings.read_timeout_s, crowd=crowd)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=list(settings.trusted_proxies),  # else those of loopback
        h11_max_incomplete_event_size=HEADER_BYTES,
        limit_concurrency=crowd.busy_limit,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


def make_tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """HTTPS with a certificate; None without one. Raises `MoEError` if it cannot be used."""
    if certfile is None:
        if keyfile is not None:
            raise MoEError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise MoEError(
            f"cannot use the certificate {certfile} with the key {keyfile or certfile}: "
            f"{error.strerror if isinstance(error, OSError) else error}"
        ) from error
    return context


def serve(
    name: str | Path,
    profile: LoadedProfile,
    listener: socket.socket,
    api_key: str | None,
    served_names: Sequence[str] = (),
    api_key_file: str | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    log: AbstractContextManager[None] | None = None,
) -> int:
    """``moe serve``; returns the exit code.

    Args:
        listener: see `moe.server.listener.bind`; it is closed at the end.
        served_names: names that requests may use; empty: the name of the directory or hub id;
            ``*``: all, the others are shown.
        api_key_file: see `moe.server.keys`.
        ssl_certfile, ssl_keyfile: PEM files for HTTPS; None: HTTP.
        log: see `moe.server.log.write_log`; None: warnings go to stderr.
    """
    if not all(served_names):
        raise MoEError("a served model name is empty; give one, or leave out --served-model-name")
    if api_key is None:
        api_key = os.environ.get("MOE_API_KEY")
    keys = make_keys(api_key, api_key_file)
    own_name = public_name(name)
    roles = [make(profile.profile) for make in SERVER_ROLES.filled(profile.profile)]
    service = Service(
        load=partial(_load, name, profile, roles),
        model_names=served_names if set(served_names) - {ANY_MODEL} else [own_name, *served_names],
        profile=profile,
        listener=listener,
        keys=keys,
        tls=make_tls(ssl_certfile, ssl_keyfile),
        telemetry=_telemetry() if profile.profile.server.traces else None,
        roles=roles,
    )
    if service.is_open_to_all:
        print(
            f"moe: anyone who reaches {service.address} can use the model; set --api-key",
            file=sys.stderr,
        )
    with log or nullcontext():
        code = asyncio.run(_run(service))
    if service.is_stuck:  # else the interpreter waits for the thread, or crashes with it
        os._exit(code)
    return code


async def _run(service: Service) -> int:
    """Run a service that SIGTERM and Ctrl-C drain, and that reads its keys again on SIGHUP; returns
    the exit code."""
    loop = asyncio.get_running_loop()
    signals = {signal.SIGTERM, signal.SIGINT}
    for number in (n for n in signals if signal.getsignal(n) is not signal.SIG_IGN):
        loop.add_signal_handler(number, _on_signal, service)
    if service.keys is not None:
        loop.add_signal_handler(signal.SIGHUP, service.reload_keys)
    with turns_of_threads():
        return await service.run(partial(_say_ready, service))


def _say_ready(service: Service) -> None:
    rest_from_collecting()
    assert service.queue is not None
    assert service.queue.model is not None
    for notice in service.queue.model.notices:
        print(f"moe: {notice}", file=sys.stderr)
    names = ", ".join(service.model_names)
    try:
        print(f"moe: serving {names} at {service.address}", flush=True)
    except OSError:  # a full disk, or nobody reads it: clients do not wait for it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _telemetry() -> Telemetry:
    """Raises `ProfileError` if there can be no traces."""
    if not is_installed("telemetry"):
        raise ProfileError(
            "server.traces is true, and OpenTelemetry is not installed: "
            + install_line("telemetry")
        )
    from moe.server.telemetry import make_telemetry

    return make_telemetry()


def _load(
    name: str | Path, profile: LoadedProfile, roles: Sequence[ServerRole], report: Report
) -> MoE:
    """Load the model; shows the memory plan and the progress on the terminal too."""

    def say_plan(plan: MemoryPlan) -> None:
        if plan.fits:  # else the error shows it
            print(f"moe: {plan}", file=sys.stderr)

    with reporting(sys.stderr.isatty()) as show:

        def both(progress: LoadProgress) -> None:
            report(progress)
            show(progress)

        model = MoE.from_pretrained(name, profile, progress=both, on_plan=say_plan)
        for role in roles:
            role.check(model)
        return model


def _on_signal(service: Service) -> None:
    if service.stopping:
        os._exit(1)
    service.stop()
