"""Roles: parts that a server takes beside others, such as reading prompts for them.

The core has no role. Methods bring them by the hook `SERVER_ROLES`, one for each that the profile
switches on. `Service` makes the roles, attaches them to its queue, and closes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import APIRouter

from moe.engine.prefill_batch import SequenceGroup
from moe.hooks import Hook
from moe.model import MoE
from moe.server.engine_queue import EngineQueue
from moe.settings import Profile


class ServerRole(Protocol):
    """One role of a server.

    Attributes:
        router: routes that the role adds; None: it adds none.
    """

    router: APIRouter | None

    def attach(self, queue: EngineQueue) -> None:
        """Take the queue of requests, before the first one. Called in the event loop."""

    def check(self, model: MoE) -> None:
        """Look at the model that was loaded. Raises `MoEError` if the role cannot serve it."""

    async def before(self, groups: Sequence[SequenceGroup]) -> None:
        """Prepare a request that the engine takes next."""

    def close(self) -> None:
        """End what the role has begun."""


SERVER_ROLES = Hook[Callable[[Profile], ServerRole]]("server_role")
