"""Connections to the server: how many there are, and for how long each may say nothing.

Every connection takes a descriptor, and so do the model's files and our processes. asyncio's own
server accepts all connections that wait before it looks at the first, and stops accepting for a
second when descriptors run out. So `Acceptor` takes one after the other, `Crowd` makes room for
each before that, and `most_connections` says for how many the machine has descriptors.

uvicorn times only the pause between two requests: a client could hold a connection for ever with
headers that arrive byte by byte, with a body that the server no longer reads, or by not reading its
answer. `TimedProtocol` times headers, `moe.server.bodies` bodies, and `EventStream` streams.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import os
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from moe.server.listener import MOST

RESERVED = 256
"""Descriptors for the model's files, our processes and links, beside those that are open."""
TURNED_AWAY = 32
"""Connections kept for clients that are told that there are too many (503)."""
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_REST_S = 0.1


def most_connections() -> int:
    """Return the most connections that this process has descriptors for: a quarter of its limit or
    more.

    Raises the limit to what the user may raise it to.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = hard
    if limit == resource.RLIM_INFINITY:
        return MOST
    free = limit - len(os.listdir("/dev/fd"))
    return min(MOST, max(free - RESERVED, limit // 4))


class Crowd:
    """All connections. Those without a request give way to new ones, those of the address that has
    most first, so that silent connections keep nobody out.

    Args:
        most: connections in all. Where `busy_limit` of them have requests, uvicorn answers 503;
            where all have, new ones are refused.
        each: connections of one address (IPv6: of one network of 64 bits); None: half of all.
        on_close: told ``gave_way`` or ``refused`` of each that had to go.
    """

    def __init__(
        self,
        most: int,
        each: int | None = None,
        on_close: Callable[[str], object] = lambda why: None,
    ) -> None:
        self._most, self._each = most, each or most // 2 or 1
        self._on_close = on_close
        self._by_address: dict[str, dict[TimedProtocol, None]] = {}  # the oldest first
        self._count = 0

    @property
    def busy_limit(self) -> int:
        """The number of connections that may have requests."""
        return self._most - min(TURNED_AWAY, self._most // 8)

    def admit(self, new: TimedProtocol, address: str) -> bool:
        """Take a connection in, closing another if there are too many; False: it must go."""
        theirs = self._by_address.get(address, {})
        admitted = len(theirs) < self._each or self._close_idle(address)
        # uvicorn counts silent ones too: there are never so many that it refuses requests for them.
        if admitted and self._count >= self.busy_limit - 1:
            admitted = self.make_room() or self._count < self._most
        if admitted:
            self._by_address.setdefault(address, {})[new] = None
            self._count += 1
        else:
            self._on_close("refused")
        return admitted

    def make_room(self) -> bool:
        """Close the oldest silent connection of the address that has most; False: there is none."""
        by_size = sorted(self._by_address, key=lambda each: -len(self._by_address[each]))
        return any(map(self._close_idle, by_size))

    def leave(self, protocol: TimedProtocol, address: str) -> None:
        """Forget a connection, if it is known."""
        theirs = self._by_address.get(address, {})
        if protocol in theirs:
            del theirs[protocol]
            self._count -= 1
            if not theirs:
                del self._by_address[address]

    def _close_idle(self, address: str) -> bool:
        """Close the oldest connection of an address without a request; False: there is none."""
        for protocol in self._by_address.get(address, ()):
            if protocol.is_idle:
                self.leave(protocol, address)
                protocol.abort()
                self._on_close("gave_way")
                return True
        return False


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a time limit whenever no request is being answered.

    Args:
        read_timeout_s: seconds from the start of the connection, or from the end of the last
            answer, until the next request's headers are complete; as long for a TLS handshake.
        crowd: of all connections.
    """

    def __init__(self, *args: Any, read_timeout_s: float, crowd: Crowd, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._crowd = crowd
        self._address = ""
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = math.inf

    def open(self, connection: socket.socket, peer: object, tls: ssl.SSLContext | None) -> None:
        """Serve an accepted connection, or close it if the crowd has no room."""
        self._address = address_of(peer)
        if self._crowd.admit(self, self._address):
            self._opening = self.loop.create_task(self._open(connection, tls))
        else:
            connection.close()

    async def _open(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        timeout_s = None if tls is None else self._read_timeout_s
        try:
            await self.loop.connect_accepted_socket(
                lambda: self, connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # of the handshake
            pass
        finally:
            if not self._is_open:
                self._crowd.leave(self, self._address)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_open = True
        self._watch()

    @property
    def is_idle(self) -> bool:
        """No request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def abort(self) -> None:
        """Close the connection at once, in a handshake too."""
        if self._is_open:
            self.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._crowd.leave(self, self._address)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer, or stop it while a request is being answered."""
        if not self.is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._unsent = math.inf
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._read_timeout_s, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # the client still reads its answer
            self._unsent = unsent
            self._start_timer()
        else:
            self.transport.abort()  # closing would wait until the client has read everything


def address_of(peer: object) -> str:
    """Whom a connection counts for: an IPv4 address, a network of 64 bits of IPv6, or "" for a
    socket of this machine."""
    if not isinstance(peer, tuple):
        return ""
    with suppress(ValueError):
        address = ipaddress.ip_address(peer[0].partition("%")[0])
        if address.version == 6 and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(peer[0])


class Acceptor:
    """Accepts the connections of a socket, one after the other, for as long as it is open.

    It has what uvicorn needs of `asyncio.Server`.

    Args:
        listener: a listening socket.
        make: makes the protocol of a connection.
        crowd: of all connections.
        tls: for HTTPS; None: HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], TimedProtocol],
        crowd: Crowd,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._make, self._crowd, self._tls = listener, make, crowd, tls
        self._task = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _SHORTAGE and not self._crowd.make_room():
                    await asyncio.sleep(_REST_S)
            else:
                self._make().open(connection, peer, self._tls)
            await asyncio.sleep(0)  # what gave way closes its descriptor now

    def close(self) -> None:
        """Accept no more connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)
