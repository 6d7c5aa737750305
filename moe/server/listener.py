"""The socket of ``moe serve``.

It is bound before torch is imported, so a port in use is an error at once.
"""

from __future__ import annotations

import socket

from moe.errors import MoEError

MOST = 2048
"""Most connections, however many descriptors there are."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises `MoEError` if it cannot be bound."""
    if not host:  # sockets read an empty host as every address
        raise MoEError("the host is empty; give one, or leave out --host for 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=MOST)
    except (OSError, OverflowError) as error:
        raise MoEError(
            f"cannot listen on {host} port {port}: {error}; choose another with --port or --host"
        ) from None
    # Without this, tokens wait for the client's delayed acknowledgements (40 ms). asyncio sets it
    # only for sockets made with an explicit protocol. Accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
