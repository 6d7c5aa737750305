"""Text from tokens as they come: never half a character, never text that a later token changes.

A token's text depends on its neighbours: characters are cut over several tokens, and the first
token of a text may lose its leading space. So tokens are decoded together with the few before
them, and only what that adds is handed out. (tokenizers' own DecodeStream does the same, but fails
after skipped special tokens and on runs of byte tokens, and cannot be flushed.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of a text that is continued
_LONG_WINDOW = 16  # tokens; a character has at most 4 bytes and hence at most 4 tokens


class IncrementalDecoder:
    """Decodes the tokens of one sequence in amortised constant time a token.

    The pieces of `push` and `finish` joined equal `tokenizer.decode(token_ids,
    skip_special_tokens=True, clean_up_tokenization_spaces=False)`. (The clean-up rewrites text
    over token boundaries, " n't" for example, so text would never be final.)

    A run of byte tokens such as `<0xE4>` is handed out when it ends: one invalid byte later in
    the run turns all its characters into U+FFFD.

    Args:
        shown: special tokens that are part of the text, with what they are called.
        behind: tokens of another text, which this one continues: a space between them is part of
            it. None of their text is handed out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        shown: Collection[int] = (),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._decode = tokenizer, _decoding(tokenizer)
        self._special_ids = special_token_ids(tokenizer)
        self._shown = frozenset(shown)
        # Tokens decoded together: finished ones that give context, then those still open.
        self._window: list[int] = []
        self._num_context = 0
        # Length of the window's text that was handed out.
        self._num_emitted = 0
        self._continue(behind[-_CONTEXT:])

    def push(self, token_id: int) -> str:
        """Take in the next token; returns the text that became final, often empty."""
        if token_id in self._shown:
            return self.finish() + str(self._tokenizer.convert_ids_to_tokens(token_id))
        if token_id in self._special_ids:
            return ""
        token = cast("str | None", self._tokenizer.convert_ids_to_tokens(token_id))
        if token is None:  # an id that pads the embedding; decoding ignores it too
            return ""
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not token.endswith(REPLACEMENT):
            # Only the last character can be unfinished; U+FFFD before it stands for invalid bytes.
            piece = self._emit(text[:-1])
            if len(self._window) - self._num_context >= _LONG_WINDOW:
                self._cut(text)
            return piece
        piece = self._emit(text)
        self._close()
        return piece

    def finish(self) -> str:
        """The text still held back; bytes that never became a character give U+FFFD."""
        piece = self._emit(self._decode(self._window))
        self._close()
        return piece

    def _continue(self, behind: Sequence[int]) -> None:
        """Take tokens as context, unless they end within a character or say nothing."""
        for token_id in behind:
            self._window = [] if token_id in self._special_ids else [*self._window, token_id]
        text = self._decode(self._window)
        last = str(self._tokenizer.convert_ids_to_tokens(self._window[-1:]))
        if not text or text.endswith(REPLACEMENT) or BYTE_TOKEN.search(last):
            self._window = []
        else:
            self._num_context, self._num_emitted = len(self._window), len(text)

    def _emit(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _close(self) -> None:
        """Make the open tokens the context of the next ones."""
        start = self._num_context
        # Context without text (a lone space at the start is stripped) would not keep the next
        # token from being decoded as the first one.
        while not (text := self._decode(self._window[start:])) and start > 0:
            start -= 1
        self._window = self._window[start:]
        self._num_context = len(self._window)
        self._num_emitted = len(text)

    def _cut(self, text: str) -> None:
        """Forget the start of a long run of invalid bytes, at a boundary between two of them."""
        for position in range(len(self._window) - 4, len(self._window) - 8, -1):
            head, tail = (
                self._decode(self._window[:position]),
                self._decode(self._window[position:]),
            )
            # Four tokens follow, hence no later byte can join the two sides either.
            if head + tail == text:
                self._window = self._window[position:]
                self._num_context = 0
                self._num_emitted -= len(head)
                return


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that `decode(skip_special_tokens=True)` leaves out."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}


def _decoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """``decode(skip_special_tokens=True, clean_up_tokenization_spaces=False)``, without what
    transformers does around a compiled tokenizer's: twice the time of the decoding itself, for each
    token of each sequence. Classes with a way of their own keep it."""
    from transformers import PreTrainedTokenizerFast as Compiled

    own = type(tokenizer)
    plain = issubclass(own, Compiled) and own.decode is Compiled.decode
    if plain and own._decode is Compiled._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode = cast("Callable[..., str]", tokenizer.decode)  # of one text
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
