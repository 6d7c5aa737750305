"""Multi-token-prediction drafts: by the layer that the model's checkpoint brings.

The first pass of a draft reads the tokens that have come since the last one, each with the model's
hidden state of the token before it, which the sequence has kept (`moe.kv.hidden`). Each
further pass reads the token just drafted with the layer's own hidden state. Only rows of the first
pass stay in the layer's cache: they are what the model itself has read. Where the layer is compiled
and its experts are in memory, all passes are one call (`moe.decode.chain`).
Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random, getrandbits

import torch
from torch import Tensor

from moe.kv.hidden import HiddenRows
from moe.network.lanes import run_lanes
from moe.network.mtp import ChainStart, MtpHead
from moe.network.packed_pass import Work
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft, Mode, Stop
from moe.speculate.passes import PassDrafts, PendingDraft

COUNTED = 15  # odd: a draft asks twice


class MtpDrafts(PassDrafts):
    """Drafts for several sequences in shared passes of a multi-token-prediction layer.

    Args:
        head: the layer; the model's sequences keep hidden states, and rows of the layer.
    """

    def __init__(self, head: MtpHead) -> None:
        super().__init__(stays=head.backbone.device.type != "cpu")
        assert head.backbone.packed
        self._head = head
        self._unread: dict[int, HiddenRows] = {}  # of drafts whose first pass is to come
        self._asked = self._bytes = 0
        self._random = Random(getrandbits(128)).random

    @property
    def bytes_read(self) -> int:
        """Counted anew every `COUNTED`-th time: counting takes a fair part of a pass."""
        if self._asked % COUNTED == 0:
            self._bytes = sum(self._head.experts.expert_bytes_read_by.values())
        self._asked += 1
        return self._bytes

    def draft(
        self,
        mode: Mode,
        sequences: Sequence[RunningSequence],
        depths: Sequence[int],
        stop: Stop,
    ) -> list[Draft]:
        chain = self._head.chain
        if chain is None or not chain.ready:
            return super().draft(mode, sequences, depths, stop)
        self.rows = []
        drafts = [PLAIN] * len(sequences)
        # Verification meets the same error and reports it to the sequences it belongs to.
        with suppress(Exception):
            starts = {
                place: self._start(sequences[place], depth)
                for place, depth in enumerate(depths)
                if depth and len(_kept(sequences[place]))
            }
            if not starts:
                return drafts
            accepted = [stop.at(position) for position in range(max(depths) + 1)]
            made = chain.draft(list(starts.values()), accepted, stop.price)
            self.rows = made.rows
            found = zip(starts, made.tokens, made.confidence, made.proposals, strict=True)
            for place, tokens, confidence, proposals in found:
                _kept(sequences[place]).clear()
                drafts[place] = Draft(mode, tuple(tokens), tuple(confidence), tuple(proposals))
        return drafts

    def _start(self, sequence: RunningSequence, depth: int) -> ChainStart:
        rows, params = _kept(sequence), sequence.sampler.params
        assert sequence.cache is not None
        head = sequence.cache.kv.head
        assert head is not None
        # With a seed the model's sampler draws as without a draft, so a drawn one gains nothing.
        draw = self._random if sequence.sampler.is_random else None
        work = Work(sequence.last_tokens(len(rows)), head)
        return ChainStart(work, rows.joined(), depth, params.temperature or 1.0, draw)

    def _begin(
        self, mode: Mode, sequences: Sequence[RunningSequence], depths: Sequence[int]
    ) -> list[PendingDraft]:
        drafts = []
        self._unread = {}
        for sequence, depth in zip(sequences, depths, strict=True):
            assert sequence.cache is not None
            cache = sequence.cache.kv
            assert cache.hidden is not None
            assert cache.head is not None
            # Its last token is not read yet, so as many tokens come behind those with rows.
            count = len(cache.hidden)
            tokens = sequence.last_tokens(count) if count else []
            work = Work(tokens, cache.head)
            draft = PendingDraft(
                work, sequence.sampler.fork(), depth if tokens else 0, cache.head.length
            )
            self._unread[id(draft)] = cache.hidden
            drafts.append(draft)
        return drafts

    def _run(self, drafts: Sequence[PendingDraft]) -> list[Tensor]:
        head, work = self._head, [draft.work for draft in drafts]
        kept = [_kept(item) for item in work]
        sources = [self._unread.get(id(d), own) for d, own in zip(drafts, kept, strict=True)]
        rows = [source.joined() for source in sources]
        for own in kept:
            own.clear()
        with head.input.reading(rows[0] if len(rows) == 1 else torch.cat(rows)):
            lanes = head.backbone.lanes(work, "decode")
            run_lanes(lanes, head.experts.run)
            logits = [rows for lane in lanes for rows in lane.result()]
        for draft, own in zip(drafts, kept, strict=True):
            own.keep_last()
            if (read := self._unread.pop(id(draft), None)) is not None:
                read.clear()
                draft.length = draft.work.cache.length
        return logits


def _kept(of: RunningSequence | Work) -> HiddenRows:
    """The hidden states before the tokens that the layer has not read."""
    assert of.cache is not None
    assert of.cache.hidden is not None
    return of.cache.hidden
