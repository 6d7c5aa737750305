"""Bounds the memory that requests hold beside the engine: bodies, and answers with log
probabilities.

Half of the plan's reserve is for them. A body that finds no room is refused; answers that outgrow
it cost the request that holds most.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from starlette.types import Message, Receive

from moe.completion import StreamEvent
from moe.server.errors import APIError

LEAST_BYTES = 64 * 2**20
"""The limit before a model is loaded."""
BODY_COST = 4
"""Bytes held for each byte of a body: the text, what it says as objects, token ids."""
EVENT_BYTES = 400
ENTRY_BYTES = 600
"""Memory of one token's log probability in an answer: the token, its text, the JSON."""


class RequestMemory:
    """Counts what requests hold. Used in the event loop only.

    Attributes:
        limit: most bytes of all together.
        held: bytes now.
    """

    def __init__(self, limit: int = LEAST_BYTES) -> None:
        self.limit = limit
        self.held = 0
        self._by_owner: dict[Hashable, int] = {}

    def allow(self, limit: int) -> None:
        """Change the limit."""
        self.limit = limit

    def take(self, owner: Hashable, num_bytes: int) -> None:
        """Count bytes, beyond the limit too."""
        self._by_owner[owner] = self._by_owner.get(owner, 0) + num_bytes
        self.held += num_bytes

    def take_within(self, owner: Hashable, num_bytes: int) -> None:
        """Count bytes, and raise `APIError` 503 if there is no room for them."""
        self.take(owner, num_bytes)
        if self.is_exceeded:
            raise APIError(
                503,
                f"requests hold all of the {self.limit >> 20} MiB that are for their bodies and "
                "answers (half of memory.reserve_gib); try again",
                code="out_of_memory",
                retry_after_s=1,
            )

    def give_back(self, owner: Hashable, num_bytes: int | None = None) -> None:
        """The owner holds so many bytes less; None: nothing any more."""
        had = self._by_owner.pop(owner, 0)
        left = 0 if num_bytes is None else max(0, had - num_bytes)
        if left:
            self._by_owner[owner] = left
        self.held -= had - left

    @property
    def is_exceeded(self) -> bool:
        return self.held > self.limit

    def largest(self, owners: Callable[[Hashable], bool]) -> Hashable | None:
        """The one of these owners that holds most; None if none of them holds anything."""
        return max(filter(owners, self._by_owner), key=self._by_owner.__getitem__, default=None)

    def counted(self, owner: Hashable, receive: Receive) -> Receive:
        """The same body, whose bytes are counted as they come.

        Raises `APIError` 503 when there is no room for more; the owner has to `give_back`.
        """

        async def counting() -> Message:
            message = await receive()
            if size := len(message.get("body", b"")):
                self.take_within(owner, size * BODY_COST)
            return message

        return counting


def bytes_of(event: StreamEvent) -> int:
    """About how much an event takes until its answer has been sent."""
    scored = [event.delta.token, *filter(None, event.delta.prompt_logprobs or ())]
    entries = sum(1 + len(token.top or ()) for token in scored if token.logprob is not None)
    return EVENT_BYTES + ENTRY_BYTES * entries
