"""The process of ``moe serve``.

The socket is bound first, so that a taken port is an error before anything is loaded, and probes
get answers meanwhile. SIGTERM or Ctrl-C drains; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from moe.errors import MoEError
from moe.loading.hub import public_name
from moe.loading.progress import LoadProgress, Report, reporting
from moe.model import MoE
from moe.plan.memory import MemoryPlan
from moe.profile import LoadedProfile
from moe.server.service import MAX_CONNECTIONS, Service


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises `MoEError` where that is impossible."""
    if not host:  # which sockets take for every address
        raise MoEError("the host is empty; give one, or leave out --host for 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise MoEError(
            f"cannot listen on {host} port {port}: {error}; choose another with --port or --host"
        ) from None
    # asyncio does this only for sockets made with an explicit protocol; without it tokens wait for
    # the client's delayed acknowledgements (40 ms). Accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(
    name: str | Path,
    profile: LoadedProfile,
    host: str,
    port: int,
    api_key: str | None,
    served_names: Sequence[str] = (),
) -> int:
    """``moe serve``; returns the exit code.

    Args:
        served_names: what clients call the model; none: as its directory or hub id is called.
    """
    if not all(served_names):
        raise MoEError("a served model name is empty; give one, or leave out --served-model-name")
    if api_key is None:
        api_key = os.environ.get("MOE_API_KEY")
    if api_key is not None:
        api_key = api_key.strip()  # of a secret in a file: no header ends with its line break
    if api_key == "":
        raise MoEError("the API key is empty; give one, or leave out --api-key and MOE_API_KEY")
    own_name = public_name(name)
    service = Service(
        load=partial(_load, name, profile),
        model_names=served_names or [own_name],
        profile=profile,
        listener=bind(host, port),
        api_key=api_key,
    )
    if service.is_open_to_all:
        print(
            f"moe: anyone who reaches {service.address} can use the model; set --api-key",
            file=sys.stderr,
        )

    def say_ready() -> None:
        assert service.runner is not None
        assert service.runner.model is not None
        for notice in service.runner.model.notices:
            print(f"moe: {notice}", file=sys.stderr)
        names = ", ".join(service.model_names)
        print(f"moe: serving {names} at {service.address}", flush=True)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        signals = {signal.SIGTERM, signal.SIGINT}
        for number in (n for n in signals if signal.getsignal(n) is not signal.SIG_IGN):
            loop.add_signal_handler(number, _on_signal, service)
        return await service.run(say_ready)

    code = asyncio.run(run())
    if service.is_stuck:  # the interpreter would wait for the thread, or crash with it
        os._exit(code)
    return code


def _load(name: str | Path, profile: LoadedProfile, report: Report) -> MoE:
    """Load for the server and for whoever watches the terminal."""

    def say_plan(plan: MemoryPlan) -> None:
        if plan.fits:  # or the error shows it
            print(f"moe: {plan}", file=sys.stderr)

    with reporting(sys.stderr.isatty()) as show:

        def both(progress: LoadProgress) -> None:
            report(progress)
            show(progress)

        return MoE.from_pretrained(name, profile, progress=both, on_plan=say_plan)


def _on_signal(service: Service) -> None:
    if service.stopping:
        os._exit(1)
    service.stop()
