"""The compiled decode step: the records of a model, and the call that runs its layers.

The fields mean what kernels/cpu/decode.h says, with its legend. A record holds addresses: its maker
keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof

from kernels.cpu.activation import Activation
from kernels.cpu.experts import PlaneMatrixRecord
from kernels.cpu.interface import (
    NUMBER,
    POINTER,
    Record,
    check_done,
    declare,
    doubles,
    floats,
    numbers,
    pointers,
    sizes,
)
from kernels.cpu.kv import FormatRecord
from kernels.cpu.post_norm import NormRecord

ABSENT, BIT_PLANES = -1, 8
SCORES = ("softmax", "sigmoid", "mixer")


class MatrixRecord(Record, struct="decode::Matrix"):
    """``format``: `ABSENT`, `BIT_PLANES` or a dense dtype's number (`interface.DTYPES`)."""

    _fields_ = (("planes", PlaneMatrixRecord), *pointers("weight", "bias"), *numbers("format"))


class RotationRecord(Record, struct="decode::Rotation"):
    _fields_ = (
        *pointers("cos", "sin"),
        *sizes("begin", "size"),
        *numbers("pairs_in", "pairs_out"),
    )


class HeadsRecord(Record, struct="decode::Heads"):
    """Norm and rotation of the rows of queries or keys."""

    _fields_ = (
        ("norm", NormRecord),
        ("rotation", RotationRecord),
        *sizes("count", "size"),
        *numbers("per_head", "after_rotation"),
    )


class RouterRuleRecord(Record, struct="decode::Rule"):
    _fields_ = (
        *pointers("correction"),
        *sizes("experts", "top_k", "groups", "groups_kept"),
        *numbers("score", "best_two", "renormalise"),
        *floats("scale", "threshold"),
    )


class AttentionRecord(Record, struct="decode::Attention"):
    _fields_ = (
        *((name, MatrixRecord) for name in ("q_a", "q", "k", "v", "o", "kv_b")),
        *((name, NormRecord) for name in ("q_norm", "k_norm")),
        ("rotation", RotationRecord),
        *pointers("expansion", "sinks"),
        *sizes("cache", "heads", "kv_heads", "head_dim", "value_dim", "plain_dim", "latent"),
        *sizes("window"),
        *numbers("q_norm_per_head", "k_norm_per_head", "norm_after_rotation", "half"),
        *floats("scale", "softcap"),
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
        ("rule", RouterRuleRecord),
        *floats("attention_scale", "feed_scale", "routed_scale"),
    )


class EmbeddingRecord(Record, struct="decode::Embedding"):
    """The table that rows begin with: float32 or bfloat16."""

    _fields_ = (*pointers("table"), *floats("scale"), *numbers("dtype"))


class JoinRecord(Record, struct="decode::Join"):
    """The beginning of a multi-token-prediction layer's rows: see `moe.network.mtp.MtpInput`."""

    _fields_ = (
        *((name, NormRecord) for name in ("embedding", "hidden")),
        ("project", MatrixRecord),
        *numbers("hidden_first"),
    )


class SeenRecord(Record, struct="decode::Seen"):
    _fields_ = (*pointers("blocks"), *sizes("count", "most", "newest", "gap", "gap_end"))


class StepRecord(Record, struct="decode::Step"):
    _fields_ = (
        *sizes("rows", "hidden", "layers"),
        *pointers("x", "h", "beside", "tokens", "position", "capacity", "cache", "states"),
        *pointers("seen", "whole"),
        *((name, FormatRecord) for name in ("keys", "values")),
        *numbers("threads", "bounds"),
        *pointers("past", "prompts"),
    )


class PromptsRecord(Record, struct="decode::Prompts"):
    """The rows of a step that reads prompts; ``first`` and ``wanted`` are int64 arrays."""

    _fields_ = (
        *sizes("sequences"),
        *pointers("first"),
        *sizes("num_wanted"),
        *pointers("wanted"),
    )


class ExpertsRecord(Record, struct="decode::Experts"):
    """A layer's routed experts. ``forward`` null: the caller runs them. ``slots``: the slot of each
    expert in memory, else -1; null: all are, in order. ``index`` counts MoE layers; -1: no MoE."""

    _fields_ = (*pointers("forward", "layer", "activation", "slots"), *sizes("index"))


class ModelRecord(Record, struct="decode::Model"):
    """Layers and their experts are arrays; ``patience`` in seconds. No embedding: the caller fills
    the rows."""

    _fields_ = (
        *pointers("layers", "program", "experts", "norm", "head", "embedding"),
        *sizes("count", "top_k"),
        *doubles("patience"),
        *pointers("join"),
    )


class ChainRecord(Record, struct="decode::Chain"):
    """Drafts of several sequences, pass after pass."""

    _fields_ = (
        *pointers("first", "model"),
        *sizes("sequences", "most"),
        *pointers("last", "depth", "sharpness", "accepted"),
        *doubles("price"),
        *pointers("tokens", "confidence", "made", "rows", "ids", "uniform"),
        *sizes("most_choices"),
        *pointers("choices", "num_choices", "weights"),
    )


_CONTINUE, _WAITING = 2, 3


class NativeDecode:
    """Decode steps by a compiled library (see kernels/cpu/build.py); arguments are addresses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, {"moe_decode_model": (NUMBER, (POINTER,) * 8)})
        declare(library, {"moe_draft_chain": (NUMBER, (POINTER,))})
        self._model, self._chain = library.moe_decode_model, library.moe_draft_chain

    def model(
        self,
        step: int,
        model: ModelRecord,
        all_to_all: int | None,
        done: ctypes.c_int64,
        routed: int,
        ids: int,
        weights: int,
        logits: int,
    ) -> bool:
        """Run the layers from ``done`` on; returns True at a layer whose experts the caller runs,
        False when all layers and the (B, V) logits are done. Handles interrupts between layers.

        Args:
            all_to_all: address of the ranks' exchange (`NativeAllToAll.address`); None: one rank.
            done: number of layers that are done, updated; a layer that waits does not count.
            routed: (B, H) output of the experts of the last layer done, overwritten by the next.
            ids, weights: (MoE layers, B, K), filled by the layers whose router C++ knows.

        Raises:
            MemoryError: no memory for the scratch rows of a layer.
        """
        result = _CONTINUE
        while result == _CONTINUE:
            result = self._model(
                step, addressof(model), all_to_all, addressof(done), routed, ids, weights, logits
            )
        check_done(result)
        return result == _WAITING

    def draft(self, chain: ChainRecord) -> None:
        """Draft for some sequences, all passes in one call.

        Raises:
            MemoryError: no memory for the scratch rows of a layer.
        """
        check_done(self._chain(addressof(chain)))
