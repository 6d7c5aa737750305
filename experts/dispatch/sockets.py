"""Ranks of one machine talk over local sockets: a fraction of gloo's time for a small exchange.

gloo hands each message to a thread of its own and back, several times what a decode step's rows
take. Here the thread that waits moves the bytes. Nothing is framed, as both ends know all sizes.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from experts.dispatch.exchange import Exchange, ExchangeError

_PATH = 108
"""Longest address of a local socket."""
_BUFFER = 1 << 20
_CONNECT_S = 5.0


def nearest(exchange: Exchange, timeout_s: float) -> Exchange:
    """Local sockets where all ranks are processes of one machine, else what they have; collective.

    Args:
        exchange: connects them now.
        timeout_s: most seconds without a byte from any rank.
    """
    if exchange.device.type != "cpu":
        return exchange
    with tempfile.TemporaryDirectory() as directory:  # nobody else's: mode 0700
        path = os.path.join(directory, "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(exchange.size)
            addresses = [bytes(a).rstrip(b"\0").decode() for a in _tell(exchange, path.encode())]
            peers = _connect(addresses, exchange.rank, listener)
            agreed = all(map(any, _tell(exchange, b"\1" if peers is not None else b"")))
    if peers is None or not agreed:
        for stream in (peers or {}).values():
            stream.close()
        return exchange
    return SocketExchange(exchange.rank, peers, timeout_s)


class SocketExchange:
    """An `Exchange` over connected sockets of one machine.

    Args:
        rank: of this process.
        peers: a stream to each other rank.
        timeout_s: most seconds without a byte from any rank that is waited for.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._timeout_s = timeout_s
        self._peers = [_Peer(other, peers[other]) for other in sorted(peers)]

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        going, coming = _parts(sent, send_rows), _parts(received, receive_rows)
        ends = []
        for peer in self._peers:
            peer.going.append(going[peer.rank])
            peer.coming.append(coming[peer.rank])
            ends.append((peer, peer.sent + len(peer.going), peer.got + len(peer.coming)))
            peer.move(self.rank)

        def wait() -> None:
            while late := [p for p, out, back in ends if p.sent < out or p.got < back]:
                self._pump(late)

        return wait

    def close(self) -> None:
        for peer in self._peers:
            peer.stream.close()

    def _pump(self, late: Sequence[_Peer]) -> None:
        poll = select.poll()
        for peer in late:
            poll.register(peer.stream, peer.interest())
        if not poll.poll(self._timeout_s * 1000):
            names = ", ".join(f"rank {peer.rank}" for peer in late)
            raise ExchangeError(
                f"rank {self.rank} has heard nothing from {names} for {self._timeout_s:g} s"
            )
        for peer in late:
            peer.move(self.rank)


class _Peer:
    """What is on its way to and from one rank, in order."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self.rank, self.stream = rank, stream
        self.going: deque[memoryview] = deque()
        self.coming: deque[memoryview] = deque()
        self.sent = self.got = 0  # parts, since the beginning

    def interest(self) -> int:
        return select.POLLIN * bool(self.coming) | select.POLLOUT * bool(self.going)

    def move(self, own: int) -> None:
        """As many bytes as go now."""
        try:
            self.sent += _drain(self.going, self.stream.send)
            self.got += _drain(self.coming, self.stream.recv_into)
        except OSError as error:
            raise ExchangeError(f"rank {own} has lost rank {self.rank}: {error}") from error


def _drain(parts: deque[memoryview], act: Callable[[memoryview], int]) -> int:
    """How many parts were finished."""
    finished = 0
    while parts:
        part = parts[0]
        if len(part):
            try:
                moved = act(part)
            except (BlockingIOError, InterruptedError):
                break
            if not moved:
                raise ConnectionResetError("the connection was closed")
            parts[0] = part = part[moved:]
        if not len(part):
            parts.popleft()
            finished += 1
    return finished


def _parts(rows: Tensor, rows_R: Sequence[int]) -> list[memoryview]:
    """The bytes of each rank's rows; the views keep the memory."""
    if not rows.numel():
        return [memoryview(b"")] * len(rows_R)
    view = rows.view(torch.uint8).numpy().data.cast("B")
    width, ends = len(view) // len(rows), list(accumulate(rows_R, initial=0))
    return [view[start * width : end * width] for start, end in pairwise(ends)]


def _tell(exchange: Exchange, text: bytes) -> list[list[int]]:
    """A few bytes of each rank, at all ranks."""
    others = [int(rank != exchange.rank) for rank in range(exchange.size)]
    own = torch.tensor(list(text.ljust(_PATH, b"\0")), dtype=torch.uint8)
    received = torch.empty(exchange.size - 1, _PATH, dtype=torch.uint8)
    exchange.start(own.expand(exchange.size - 1, -1).contiguous(), received, others, others)()
    told = received.tolist()
    told.insert(exchange.rank, own.tolist())
    return told


def _connect(
    addresses: Sequence[str], rank: int, listener: socket.socket
) -> dict[int, socket.socket] | None:
    """Streams to all other ranks: this one calls those before it. None: some are out of reach."""
    peers: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            peers[other] = socket.socket(socket.AF_UNIX)
            peers[other].settimeout(_CONNECT_S)
            peers[other].connect(addresses[other])
            peers[other].sendall(rank.to_bytes(4, "little"))
        listener.settimeout(_CONNECT_S)
        while len(peers) < len(addresses) - 1:
            stream, _ = listener.accept()
            stream.settimeout(_CONNECT_S)
            peers[int.from_bytes(stream.recv(4, socket.MSG_WAITALL), "little")] = stream
    except OSError:
        for stream in peers.values():
            stream.close()
        return None
    return peers
