"""The one collective that dispatch needs: an all-to-all of rows of bytes, of other sizes each time.

`GroupExchange` runs it over a process group (`deepspeed.comm` where DeepSpeed has set up the group,
else torch.distributed). `SocketExchange` connects processes of one machine by local sockets, in a
fraction of gloo's time for a small message: gloo hands each one to a thread and back, which takes
several times what a decode step's rows take. Here the waiting thread moves the bytes itself.
Messages have no frames, as both ends know all sizes. Compiled code may use the same sockets
(`experts.dispatch.native`). `prefer_local_sockets` chooses.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu import choose_kernel

Bytes = NDArray[np.uint8]


class ExchangeError(RuntimeError):
    """The connection to another rank is lost; no later exchange can succeed."""


@dataclass(frozen=True)
class PeerSockets:
    """The sockets to the other ranks, for compiled code.

    Attributes:
        files: descriptor of the socket to each rank, -1 for this rank.
        timeout_s: longest wait for a byte of another rank.
        run: calls a function that uses the sockets; a watchdog may wrap it.
    """

    files: Sequence[int]
    timeout_s: float
    run: Callable[[Callable[[], int]], int] = lambda act: act()

    def lost(self, rank: int, error: int) -> ExchangeError:
        """The error to raise when a rank's socket failed with this errno; 0: it was closed."""
        own = self.files.index(-1)
        if error == errno.EAGAIN:
            return ExchangeError(
                f"rank {own} has heard nothing from rank {rank} for {self.timeout_s:g} s"
            )
        reason = OSError(error, os.strerror(error)) if error else "the connection was closed"
        return ExchangeError(f"rank {own} has lost rank {rank}: {reason}")


class Exchange(Protocol):
    """A group of ranks with an all-to-all.

    Attributes:
        rank: this rank.
        size: number of ranks.
        device: where the rows must be.
        same_machine: all ranks are processes of one machine, connected by sockets.
        sockets: those sockets, which compiled code may use while no all-to-all is in flight; None
            where it cannot.
    """

    rank: int
    size: int
    device: torch.device
    same_machine: bool
    sockets: PeerSockets | None

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to send rows to all ranks; collective.

        Args:
            sent: ``(rows, bytes)`` uint8, contiguous, rows for rank 0 first; must not change until
                the wait returns.
            received: the same for the rows that come, filled by the time the wait returns.
            send_rows: rows for each rank, 0 for this one.
            receive_rows: rows from each rank, 0 from this one.

        Returns:
            A function that waits for the end.

        Raises:
            ExchangeError: the other ranks cannot be reached; the wait may raise it, too.
        """
        ...

    def settle(self) -> None:
        """Wait until the device has done all that it was given, so that reading from it does not
        wait for another rank without a bound. Where rows are in main memory, each wait has one.

        Raises:
            ExchangeError: the other ranks cannot be reached.
        """
        ...

    def close(self) -> None:
        """Leave, so that no rank waits for another in vain."""
        ...


class GroupExchange:
    """An `Exchange` over a process group.

    NCCL's waits neither block the host nor raise: they only order the device's work. So the host
    waits in `settle`, and where the time is up it aborts the group, which lets the device go on.

    Args:
        group: of torch.distributed; None for the default one. Its timeout bounds each wait of gloo.
        device: of the rows; the CPU for gloo, a CUDA device for NCCL.
        timeout_s: bounds `settle`.
    """

    same_machine = False
    sockets: PeerSockets | None = None

    def __init__(
        self, group: Any = None, device: torch.device | str = "cpu", timeout_s: float = math.inf
    ) -> None:
        self._comm, self._group, self._timeout_s = _comm(), group, timeout_s
        self.rank = self._comm.get_rank(group)
        self.size = self._comm.get_world_size(group)
        self.device = torch.device(device)

    def all_to_all(
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

    def settle(self) -> None:
        if self.device.type != "cuda":
            return
        try:
            done = torch.cuda.Event()
            done.record()
            began = time.monotonic()
            while not done.query():
                waited = time.monotonic() - began
                if waited > self._timeout_s:
                    self.close()
                    raise RuntimeError(f"nothing has come for {self._timeout_s:g} s")
                time.sleep(0 if waited < _SPIN_S else _SLEEP_S)
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Abort NCCL's group: its kernels wait for lost ranks for ever. gloo's ends by itself."""
        if self.device.type != "cuda":
            return
        group = torch.distributed.group.WORLD if self._group is None else self._group
        if group is not None:
            group.abort()

    def _lost(self, error: RuntimeError) -> ExchangeError:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return ExchangeError(
            f"rank {self.rank} has lost the other {self.size - 1} ranks: {reason[0]}"
        )


_SPIN_S, _SLEEP_S = 1e-3, 50e-6
"""The host looks at the device without a rest for a while, then at intervals."""


def _comm() -> Any:
    deepspeed = sys.modules.get("deepspeed.comm")
    ready = deepspeed is not None and deepspeed.is_initialized()
    return deepspeed if ready else torch.distributed


_PATH = 108
"""Longest address of a local socket, in bytes."""
_BUFFER = 1 << 20
_CONNECT_S = 5.0


