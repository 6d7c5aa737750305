"""Any rank but the first: it takes orders, and ends with rank 0."""

from __future__ import annotations

from moe.errors import RankLostError
from moe.parallel.ending import end_now
from moe.parallel.roll import CONTROL, WATCH, Roll
from moe.parallel.watch import Pulse, Watch
from moe.parallel.wire import Message, WireError


class Follower:
    """Any other rank.

    Args:
        roll: who there is.
        rank: of this process.
        timeout_s: after which rank 0 is lost.

    Attributes:
        pulse: of this process.
    """

    def __init__(self, roll: Roll, rank: int, timeout_s: float) -> None:
        self.pulse, self.rank = Pulse(), rank
        self._control = roll.connections[CONTROL][0]
        self._control.socket.settimeout(None)
        peers = roll.connections[WATCH]
        self._watch = Watch(rank, peers, self.pulse, timeout_s, self._on_loss, self._on_message)
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
        end_now(f"rank {self.rank} ends: {message['end']}")

    def _on_loss(self, rank: int, why: str) -> None:
        if rank == self.rank:  # this process hangs; rank 0 sees that too
            return
        # Rank 0 is left alone: it may be cut off only, and have callers to answer.
        end_now(f"rank {self.rank} ends: rank {rank} {why}")
