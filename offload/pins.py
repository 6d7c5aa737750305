"""Experts that one tier lends to the next: kept in their slots while they are copied from there."""

from __future__ import annotations

import math

from offload.fetches import Filling
from offload.held import RING
from offload.transfer import Transfer


class Loan:
    """One unit, pinned until it is given back.

    Attributes:
        slot: where its bytes are, or will be.
    """

    def __init__(self, filling: Filling, unit: int, transfer: Transfer | None) -> None:
        self.slot = filling.table.slot[unit]
        self._filling, self._unit, self._transfer = filling, unit, transfer
        filling.pins[self] = [unit]

    @property
    def ready(self) -> bool:
        """Whether its bytes are there, or will never be."""
        return self._transfer is None or self._transfer.done

    @property
    def failed(self) -> Exception | None:
        """Why they will never be there."""
        return None if self._transfer is None else self._transfer.failed

    def wait(self) -> None:
        """Until its bytes are there.

        Raises:
            OffloadError: they cannot be had, or did not come in time.
        """
        if self._transfer is not None:
            self._filling.counters(self._unit).stall_seconds += self._transfer.wait()

    def hasten(self) -> None:
        """Somebody waits for it."""
        if self._transfer is not None:
            self._transfer.hasten()

    def give_back(self, *, unused: bool = False) -> None:
        """Unpin it.

        Args:
            unused: nobody wants it any more: its read is taken back if it has not begun.
        """
        self._filling.pins.pop(self, None)
        if unused:
            self._filling.cancel(self._unit)


def lend(filling: Filling, unit: int, *, urgent: bool) -> Loan | None:
    """Pin a unit, and begin to fetch it where it is absent.

    Returns:
        None where it has to wait for a slot.

    Raises:
        OffloadError: it cannot even begin.
    """
    filling.poll()
    table, counters = filling.table, filling.counters(unit)
    if table.there[unit]:
        counters.hits += 1
        return Loan(filling, unit, None)
    if not filling.is_flying(unit):
        if table.slot[unit] < 0 and not _make_room(filling, unit):
            return None
        filling.begin(unit, "demand" if urgent else "prefetch")
        filling.claim(unit)
    counters.misses += 1
    loan = Loan(filling, unit, filling.coming(unit))
    if urgent:
        loan.hasten()
    return loan


def _make_room(filling: Filling, unit: int) -> bool:
    """A slot for a unit; whether there is one."""
    lent = len(filling.pins)
    if lent == 0:
        filling.victims.forget()
    # What streams past takes the slots of what streamed past before it, and few others.
    worth = filling.policy.values()[unit] if lent >= RING else math.inf
    return filling.make_room(unit, filling.table.sizes.grains[unit], worth)
