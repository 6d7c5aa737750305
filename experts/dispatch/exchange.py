"""One collective is all that dispatch needs: every rank sends rows to every other.

`deepspeed.comm` carries it where DeepSpeed has set up the process groups, else torch.distributed.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.cpu import choose_kernel


class ExchangeError(RuntimeError):
    """The ranks have lost each other; the message says how. No later exchange can succeed."""


@dataclass(frozen=True)
class Line:
    """Sockets to the other ranks.

    Attributes:
        files: to all ranks in order, -1 for the own one.
        timeout_s: most seconds without a byte from a rank that is waited for.
        run: calls what uses them.
    """

    files: Sequence[int]
    timeout_s: float
    run: Callable[[Callable[[], int]], int] = lambda act: act()

    def lost(self, rank: int, error: int) -> ExchangeError:
        """What to raise where a rank's socket has failed, with an error's number or, 0, its end."""
        own = self.files.index(-1)
        if error == errno.EAGAIN:
            return ExchangeError(
                f"rank {own} has heard nothing from rank {rank} for {self.timeout_s:g} s"
            )
        reason = OSError(error, os.strerror(error)) if error else "the connection was closed"
        return ExchangeError(f"rank {own} has lost rank {rank}: {reason}")


class Exchange(Protocol):
    """Ranks that send rows of bytes to each other.

    Attributes:
        rank: of this process among them.
        size: how many they are.
        device: where the rows must be.
        near: all ranks are processes of one machine and do without a process group.
        line: what carries it, where compiled code may use that while nothing else is on its way.
    """

    rank: int
    size: int
    device: torch.device
    near: bool
    line: Line | None

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to send rows to all ranks; collective.

        Args:
            sent: uint8, contiguous, rows for rank 0 first; left alone until the wait is over.
            received: uint8, contiguous, filled in the same order.
            send_rows: how many are for each rank, none for the own.
            receive_rows: how many come from each rank.

        Returns:
            What waits for the end.

        Raises:
            ExchangeError: the other ranks cannot be reached; also when waiting.
        """
        ...


class GroupExchange:
    """An `Exchange` over a process group.

    Args:
        group: of torch.distributed; None for the default one. Its timeout bounds every wait.
        device: of the rows; the CPU for gloo, a CUDA device for NCCL.
    """

    near = False
    line: Line | None = None

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        self._comm, self._group = _comm(), group
        self.rank = self._comm.get_rank(group)
        self.size = self._comm.get_world_size(group)
        self.device = torch.device(device)

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        try:
            work = self._comm.all_to_all_single(
                received, sent, list(receive_rows), list(send_rows), self._group, True
            )
        except RuntimeError as error:
            raise self._lost(error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error

        return wait

    def _lost(self, error: RuntimeError) -> ExchangeError:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return ExchangeError(
            f"rank {self.rank} has lost the other {self.size - 1} ranks: {reason[0]}"
        )


def _comm() -> Any:
    deepspeed = sys.modules.get("deepspeed.comm")
    ready = deepspeed is not None and deepspeed.is_initialized()
    return deepspeed if ready else torch.distributed


# ---- Ranks of one machine talk over local sockets: a fraction of gloo's time for a small
# exchange.
#
# gloo hands each message to a thread of its own and back, several times what a decode step's rows
# take. Here the thread that waits moves the bytes: where nothing is left to send, by one call a
# rank that sleeps until all are there. Nothing is framed, as both ends know all sizes. Decode
# steps use the same sockets in compiled code (`at_once`).

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

    device, near = torch.device("cpu"), True

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.size = rank, len(peers) + 1
        files = [peers[r].fileno() if r in peers else -1 for r in range(self.size)]
        self._line = Line(files, timeout_s)
        self._peers = [_Peer(self._line, other, peers[other]) for other in sorted(peers)]
        self.line = self._line if choose_kernel()[0] is not None else None

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        out, back = sent.numpy().reshape(-1).data, received.numpy().reshape(-1).data
        width, at, to = sent.stride(0), 0, 0
        for peer in self._peers:
            go, come = width * send_rows[peer.rank], width * receive_rows[peer.rank]
            peer.begin(out[at : at + go], back[to : to + come])
            at, to = at + go, to + come
        ends = [(peer, peer.begun) for peer in self._peers]

        def wait() -> None:
            for peer, number in ends:
                while min(peer.sent, peer.got) < number:
                    self._wait_for(peer)

        return wait

    def close(self) -> None:
        for peer in self._peers:
            peer.stream.close()

    def _wait_for(self, late: _Peer) -> None:
        """Until some bytes have moved."""
        sending = [peer for peer in self._peers if peer.going]
        if sending:  # those who take nothing may be waiting for this rank
            poll, peers = select.poll(), {late, *sending}
            for peer in peers:
                events = select.POLLIN * bool(peer.coming) | select.POLLOUT * bool(peer.going)
                poll.register(peer.stream, events)
            heard = bool(poll.poll(self._line.timeout_s * 1000))
            for peer in peers:
                peer.push()
                if peer.coming:
                    peer.pull(socket.MSG_DONTWAIT)
        else:
            heard = late.pull(socket.MSG_WAITALL)
        if not heard:
            raise self._line.lost(late.rank, errno.EAGAIN)


class _Peer:
    """What is on its way to and from one rank, in order; exchanges begun, sent and got so far."""

    def __init__(self, line: Line, rank: int, stream: socket.socket) -> None:
        stream.settimeout(None)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        most = struct.pack("@ll", int(line.timeout_s), int(line.timeout_s % 1 * 1e6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        self._line, self.rank, self.stream = line, rank, stream
        self.going: deque[memoryview] = deque()
        self.coming: deque[memoryview] = deque()
        self.begun = self.sent = self.got = 0

    def begin(self, going: memoryview, coming: memoryview) -> None:
        self.begun += 1
        self.going.append(going)
        self.coming.append(coming)
        self.push()

    def push(self) -> None:
        """Send as many bytes as go now."""
        while self.going:
            if part := self.going[0]:
                try:
                    part = part[self.stream.send(part, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    return
                except OSError as error:
                    raise self._line.lost(self.rank, error.errno or errno.EIO) from error
                self.going[0] = part
            if not part:
                self.going.popleft()
                self.sent += 1

    def pull(self, how: int) -> bool:
        """Receive the next part, or some of it; False: nothing came."""
        if part := self.coming[0]:
            try:
                size = self.stream.recv_into(part, len(part), how)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._line.lost(self.rank, error.errno or errno.EIO) from error
            if not size:
                raise self._line.lost(self.rank, 0)
            self.coming[0] = part = part[size:]
        if not part:
            self.coming.popleft()
            self.got += 1
        return True


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
