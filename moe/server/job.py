"""One HTTP request's work for the engine, as both threads see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from moe.completion import StreamEvent, places_of
from moe.engine.sequence import RunningSequence
from moe.engine.wave import Group
from moe.server.metrics import TokenClock


@dataclass(eq=False)
class Job:
    """The prompts of a request and what has come back for them.

    What waits in `queue` for a client that does not read is bounded by the tokens it asked for.

    Attributes:
        groups: one for each prompt.
        accepted: done when the engine has taken all groups, or refused one.
        queue: new tokens in order, or the exception that ended the job.
        closed: nobody waits for it any more.
    """

    clock: TokenClock
    accepted: asyncio.Future[None]
    queue: asyncio.Queue[StreamEvent | Exception] = field(default_factory=asyncio.Queue)
    groups: Sequence[Group] = ()
    closed: bool = False

    @property
    def places(self) -> dict[RunningSequence, tuple[int, int]]:
        """Index of prompt and sample of each sequence."""
        return places_of(self.groups)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.sequences[0].prompt_token_ids) for group in self.groups)

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Tokens as they come, until every sequence has ended. Raises what ended the job."""
        left = len(self.places)
        while left:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.delta.finish_reason is not None
            yield event

    def accept(self) -> None:
        """The engine has it. Called in the event loop."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: Exception) -> None:
        """End it with an error, wherever it is. Called in the event loop."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # the waiter may have gone
        self.queue.put_nowait(error)
