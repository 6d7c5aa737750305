"""Copies to a device as the cache sees them: transfers, of which many end with one mark."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from offload.loans import Loan
from offload.streams import Mark


class Launcher(Protocol):
    """The source of copies, as far as they need it."""

    def launch(self) -> None: ...
    def bring(self, copy: Copy) -> None: ...
    def follow(self, copy: Copy) -> None: ...
    def withdraw(self, copy: Copy) -> bool: ...


@dataclass(eq=False)
class Batch:
    """Copies that were launched together."""

    mark: Mark
    copies: list[Copy]
    followed: bool = False

    @property
    def done(self) -> bool:
        """Whether kernels launched from now on find the bytes."""
        return self.followed or self.mark.reached()


class Copy:
    """An expert on its way to the device; see `offload.transfer.Transfer`. Waiting for it holds up
    the compute stream, and the host only while its bytes are read from disk."""

    def __init__(
        self,
        source: Launcher,
        layer: int,
        expert: int,
        slot: int,
        urgent: bool,
        number: int,
        after: Mark,
    ) -> None:
        self.layer, self.expert, self.slot = layer, expert, slot
        self.urgent, self.number, self.after = urgent, number, after
        self.loan: Loan | None = None
        self.batch: Batch | None = None
        self.failed: Exception | None = None
        self._source = source

    @property
    def done(self) -> bool:
        if self.batch is None and self.failed is None and (self.loan is None or self.loan.ready):
            self._source.launch()
        return self.failed is not None or (self.batch is not None and self.batch.done)

    def wait(self) -> float:
        start = time.perf_counter()
        self._source.bring(self)
        self._source.follow(self)
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._source.withdraw(self)

    def hasten(self) -> None:
        self.urgent = True
        if self.loan is not None:
            self.loan.hasten()

    def end(self, *, unused: bool = False) -> None:
        """Its bytes have come, or will never come."""
        if self.loan is not None:
            self.loan.give_back(unused=unused)
            self.loan = None
