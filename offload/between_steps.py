"""What is done with a cache between steps: more or less memory, and its hot set brought back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Protocol

import numpy as np

from offload.errors import BudgetError, OffloadError
from offload.filling import Filling
from offload.slots import Sizes

LEAST_SLOTS = 2
"""One to compute with while the other is filled."""


class Room(Protocol):
    """The memory behind the slots, in grains; see `offload.arena.Arena`."""

    @property
    def capacity(self) -> int: ...

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...


def affordable(sizes: Sizes, room: Room, slots: int) -> int:
    """The grains of so many slots, as far as there are any.

    Raises:
        BudgetError: fewer than `LEAST_SLOTS`.
    """
    grains = min(sizes.grains_for(slots), room.capacity)
    largest, each = max(sizes.kinds), max(sizes.nbytes)
    if grains < LEAST_SLOTS * largest:
        raise BudgetError(
            f"an expert cache needs room for {LEAST_SLOTS} experts, "
            f"{LEAST_SLOTS * each} bytes at {each} bytes each; "
            f"there is room for {max(0, grains // largest)}: give the device more memory "
            "(memory.device_gib) or serve fewer bits"
        )
    return grains


def resize(filling: Filling, room: Room, grains: int) -> None:
    """Give back memory or take more; the most valuable units stay.

    Raises:
        OffloadError: a read does not end; nothing has changed.
    """
    table = filling.table
    assert not filling.pins, "a cache is resized between steps"
    filling.settle_unpinned()
    if filling.busy:
        raise OffloadError("the cache cannot be resized while a read does not end")
    values, cut = filling.policy.values(), table.owner[grains - 1 : grains].tolist()
    leaving = sorted(table.behind(grains), key=lambda unit: -values[unit])
    old = [(unit, table.slot[unit], table.grains[unit]) for unit in leaving]
    for unit in leaving:
        table.drop(unit)
    table.resize(grains)
    filling.victims.expect(len(leaving))
    for unit, slot, kind in old:
        # Who lies across the border would be in the way of those who come from behind it.
        if unit not in cut and filling.make_room(unit, kind, values[unit]):
            room.move(slot, table.slot[unit])
            table.publish(unit)
        else:
            filling.lost(unit)
    room.resize(grains)


def hot_set(filling: Filling) -> list[tuple[int, int]]:
    """(layer, expert) of what is there, most valuable first."""
    filling.poll()
    units = np.flatnonzero(filling.table.present)
    order = np.argsort(-filling.policy.values()[units], kind="stable")
    return [divmod(int(unit), filling.table.width) for unit in units[order]]


def drop(filling: Filling, experts: Iterable[tuple[int, int]]) -> None:
    """Free the slots of these, which nobody will ask for here."""
    filling.settle_unpinned()
    table, pinned = filling.table, set(chain(*filling.pins.values()))
    for unit in (layer * table.width + expert for layer, expert in experts):
        if table.present[unit] and unit not in pinned:
            filling.lost(unit)
            table.drop(unit)


def warm(filling: Filling, experts: Iterable[tuple[int, int]]) -> int:
    """Fill free slots with these, and wait for them; what fails is left out.

    Returns:
        How many are there now.
    """
    table = filling.table
    for layer, expert in experts:
        unit = layer * table.width + expert
        free = table.slot[unit] < 0
        if free and (slot := table.take_free(table.sizes.grains[unit])) is not None:
            table.place(unit, slot)
            with suppress(OffloadError):
                filling.begin(unit, "restored")
    filling.finish()
    return int(table.present.sum())
