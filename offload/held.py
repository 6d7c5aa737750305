"""Experts held for one call of a layer, handed out in waves.

A wave is a run of experts, in ascending order over all waves, so that a kernel that adds to what it
has so far sums as one call would. What is there is computed while the rest is still coming; where
the experts outnumber the slots, those a wave is done with make room for those to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.fetches import Filling
from offload.transfer import Transfer
from routing.routing import UNUSED

RING = 8
"""Transfers that one call may have in hand at the cost of units worth more than what they bring."""


class Wave(NamedTuple):
    """Experts that may be computed with now.

    Attributes:
        experts: their ids, ascending.
        slot_ids: ``(E + 1,)`` int64 on the CPU: slot of each of them, -1 for those of other waves
            and at the end, so that ``slot_ids[routing.expert_ids]`` is the wave's routing.
    """

    experts: Sequence[int]
    slot_ids: Tensor


class Held:
    """Pins the units of one call; a context manager that unpins them at the end.

    Args:
        experts, units: ascending, the same twice: ids in the layer, and units.
        missing: units that are absent.
        light: units of which a prefix is fetched where they are.
    """

    __slots__ = (
        "_experts",
        "_fetched",
        "_filling",
        "_layer",
        "_light",
        "_now",
        "_queue",
        "_units",
    )

    def __init__(
        self,
        filling: Filling,
        layer: int,
        experts: Sequence[int],
        units: list[int],
        missing: list[int],
        light: Collection[int] = (),
    ) -> None:
        self._filling, self._layer, self._light = filling, layer, light
        self._experts, self._units = experts, units
        filling.pins[self] = units
        self._fetched: set[int] = set()  # by this call, and not computed with yet
        self._queue = deque(missing)
        self._now = not filling.victims.late or len(missing) > RING
        if missing:
            try:
                self._feed()
            except OffloadError:
                self.release()
                raise
            if not self._now:
                filling.victims.prepare()

    @property
    def waves(self) -> Iterator[Wave]:
        """To be walked once; the experts of a wave may be gone when the next one is asked for.

        Raises:
            OffloadError: an expert cannot be had; everything is unpinned.
        """
        filling, units = self._filling, self._units
        if all(map(filling.table.there.__getitem__, units)):
            self._count_prefixes(units)
            yield Wave(self._experts, filling.table.slot_ids(self._layer))
            return
        start = 0
        try:
            while start < len(units):
                end = self._next(start)
                self._count_prefixes(units[start:end])
                yield self._wave(start, end)
                self._fetched.difference_update(units[start:end])
                start = end
                if self._queue:
                    filling.pins[self] = units[start:]
                    self._feed()
        except OffloadError:
            self.release()
            raise

    def coming(self) -> list[tuple[int, int, Transfer | None]] | None:
        """All experts, each with its slot and what brings it, if it is not there; None where one
        has no slot yet, or may be a prefix."""
        filling, found = self._filling, list[tuple[int, int, Transfer | None]]()
        if self._queue or self._light:
            return None
        table = filling.table
        for expert, unit in zip(self._experts, self._units, strict=True):
            there, slot = table.there[unit], table.slot[unit]
            if not there and not filling.is_flying(unit):
                return None
            found.append((expert, slot, None if there else filling.coming(unit)))
        return found

    def arrive(self, number: int) -> None:
        """Wait for one of the experts.

        Raises:
            OffloadError: it cannot be had.
        """
        self._filling.arrive(self._units[number])

    def arrived(self, waited: float) -> None:
        """All are there, after so many seconds."""
        if self._fetched:
            self._filling.poll()
            self._filling.statistics.layers[self._layer].stall_seconds += waited

    def release(self) -> None:
        """Unpin. What is still on its way will be there for others."""
        self._filling.pins.pop(self, None)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _feed(self, most: int | None = None) -> None:
        """Begin to fetch what is missing, in order, as far as there is room for it.

        Args:
            most: units to begin with; all by default.
        """
        filling, queue = self._filling, self._queue
        table, sizes = filling.table, filling.table.sizes
        if self._now:
            values = filling.policy.values()
            filling.victims.expect(len(queue))
        most = len(queue) if most is None else most
        for _ in range(most):
            unit, cause = queue[0], "demand"
            if table.there[unit]:  # it was on its way, and has come
                queue.popleft()
                continue
            if table.slot[unit] < 0:
                light = unit in self._light
                taken = filling.room_for((sizes.prefixes if light else sizes.grains)[unit])
                if taken is None:
                    return
                if self._now and values[unit] <= taken[0]:
                    if len(self._fetched) >= RING:
                        return
                    cause = "streamed"
                filling.give(unit, taken)
            queue.popleft()
            self._fetched.add(unit)
            if not filling.is_flying(unit):
                filling.begin(unit, cause)

    def _next(self, start: int) -> int:
        """Wait for the first expert of a wave; where the wave ends."""
        filling, units = self._filling, self._units
        table = filling.table
        filling.poll()
        if table.slot[units[start]] < 0:
            self._make_room(units[start])
            filling.pins[self] = units[start:]
        if not table.there[units[start]]:
            filling.arrive(units[start])
            filling.poll()  # what came with it: copies to a GPU end many at a time
        # While more is to be fetched, half of what has been is left for the next wave: its
        # transfers, and those into the slots of this one, run under this one's computation.
        most = max(1, len(self._fetched) // 2) if self._queue else len(units)
        end, fetched = start, 0
        while end < len(units) and table.there[units[end]]:
            fetched += units[end] in self._fetched
            if fetched > most:
                break
            end += 1
        return end

    def _make_room(self, unit: int) -> None:
        """A slot for a unit that must come now, whatever it costs others."""
        filling = self._filling
        if unit not in self._queue:  # it was there, or on its way, and has been lost since
            self._queue.appendleft(unit)
        self._feed()
        if filling.table.slot[unit] < 0:
            filling.pins[self] = [unit]  # later ones of this call may have to come again
            filling.settle_unpinned()
            self._feed(1)
        if filling.table.slot[unit] < 0:
            layer, expert = divmod(unit, filling.table.width)
            slots = filling.table.sizes.experts_in(len(filling.table.owner))
            raise OffloadError(
                f"no slot for expert {expert} of layer {layer}: all {slots} are "
                "held by other calls or by reads that do not end; give the device more memory"
            )

    def _count_prefixes(self, units: Sequence[int]) -> None:
        if self._light:
            table, counters = self._filling.table, self._filling.statistics.layers[self._layer]
            counters.prefixes += sum(not table.is_whole(unit) for unit in units)

    def _wave(self, start: int, end: int) -> Wave:
        table, experts = self._filling.table, self._experts[start:end]
        ids = np.empty(table.experts[self._layer] + 1, np.int64)
        ids.fill(UNUSED)
        ids[experts] = [table.slot[unit] for unit in self._units[start:end]]
        return Wave(experts, torch.from_numpy(ids))
