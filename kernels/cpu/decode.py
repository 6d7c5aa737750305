"""The compiled decode step's records and calls; `kernels/cpu/decode.h` says what is computed.

A record holds addresses: whoever fills it keeps the tensors alive. Legend as in decode.h.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import Any

from kernels.cpu.activation import Activation
from kernels.cpu.interface import NUMBER, POINTER, PlaneMatrixRecord, check_done, declare
from kernels.cpu.records import Record

ABSENT, BIT_PLANES = -1, 8
SCORES = ("softmax", "sigmoid", "mixer")

_Fields = tuple[tuple[str, Any], ...]


def _pointers(*names: str) -> _Fields:
    return tuple((name, ctypes.c_void_p) for name in names)


def _sizes(*names: str) -> _Fields:
    return tuple((name, ctypes.c_int64) for name in names)


def _numbers(*names: str) -> _Fields:
    return tuple((name, ctypes.c_int32) for name in names)


def _floats(*names: str) -> _Fields:
    return tuple((name, ctypes.c_float) for name in names)


class NormRecord(Record, struct="decode::Norm"):
    """Absent where the weight is null."""

    _fields_ = (*_pointers("weight", "bias"), *_floats("eps"), *_numbers("centered"))


class MatrixRecord(Record, struct="decode::Matrix"):
    """``format``: `ABSENT`, `BIT_PLANES` or the number of a dense dtype (`calls.DTYPES`)."""

    _fields_ = (("planes", PlaneMatrixRecord), *_pointers("weight", "bias"), *_numbers("format"))


class RotationRecord(Record, struct="decode::Rotation"):
    _fields_ = (
        *_pointers("cos", "sin"),
        *_sizes("begin", "size"),
        *_numbers("pairs_in", "pairs_out"),
    )


class HeadsRecord(Record, struct="decode::Heads"):
    """How rows of queries or keys come to their positions (kernels/cpu/norms.h)."""

    _fields_ = (
        ("norm", NormRecord),
        ("rotation", RotationRecord),
        *_sizes("count", "size"),
        *_numbers("per_head", "after_rotation"),
    )


class RuleRecord(Record, struct="decode::Rule"):
    _fields_ = (
        *_pointers("correction"),
        *_sizes("experts", "top_k", "groups", "groups_kept"),
        *_numbers("score", "best_two", "renormalise"),
        *_floats("scale", "threshold"),
    )


class AttentionRecord(Record, struct="decode::Attention"):
    _fields_ = (
        *((name, MatrixRecord) for name in ("q_a", "q", "k", "v", "o")),
        *((name, NormRecord) for name in ("q_norm", "k_norm")),
        ("rotation", RotationRecord),
        *_pointers("expansion", "sinks"),
        *_sizes("cache", "heads", "kv_heads", "head_dim", "value_dim", "plain_dim", "latent"),
        *_sizes("window"),
        *_numbers("q_norm_per_head", "k_norm_per_head", "norm_after_rotation"),
        *_floats("scale", "softcap"),
    )


class DecoderLayerRecord(Record, struct="decode::Layer"):
    _fields_ = (
        *(
            (name, NormRecord)
            for name in ("attention_norm", "attention_post", "feed_norm", "feed_post")
        ),
        ("attention", AttentionRecord),
        *((name, MatrixRecord) for name in ("router", "shared_gate", "gate", "up", "down")),
        ("activation", Activation),
        ("rule", RuleRecord),
        *_floats("attention_scale", "feed_scale", "routed_scale"),
    )


class StepRecord(Record, struct="decode::Step"):
    _fields_ = (
        *_sizes("rows", "hidden", "layers"),
        *_pointers("x", "h", "beside", "position", "capacity", "cache"),
        *_numbers("threads"),
    )


class ExpertsRecord(Record, struct="decode::Experts"):
    """A layer's routed experts; run by the caller where ``forward`` is null.

    ``slots`` says where experts are, null: they are all there; ``index`` counts MoE layers,
    negative: the layer has none.
    """

    _fields_ = (*_pointers("forward", "layer", "activation", "slots"), *_sizes("index"))


class ModelRecord(Record, struct="decode::Model"):
    """Layers and their experts are arrays; ``patience`` in seconds."""

    _fields_ = (
        *_pointers("layers", "experts", "norm", "head"),
        *_sizes("count", "top_k"),
        ("patience", ctypes.c_double),
    )


_LATER, _WAITS = 2, 3


class NativeDecode:
    """Decode steps by a compiled library (see kernels/cpu/build.py); arguments are addresses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, {"moe_decode_model": (NUMBER, (POINTER,) * 8)})
        self._model = library.moe_decode_model

    def model(
        self,
        step: int,
        model: ModelRecord,
        meeting: int | None,
        done: ctypes.c_int64,
        routed: int,
        ids: int,
        weights: int,
        logits: int,
    ) -> bool:
        """All layers from ``done`` on, with interrupts heard on the way, and (B, V) logits; or up
        to a layer whose experts are not run here: whether one waits for their rows.

        Args:
            meeting: of ranks that share the experts (kernels/cpu/meeting.h); None: all are here.
            done: layers that are done, kept up; the one that waits is not.
            routed: (B, H) rows of the experts of the last layer that is done, if it has any; room
                for those of others.
            ids, weights: (MoE layers, B, K), filled where a layer's router is known here.

        Raises:
            MemoryError: there is none for the scratch rows of a layer.
        """
        said = _LATER
        while said == _LATER:
            said = self._model(
                step, addressof(model), meeting, addressof(done), routed, ids, weights, logits
            )
        check_done(said)
        return said == _WAITS
