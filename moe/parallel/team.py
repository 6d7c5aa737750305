"""Rank 0 among its ranks: what it says to the others, and what it does when one is lost.

Orders and replies have connections of their own, on which only the computing threads talk; the
watchdog has others.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from moe.errors import RankLostError
from moe.parallel.endings import exit_now, kill_lost_rank
from moe.parallel.membership import CONTROL, WATCH, Membership
from moe.parallel.transport import Message, WireError
from moe.parallel.watchdog import Heartbeat, WakePipe, Watchdog

NAMED_S = 2.0
"""How long the watchdog has to say who is lost, once somebody has noticed that somebody is."""
ANSWER_S = 5.0
"""How long rank 0 has to tell its callers of a loss; then the process ends in any case."""
_logger = logging.getLogger("moe")


class WorkerLinks:
    """Rank 0, which talks to the user and plans.

    Args:
        roll: who there is.
        timeout_s: after which a rank is lost.

    Attributes:
        goes_on: the others go on without a rank that is lost; while loading, nobody does.
        ranks: that are not lost, in order; numbers of the launch.
        pulse: of this process.
        gone: ranks that were given up, and why each was lost.
        on_loss: told of a loss in the watchdog's thread, so that callers need not wait for the
            thread that computes, which may hang.
    """

    def __init__(self, roll: Membership, timeout_s: float) -> None:
        self.pulse, self.rank = Heartbeat(), 0
        self.ranks = list(range(len(roll.members)))
        self.on_loss: Callable[[RankLostError], object] | None = None
        self.goes_on = False
        self._roll = roll
        self._control = roll.connections[CONTROL]
        self.gone: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._named = threading.Event()
        self._alarm = WakePipe()
        for connection in self._control.values():
            connection.socket.settimeout(timeout_s)
        peers = roll.connections[WATCH]
        self._watch = Watchdog(0, peers, self.pulse, timeout_s, self._on_loss, self._on_message)
        self._watch.start()

    def tell(self, rank: int, message: Message) -> None:
        """Send an order. Raises `RankLostError`."""
        self.check()
        try:
            self._control[rank].send(message)
        except WireError:
            raise self.loss() from None

    def gather(self, ranks: Iterable[int], number: int) -> dict[int, Message]:
        """Each rank's reply to the order of a number. Raises `RankLostError`."""
        bell = self._alarm.fileno()
        open_ones = {self._control[rank].fileno(): rank for rank in ranks}
        replies: dict[int, Message] = {}
        while open_ones:
            self.check()
            ready, _, _ = select.select([*open_ones, bell], [], [])
            for file in (file for file in ready if file != bell):
                rank = open_ones[file]
                try:
                    reply = self._control[rank].receive()
                except WireError:
                    raise self.loss() from None
                if reply["number"] == number:  # else it is about a step that was given up
                    replies[rank] = reply
                    del open_ones[file]
        return replies

    def check(self) -> None:
        """Raises `RankLostError` if somebody is lost."""
        if self._lost:
            raise self.loss()

    def loss(self, noticed: str = "a rank has left a step") -> RankLostError:
        """Who is lost; what was noticed, where the watchdog has nobody to blame."""
        self._named.wait(NAMED_S)
        reasons = [f"rank {rank} {why}" for rank, why in sorted(self._lost.items())]
        return RankLostError("; ".join(reasons) or noticed)

    def give_up(self) -> list[int]:
        """Go on without the lost ranks. Returns those."""
        gone = sorted(self._lost)
        self.ranks = [rank for rank in self.ranks if rank not in self._lost]
        for rank in gone:
            self._control.pop(rank).close()
            self.gone[rank] = self._lost.pop(rank)
        self._named.clear()
        self._alarm.reset()
        return gone

    def close(self) -> None:
        """Let everybody end in peace."""
        self._watch.close()
        for connection in self._control.values():
            with suppress(WireError):
                connection.send({"do": "stop"})
        for connection in self._control.values():
            connection.socket.settimeout(ANSWER_S)
            with suppress(WireError):
                connection.receive()  # there is none: the other end closes

    def _on_message(self, rank: int, message: Message) -> None:
        self._on_loss(rank, f"has failed: {message['failed']}")

    def _on_loss(self, rank: int, why: str) -> None:
        self._lost.setdefault(rank, why)
        self._named.set()
        self._alarm.ring()
        kill_lost_rank(self._roll, rank)
        if self.goes_on and rank != 0:
            return
        error = self.loss()
        for other in self.ranks[1:]:
            self._watch.say(other, {"end": str(error)})
        ending = threading.Timer(ANSWER_S, exit_now, [str(error)])
        ending.daemon = True
        ending.start()
        if self.on_loss is not None:
            _logger.error("%s", error)
            self.on_loss(error)


# ---- Any rank but the first: it takes orders, and ends with rank 0.


class CoordinatorLink:
    """Any other rank.

    Args:
        roll: who there is.
        rank: of this process.
        timeout_s: after which rank 0 is lost.

    Attributes:
        pulse: of this process.
    """

    def __init__(self, roll: Membership, rank: int, timeout_s: float) -> None:
        self.pulse, self.rank = Heartbeat(), rank
        self._control = roll.connections[CONTROL][0]
        self._control.socket.settimeout(None)
        peers = roll.connections[WATCH]
        self._watch = Watchdog(rank, peers, self.pulse, timeout_s, self._on_loss, self._on_message)
        self._watch.start()

    def order(self) -> Message:
        """The next order, whenever it comes. Raises `RankLostError`."""
        try:
            return self._control.receive()
        except WireError as error:
            raise self._ended(error) from error

    def reply(self, message: Message) -> None:
        """Answer an order. Raises `RankLostError`."""
        try:
            self._control.send(message)
        except WireError as error:
            raise self._ended(error) from error

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 that this rank cannot go on."""
        self._watch.say(0, {"failed": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        self._watch.close()
        self._control.close()

    def _ended(self, error: WireError) -> RankLostError:
        # The same words as the watch's, which may notice first.
        return RankLostError(
            f"rank {self.rank} ends: rank 0 has ended or cannot be reached ({error})"
        )

    def _on_message(self, rank: int, message: Message) -> None:
        exit_now(f"rank {self.rank} ends: {message['end']}")

    def _on_loss(self, rank: int, why: str) -> None:
        if rank == self.rank:  # this process hangs; rank 0 sees that too
            return
        # Rank 0 is left alone: it may be cut off only, and have callers to answer.
        exit_now(f"rank {self.rank} ends: rank {rank} {why}")
