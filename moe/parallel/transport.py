"""Messages between ranks: JSON in length-prefixed frames, over connections that prove a secret.

Safe against strangers: a message is data only, its length is checked before memory is allocated,
and a connection whose other end fails the challenge is closed.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

MAX_BYTES = 64 * 2**20
"""Most bytes of a message; an order with the longest prompts is far smaller."""
_MAX_GREETING = 4096
_HEADER = struct.Struct("!I")
_CHALLENGE = 32

Message = dict[str, Any]


class WireError(ConnectionError):
    """The other end is gone, or is not one of ours."""


def readable(files: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Return the descriptors that can be read, once there are any, or when the time is up.

    Unlike `select`, it takes descriptors from 1024 on: connections of clients may have all below.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    milliseconds = None if timeout_s is None else math.ceil(timeout_s * 1000)
    return [file for file, _ in poll.poll(milliseconds)]


class Connection:
    """Sends and receives messages.

    Args:
        sock: connected; this object owns it.
        limit: most bytes of a received message.
    """

    def __init__(self, sock: socket.socket, limit: int = MAX_BYTES) -> None:
        self.socket, self.limit = sock, limit
        self._sending = threading.Lock()
        self._deadline: float | None = None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Raises `WireError` if the other end is gone, or reads nothing within the timeout."""
        data = json.dumps(message, separators=(",", ":")).encode()
        assert len(data) <= MAX_BYTES, f"a message of {len(data)} bytes"
        try:
            with self._sending:
                self.socket.sendall(_HEADER.pack(len(data)) + data)
        except OSError as error:
            raise WireError(f"cannot send: {error}") from error

    def receive(self) -> Message:
        """The next message. Raises `WireError` if there will be none."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > self.limit:
            raise WireError(f"a message of {size} bytes is longer than the limit of {self.limit}")
        data = self._read(size)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from None
        if not isinstance(message, dict):
            raise WireError("not a message: no JSON object")
        return message

    def end_by(self, deadline: float | None) -> None:
        """Let what is received after a time of `time.monotonic` fail; None: no more."""
        self._deadline = deadline

    def close(self) -> None:
        self.socket.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                if self._deadline is not None:  # a timeout starts again with each byte
                    self.socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
                part = self.socket.recv(min(size - len(parts), 1 << 20))
            except OSError as error:
                raise WireError(f"cannot receive: {error}") from error
            if not part:
                raise WireError("the connection was closed")
            parts += part
        return bytes(parts)


def listen(address: str, backlog: int) -> socket.socket:
    """A socket on a free port of one interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def accept(listener: socket.socket, secret: bytes, timeout_s: float) -> tuple[Connection, Message]:
    """The next connection, if its other end knows the secret, and what it says about itself.

    Raises:
        WireError: it does not; the next one may.
        TimeoutError: no rank connected.
    """
    sock, _ = listener.accept()
    sock.settimeout(timeout_s)
    connection = Connection(sock, _MAX_GREETING)
    connection.end_by(time.monotonic() + timeout_s)
    challenge = os.urandom(_CHALLENGE).hex()
    try:
        connection.send({"challenge": challenge})
        greeting = connection.receive()
        proof = _proof(secret, challenge, greeting.get("who"))
        if not _equal(proof, greeting.get("proof")):
            raise WireError("the other end of a connection does not know the secret")
        connection.send({"proof": _proof(secret, str(greeting.get("challenge")), "coordinator")})
    except (WireError, RecursionError) as error:
        connection.close()
        raise WireError(str(error)) from None
    connection.limit = MAX_BYTES
    connection.end_by(None)
    sock.settimeout(timeout_s)
    return connection, greeting["who"]


def connect(address: str, port: int, secret: bytes, who: Message, timeout_s: float) -> Connection:
    """A connection to `accept`; both ends have proved that they know the secret."""
    try:
        sock = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise WireError(f"cannot connect to {address} port {port}: {error}") from error
    connection = Connection(sock)
    own = os.urandom(_CHALLENGE).hex()
    challenge = str(connection.receive().get("challenge"))
    connection.send({"who": who, "proof": _proof(secret, challenge, who), "challenge": own})
    answer = connection.receive().get("proof")
    if not _equal(_proof(secret, own, "coordinator"), answer):
        raise WireError(f"what listens at {address} port {port} does not know the secret")
    return connection


def _equal(proof: str, given: object) -> bool:
    """Compare in a time that does not say how much of it is right."""
    return hmac.compare_digest(proof.encode(), str(given).encode(errors="replace"))


def _proof(secret: bytes, challenge: str, who: object) -> str:
    text = json.dumps([challenge, who], sort_keys=True)
    return hmac.digest(secret, text.encode(), "sha256").hex()
