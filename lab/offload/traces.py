"""Recorded routings of the shipped model.

Held-out text of each domain, and of all three in turn (`switches`, a change of subject every 128
tokens); or other texts of each domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.texts import TEXTS, heldout, other_texts
from lab.offload.predict import WINDOW
from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.record import record_trace
from offload.replay import calls_of

SUBJECT_TOKENS = 128


@dataclass(frozen=True)
class Recorded:
    """One text's way through the model."""

    name: str
    trace: Trace
    width: int

    @property
    def num_layers(self) -> int:
        return len(self.trace.num_experts)

    def calls(self, batch: int) -> list[list[int]]:
        ids = torch.stack(self.trace.expert_ids, 1).numpy()
        return calls_of(ids, self.width, batch)


def recordings(model: MoE, tokens: int) -> Iterator[Recorded]:
    """Of each domain and of the changes between them, so many tokens each."""
    texts = {name: model.codec.encode(heldout(name))[:tokens] for name in TEXTS}
    for name, ids in texts.items():
        yield record_text(model, name, ids)
    third = [ids[: tokens // len(texts)] for ids in texts.values()]
    pieces = zip(*([*_pieces(ids, SUBJECT_TOKENS)] for ids in third), strict=False)
    yield record_text(
        model, "switches", [token for turn in pieces for ids in turn for token in ids]
    )


def other_recordings(model: MoE, tokens: int, count: int) -> Iterator[Recorded]:
    """So many of each domain, of the text that this machine has anyway."""
    for name in TEXTS:
        texts, ids = other_texts(name), list[int]()
        for number in range(count):
            while len(ids) < tokens:
                ids += model.codec.encode(next(texts))
            yield record_text(model, f"{name} {number}", ids[:tokens])
            ids = []


def record_text(model: MoE, name: str, ids: Sequence[int]) -> Recorded:
    """One text's way, read in windows."""
    windows = list(_pieces(ids, WINDOW))
    trace = record_trace(model.backbone, model.experts, windows, row_bytes=0)
    return Recorded(name, trace, max(trace.num_experts))


def _pieces(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (ids[at : at + size] for at in range(0, len(ids), size))
