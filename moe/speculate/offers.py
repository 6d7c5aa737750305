"""What model-free drafts have to say of running sequences, whose tokens are read to them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from moe.engine.sequence import RunningSequence
from moe.speculate.draft import Draft
from moe.speculate.model_free import ModelFree


class Offers:
    """Asked in steps that draft nothing, too: what it takes is taken of plain decoding."""

    def __init__(self, sources: Sequence[ModelFree[Any]]) -> None:
        self.sources = list(sources)
        self._texts: WeakKeyDictionary[RunningSequence, _Text] = WeakKeyDictionary()
        self._asked: Sequence[RunningSequence] = ()  # the last time
        self._read: list[_Text] = []  # theirs

    def of(
        self, sequences: Sequence[RunningSequence], limits: Sequence[int]
    ) -> list[Sequence[Draft]]:
        """Of each sequence the drafts of at most so many tokens."""
        if sequences != self._asked:
            self._asked, self._read = list(sequences), [self._text(each) for each in sequences]
        offers = list[Sequence[Draft]]()
        for sequence, text, limit in zip(sequences, self._read, limits, strict=True):
            said = sequence.token_ids
            tokens = said[text.read :] if text.read >= 0 else sequence.prompt_token_ids + said
            text.read = len(said)
            own = []
            for source, known in zip(self.sources, text.known, strict=True):
                source.take(known, tokens)
                draft = source.following(known, limit)
                if draft.tokens:
                    own.append(draft)
            offers.append(own)
        return offers

    def _text(self, sequence: RunningSequence) -> _Text:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text([source.text() for source in self.sources])
        return text


class _Text:
    """Of a sequence.

    Attributes:
        known: what each source knows of it.
        read: its tokens that they have been told of, behind those of the prompt; below 0: nothing.
    """

    __slots__ = ("known", "read")

    def __init__(self, known: list[Any]) -> None:
        self.known, self.read = known, -1
