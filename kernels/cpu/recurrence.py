"""Recurrent layers by the compiled library; the operations are those of kernels/recurrence.py.

The arithmetic is in kernels/cpu/recurrence.h, in float32, with the same bits on any number of
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.interface import (
    NUMBER,
    POINTER,
    Record,
    declare,
    floats,
    numbers,
    pointers,
    sizes,
)
from kernels.recurrence import ConvolutionCall, GatedCall, Recurrence, ScanCall, register


class GatedRecord(Record, struct="recurrence::Gated"):
    _fields_ = (
        *sizes("keys", "values"),
        *floats("scale"),
        *numbers("corrected", "by_key", "normalised"),
    )


class ScanRecord(Record, struct="recurrence::Scan"):
    _fields_ = (
        *sizes("channels", "states"),
        *numbers("by_channel", "softplus"),
        *floats("least", "most"),
    )


class ConvolutionRecord(Record, struct="recurrence::Convolution"):
    _fields_ = (
        *pointers("weight", "bias"),
        *sizes("channels", "taps", "kept"),
        *numbers("silu"),
    )


class FloatsRecord(Record, struct="recurrence::Floats"):
    _fields_ = (*pointers("data"), *sizes("sequence", "token", "head"))


class GatedCallRecord(Record, struct="recurrence::GatedCall"):
    _fields_ = (
        ("rule", GatedRecord),
        *((name, FloatsRecord) for name in ("q", "k", "v", "decay", "beta")),
        *pointers("before", "after", "out"),
        *sizes("sequences", "tokens", "heads", "group"),
    )


class ScanCallRecord(Record, struct="recurrence::ScanCall"):
    _fields_ = (
        ("rule", ScanRecord),
        *((name, FloatsRecord) for name in ("x", "dt", "b", "c", "z")),
        *pointers("a", "d", "bias", "before", "after", "out"),
        *sizes("sequences", "tokens", "heads", "group"),
    )


class ConvolutionCallRecord(Record, struct="recurrence::ConvolutionCall"):
    _fields_ = (
        ("rule", ConvolutionRecord),
        ("x", FloatsRecord),
        *pointers("before", "after", "out"),
        *sizes("sequences", "tokens"),
    )


RecurrenceRecord = GatedCallRecord | ScanCallRecord | ConvolutionCallRecord


class NativeCall(NamedTuple):
    """A call as the library takes it, without the addresses of its states and outputs.

    Attributes:
        record: sizes and strides; the address of each input unless it is on the meta device.
        inputs: the memory behind those addresses.
    """

    record: RecurrenceRecord
    inputs: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, call: Recurrence) -> NativeCall:
        rows, kept = (tuple(map(_float, tensors)) for tensors in (call.rows, call.kept))
        places, constants = map(_floats, rows), [_address(tensor) for tensor in kept]
        batch, tokens = call.out[:2]
        sizes = batch, tokens, call.state[1]
        record: RecurrenceRecord
        match call:
            case GatedCall():
                rule = GatedRecord(
                    *call.state[2:], call.scale, call.corrected, call.by_key, call.normalised
                )
                record = GatedCallRecord(rule, *places, None, None, None, *sizes, call.group)
            case ScanCall():
                scan = ScanRecord(
                    *call.state[2:], call.by_channel, call.softplus, call.least, call.most
                )
                record = ScanCallRecord(
                    scan, *places, *constants, None, None, None, *sizes, call.group
                )
            case ConvolutionCall():
                _, channels, states = call.state
                assert call.kept[0] is not None
                taps = call.kept[0].shape[1]
                convolution = ConvolutionRecord(*constants, channels, taps, states, call.silu)
                record = ConvolutionCallRecord(
                    convolution, *places, None, None, None, batch, tokens
                )
            case _:
                raise TypeError(f"no record for a {type(call).__name__}")
        return cls(record, (*rows, *kept))


def use_library(library: ctypes.CDLL) -> None:
    """Compute recurrent layers of CPU tensors with this library from now on."""
    names = "moe_gated", "moe_scan", "moe_convolve"
    declare(library, dict.fromkeys(names, (None, (POINTER, NUMBER))))
    records = GatedCallRecord, ScanCallRecord, ConvolutionCallRecord
    compiled: dict[type[Record], Callable[[int, int], None]] = {
        record: getattr(library, name) for record, name in zip(records, names, strict=True)
    }

    def run(call: Recurrence, before: Tensor | None, after: Tensor, out: Tensor) -> None:
        native = NativeCall.of(call)
        record = native.record
        record.before, record.after = _address(before), after.data_ptr()
        record.out = out.data_ptr()
        compiled[type(record)](ctypes.addressof(record), torch.get_num_threads())

    register("cpu", run)


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _floats(rows: Tensor | None) -> FloatsRecord:
    if rows is None:
        return FloatsRecord()
    return FloatsRecord(rows.data_ptr(), *rows.stride()[:3])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
