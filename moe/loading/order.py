"""In which order a checkpoint is read: as it lies on disk, but some modules in one piece.

A module that is quantized or written away as soon as it is complete must not wait half-read for
files that come later: then all of them would be in memory at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moe.loading.checkpoint import Checkpoint
from moe.loading.transfer import Transfer


def modules_of(transfer: Transfer, modules: Collection[str]) -> list[str]:
    """Those of `modules` that own its targets, once for each target."""
    owners = [name.rpartition(".")[0] for name in transfer.targets]
    return [name for name in owners if name in modules]


def in_order(
    transfers: Sequence[Transfer], checkpoint: Checkpoint, modules: Collection[str]
) -> list[Transfer]:
    """By place in the files, but what belongs to one of `modules` together with its first."""
    places = {id(transfer): _position(transfer, checkpoint) for transfer in transfers}
    ordered = sorted(transfers, key=lambda t: places[id(t)])
    first: dict[str, tuple[str, int]] = {}
    for transfer in ordered:
        for name in modules_of(transfer, modules):
            first.setdefault(name, places[id(transfer)])

    def key(transfer: Transfer) -> tuple[str, int]:
        owners = modules_of(transfer, modules)
        return min(first[name] for name in owners) if owners else places[id(transfer)]

    return sorted(ordered, key=key)


def _position(transfer: Transfer, checkpoint: Checkpoint) -> tuple[str, int]:
    first = checkpoint.tensors[transfer.names[0]]
    return str(first.file), first.start
