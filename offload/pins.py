"""Experts that stay in their slots while they are needed: by a call of a layer, or by a GPU.

`PinnedExperts` pins the experts of one call, fetches the missing ones, and hands all of them out
in rounds: runs of ascending experts, so that a kernel that adds each round to its sum gives the
bits of one call. A round is computed while the next ones are read. If the experts outnumber the
slots, those of finished rounds make room for those to come. `TierPin` pins one expert while it is
copied to the next tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.slot_manager import SlotManager
from offload.transfer import Transfer
from routing.routing import UNUSED

RING = 8
"""Slots that a call, or a GPU, may fill with experts worth less than those that it evicts: a batch
that touches everything streams through these slots and leaves the hot set alone."""


class ExpertRound(NamedTuple):
    """Experts that may be computed with now.

    Attributes:
        experts: their ids, ascending.
        slot_ids: ``(E + 1,)`` int64 on the CPU: slot of each of them, -1 for those of other rounds
            and at the end, so that ``slot_ids[routing.expert_ids]`` is the round's routing.
    """

    experts: Sequence[int]
    slot_ids: Tensor


class PinnedExperts:
    """Pins the experts of one call; a context manager that unpins them.

    Args:
        experts, units: ascending, the same twice: ids in the layer, and units.
        missing: units that are absent; those that have a slot to be had are fetched at once.
        prefixes: units of which a prefix is fetched if they are missing.

    Raises:
        OffloadError: a read cannot even begin; nothing is pinned.
    """

    def __init__(
        self,
        manager: SlotManager,
        layer: int,
        experts: Sequence[int],
        units: list[int],
        missing: list[int],
        prefixes: Collection[int] = (),
    ) -> None:
        self._manager, self._layer, self._prefixes = manager, layer, prefixes
        self._experts, self._units = experts, units
        manager.pins[self] = units
        self._fetched: set[int] = set()  # by this call, and not computed with yet
        self._missing = deque(missing)  # not fetched yet
        self._ranks_first = not manager.ranking.deferred or len(missing) > RING
        if missing:
            try:
                self._fetch_missing()
            except OffloadError:
                self.release()
                raise
            if not self._ranks_first:
                manager.ranking.prepare()

    @property
    def rounds(self) -> Iterator[ExpertRound]:
        """Wait for the experts, round by round. To be walked once; the experts of a round may be
        evicted when the next one is asked for.

        Raises:
            OffloadError: an expert cannot be read; everything is unpinned.
        """
        manager, units = self._manager, self._units
        if all(map(manager.table.there.__getitem__, units)):
            self._count_prefixes(units)
            yield ExpertRound(self._experts, manager.table.slot_ids(self._layer))
            return
        start = 0
        try:
            while start < len(units):
                end = self._wait_for_round(start)
                self._count_prefixes(units[start:end])
                yield self._round(start, end)
                self._fetched.difference_update(units[start:end])
                start = end
                if self._missing:
                    manager.pins[self] = units[start:]
                    self._fetch_missing()
        except OffloadError:
            self.release()
            raise

    def arrivals(self) -> list[tuple[int, int, Transfer | None]] | None:
        """Each expert with its slot, and the transfer that brings it (None: it is there); None if
        an expert has no slot yet, or may be a prefix."""
        table, in_flight = self._manager.table, self._manager.in_flight
        if self._missing or self._prefixes:
            return None
        found: list[tuple[int, int, Transfer | None]] = []
        for expert, unit in zip(self._experts, self._units, strict=True):
            transfer = None
            if not table.there[unit]:
                if unit not in in_flight:
                    return None
                transfer = in_flight[unit].transfer
            found.append((expert, table.slot[unit], transfer))
        return found

    def wait_for(self, number: int) -> None:
        """Wait for the expert at this place in `arrivals`.

        Raises:
            OffloadError: it cannot be read.
        """
        self._manager.wait_for(self._units[number])

    def all_arrived(self, waited: float) -> None:
        """Take note that all experts of `arrivals` are there, after a wait of this many seconds."""
        if self._fetched:
            self._manager.poll()
            self._manager.statistics.layers[self._layer].stall_seconds += waited

    def release(self) -> None:
        """Unpin. Reads in flight go on, for later calls."""
        self._manager.pins.pop(self, None)

    def __len__(self) -> int:
        return len(self._units)

    def __enter__(self) -> PinnedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _fetch_missing(self, most: int | None = None) -> None:
        """Fetch missing units in order, as long as there are slots for them.

        Args:
            most: units to fetch; None: all.
        """
        manager, missing = self._manager, self._missing
        table, sizes = manager.table, manager.table.sizes
        if self._ranks_first:
            values = manager.policy.values()
            manager.ranking.restart(len(missing))
        for _ in range(len(missing) if most is None else most):
            unit, cause = missing[0], "demand"
            if table.there[unit]:  # it was in flight, and has come
                missing.popleft()
                continue
            if table.slot[unit] < 0:
                grains = sizes.prefixes if unit in self._prefixes else sizes.grains
                candidate = manager.find_slot(grains[unit])
                if candidate is None:
                    return
                if self._ranks_first and values[unit] <= candidate[0]:
                    if len(self._fetched) >= RING:
                        return
                    cause = "streamed"
                manager.assign(unit, candidate)
            missing.popleft()
            self._fetched.add(unit)
            if unit not in manager.in_flight:
                manager.fetch(unit, cause)

    def _wait_for_round(self, start: int) -> int:
        """Wait for the first expert of a round; return where the round ends."""
        manager, units = self._manager, self._units
        table = manager.table
        manager.poll()
        if table.slot[units[start]] < 0:
            self._force_slot(units[start])
            manager.pins[self] = units[start:]
        if not table.there[units[start]]:
            manager.wait_for(units[start])
            manager.poll()  # what came with it: copies to a GPU end many at a time
        # While units are missing, leave half of the fetched ones for the next round: their reads,
        # and those into the slots of this round, run while this round is computed.
        most = max(1, len(self._fetched) // 2) if self._missing else len(units)
        end, fetched = start, 0
        while end < len(units) and table.there[units[end]]:
            fetched += units[end] in self._fetched
            if fetched > most:
                break
            end += 1
        return end

    def _force_slot(self, unit: int) -> None:
        """A slot for the unit that must come now; later units of this call may lose theirs."""
        manager = self._manager
        if unit not in self._missing:  # it was there, or in flight, and has been lost since
            self._missing.appendleft(unit)
        self._fetch_missing()
        if manager.table.slot[unit] < 0:
            manager.pins[self] = [unit]
            manager.settle_unpinned()
            self._fetch_missing(1)
        if manager.table.slot[unit] < 0:
            layer, expert = divmod(unit, manager.table.width)
            slots = manager.table.sizes.experts_in(len(manager.table.owner))
            raise OffloadError(
                f"no slot for expert {expert} of layer {layer}: all {slots} are "
                "held by other calls or by reads that do not end; give the device more memory"
            )

    def _count_prefixes(self, units: Sequence[int]) -> None:
        if self._prefixes:
            table, counters = self._manager.table, self._manager.statistics.layers[self._layer]
            counters.prefixes += sum(not table.is_whole(unit) for unit in units)

    def _round(self, start: int, end: int) -> ExpertRound:
        table, experts = self._manager.table, self._experts[start:end]
        ids = np.empty(table.experts[self._layer] + 1, np.int64)
        ids.fill(UNUSED)
        ids[experts] = [table.slot[unit] for unit in self._units[start:end]]
        return ExpertRound(experts, torch.from_numpy(ids))


class TierPin:
    """One expert, pinned until `release` while the next tier copies it; see
    `ExpertCache.pin`.

    Attributes:
        slot: where its bytes are, or will be.
    """

    def __init__(self, manager: SlotManager, unit: int) -> None:
        fetch = manager.in_flight.get(unit)
        self.slot = manager.table.slot[unit]
        self._manager, self._unit = manager, unit
        self._transfer = None if fetch is None else fetch.transfer
        manager.pins[self] = [unit]

    @property
    def ready(self) -> bool:
        """Return whether the expert is there, or its read has failed."""
        return self._transfer is None or self._transfer.done

    @property
    def failed(self) -> Exception | None:
        """Why the read has failed, if it has."""
        return None if self._transfer is None else self._transfer.failed

    def wait(self) -> None:
        """Wait until the expert is there.

        Raises:
            OffloadError: it cannot be read, or did not come in time.
        """
        if self._transfer is not None:
            self._manager.counters(self._unit).stall_seconds += self._transfer.wait()

    def hasten(self) -> None:
        """Make its read urgent."""
        if self._transfer is not None:
            self._transfer.hasten()

    def release(self, *, unused: bool = False) -> None:
        """Unpin it.

        Args:
            unused: it is not needed any more: cancel its read if it has not begun.
        """
        self._manager.pins.pop(self, None)
        if unused:
            self._manager.cancel(self._unit)
