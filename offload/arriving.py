"""A call's experts run as they come, in one compiled call: what `Held.waves` are for, where nobody
has to act between them."""

from __future__ import annotations

from kernels.cpu import choose_kernel
from kernels.cpu.arriving import Rows
from kernels.cpu.layer import LayerCall
from kernels.cpu.reading import NativeReads, ReadJob
from kernels.reference import AnyExperts
from offload.held import Held
from offload.readers.native import LOOK_S, NativeJob


def run_arriving(held: Held, how: LayerCall, slots: AnyExperts, rows: Rows) -> bool:
    """Fill the rows' ``out`` with the bits of `experts_forward` on all of the call's experts;
    False where they can not be run so, and nothing has been done.

    Args:
        how: what runs ``slots``, on rows like these.

    Raises:
        OffloadError: an expert cannot be read.
    """
    native, coming = choose_kernel()[0], held.coming()
    if native is None or coming is None:
        return False
    told: list[tuple[int, int, ReadJob | None]] = []
    reads: NativeReads | None = None
    for expert, slot, transfer in coming:
        if transfer is None:
            told.append((expert, slot, None))
        elif isinstance(transfer, NativeJob):
            told.append((expert, slot, transfer.record))
            reads = transfer.reads
        else:
            return False
    call = native.arriving(how, slots, rows, told, reads, LOOK_S)
    while (late := call.run()) is not None:
        held.arrive(late)
    held.arrived(call.waited)
    return True