def prefer_local_sockets(exchange: Exchange, timeout_s: float) -> Exchange:
    """A `SocketExchange` if all ranks are processes of one machine with a temporary folder, else
    `exchange`; collective.

    Args:
        exchange: the present connection.
        timeout_s: longest wait for a byte of another rank.
    """
    with ExitStack() as closing:
        listener = closing.enter_context(socket.socket(socket.AF_UNIX))
        try:  # mode 0700: no other user can connect
            path = os.path.join(closing.enter_context(tempfile.TemporaryDirectory()), "s")
            listener.bind(path)
            listener.listen(exchange.size)
        except OSError:  # no folder can be written, or its name is too long
            path = ""
        addresses = texts_of(exchange, path)
        if not all(addresses):
            return exchange
        peers = _connect(addresses, exchange.rank, listener)
        agreed = all(texts_of(exchange, "yes" if peers is not None else ""))
    if peers is None or not agreed:
        for stream in (peers or {}).values():
            stream.close()
        return exchange
    return SocketExchange(exchange.rank, peers, timeout_s)


class SocketExchange:
    """An `Exchange` over connected sockets of one machine.

    Args:
        rank: this rank.
        peers: a stream to each other rank.
        timeout_s: longest wait for a byte of another rank.
    """

    device, same_machine = torch.device("cpu"), True

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.size = rank, len(peers) + 1
        files = [peers[r].fileno() if r in peers else -1 for r in range(self.size)]
        self._sockets = PeerSockets(files, timeout_s)
        self._peers = [_PeerStream(self._sockets, other, peers[other]) for other in sorted(peers)]
        self.sockets: PeerSockets | None = self._sockets if choose_kernel()[0] is not None else None

    def all_to_all(
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
                while min(peer.sent, peer.received) < number:
                    self._wait_for(peer)

        return wait

    def settle(self) -> None:
        pass

    def close(self) -> None:
        for peer in self._peers:
            peer.stream.close()

    def _wait_for(self, late: _PeerStream) -> None:
        """Move some bytes, sending and receiving at once while anything is left to send."""
        sending = [peer for peer in self._peers if peer.outgoing]
        if sending:  # a peer that does not read may be blocked on a send to this rank
            poll, peers = select.poll(), {late, *sending}
            for peer in peers:
                events = select.POLLIN * bool(peer.incoming) | select.POLLOUT * bool(peer.outgoing)
                poll.register(peer.stream, events)
            ready = bool(poll.poll(self._sockets.timeout_s * 1000))
            for peer in peers:
                peer.push()
                if peer.incoming:
                    peer.pull(socket.MSG_DONTWAIT)
        else:
            ready = late.pull(socket.MSG_WAITALL)
        if not ready:
            raise self._sockets.lost(late.rank, errno.EAGAIN)


class _PeerStream:
    """The messages in flight to and from one rank, in order.

    `begun`, `sent` and `received` count messages.
    """

    def __init__(self, sockets: PeerSockets, rank: int, stream: socket.socket) -> None:
        stream.settimeout(None)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        most = struct.pack("@ll", int(sockets.timeout_s), int(sockets.timeout_s % 1 * 1e6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        self._sockets, self.rank, self.stream = sockets, rank, stream
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[memoryview] = deque()
        self.begun = self.sent = self.received = 0

    def begin(self, outgoing: memoryview, incoming: memoryview) -> None:
        self.begun += 1
        self.outgoing.append(outgoing)
        self.incoming.append(incoming)
        self.push()

    def push(self) -> None:
        """Send as many bytes as the socket takes without blocking."""
        while self.outgoing:
            if part := self.outgoing[0]:
                try:
                    part = part[self.stream.send(part, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    return
                except OSError as error:
                    raise self._sockets.lost(self.rank, error.errno or errno.EIO) from error
                self.outgoing[0] = part
            if not part:
                self.outgoing.popleft()
                self.sent += 1

    def pull(self, how: int) -> bool:
        """Receive some of the next message; False: nothing has arrived.

        Args:
            how: a flag of `recv`: MSG_DONTWAIT, or MSG_WAITALL to sleep until all of it is there.
        """
        if part := self.incoming[0]:
            try:
                size = self.stream.recv_into(part, len(part), how)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._sockets.lost(self.rank, error.errno or errno.EIO) from error
            if not size:
                raise self._sockets.lost(self.rank, 0)
            self.incoming[0] = part = part[size:]
        if not part:
            self.incoming.popleft()
            self.received += 1
        return True


def all_gather(exchange: Exchange, sent: Tensor, sizes_R: Sequence[int]) -> list[Bytes]:
    """The message of each rank; collective.

    Args:
        sent: this rank's message, repeated for each other rank.
        sizes_R: bytes of each rank's message.
    """
    rank, from_R = exchange.rank, list(sizes_R)
    to_R = [from_R[rank]] * exchange.size
    to_R[rank] = from_R[rank] = 0
    received = torch.empty(sum(from_R), dtype=torch.uint8)
    leaving = sent if exchange.size > 1 else sent[:0]
    exchange.all_to_all(leaving, received, to_R, from_R)()
    gathered, start, messages = received.numpy(), 0, []
    for size in from_R:
        messages.append(gathered[start : start + size])
        start += size
    messages[rank] = sent.numpy()[: sizes_R[rank]]
    return messages


def texts_of(exchange: Exchange, text: str, most: int = _PATH) -> list[str]:
    """A text of each rank, cut to so many bytes; collective."""
    own = torch.tensor(list(text.encode()[:most].ljust(most, b"\0")), dtype=torch.uint8)
    messages = all_gather(exchange, own.repeat(max(exchange.size - 1, 1)), [most] * exchange.size)
    return [message.tobytes().rstrip(b"\0").decode(errors="ignore") for message in messages]


def _connect(
    addresses: Sequence[str], rank: int, listener: socket.socket
) -> dict[int, socket.socket] | None:
    """Streams to all other ranks: a rank connects to those before it and accepts those after it.
    None: some cannot be reached."""
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
