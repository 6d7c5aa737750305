"""Text from tokens: incremental decoding, bytes of single tokens, stop strings.

`IncrementalDecoder` never returns half a character, nor text that a later token changes. A token's
text depends on its neighbours: a character may span several tokens, and the first token of a text
may lose its leading space. So each token is decoded together with a few before it, and only the
text that it adds is returned. (tokenizers' own DecodeStream does the same, but fails after skipped
special tokens and on runs of byte tokens, and cannot be flushed.)

`TokenBytes` gives the bytes of single tokens; `StopStrings` ends a text at a stop string, however
tokens cut it up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moe.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of a text that is continued
_LONG_WINDOW = 16  # tokens; a character has at most 4 bytes and hence at most 4 tokens
_T = TypeVar("_T")


def decode_beside(fast: Any, token_ids: list[int]) -> str:
    """The text of token ids, by a fast tokenizer's way to decode several texts: other threads run
    meanwhile. The way for one text keeps the interpreter for half a microsecond an id."""
    (text,) = fast.decode_batch([token_ids], skip_special_tokens=False)
    return str(text)


def without_panics(call: Callable[[], _T], what: str) -> _T:
    """Call the tokenizer, and turn its panics into errors of the request. A compiled tokenizer can
    panic, by the rules that a model's files bring, which is no `Exception` and would end the step
    loop.

    Args:
        what: the tokenizer cannot do then, for the message.

    Raises:
        RequestError: it has panicked.
    """
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the model's tokenizer cannot {what}: {error!s:.200}") from None


class IncrementalDecoder:
    """Decodes the tokens of one sequence in amortised constant time a token.

    The pieces of `push` and `finish` joined equal `tokenizer.decode(token_ids,
    skip_special_tokens=True, clean_up_tokenization_spaces=False)`. (The clean-up rewrites text
    over token boundaries, " n't" for example, so text would never be final.)

    A run of byte tokens such as `<0xE4>` is returned when it ends: one invalid byte later in the
    run turns all its characters into U+FFFD.

    Args:
        shown: special tokens whose names are part of the text.
        behind: tokens of a text that this one continues, so that a space between the two is
            kept. Their own text is not returned.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        shown: Collection[int] = (),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._decode_any = tokenizer, _decoding(tokenizer)
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

    def _decode(self, token_ids: list[int]) -> str:
        return without_panics(partial(self._decode_any, token_ids), "write these tokens as text")

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
    """``decode(skip_special_tokens=True, clean_up_tokenization_spaces=False)``, but faster.

    Around a compiled tokenizer, transformers adds twice the time of the decoding itself, for each
    token of each sequence: those are called directly. Classes that override it keep their own.
    """
    from transformers import PreTrainedTokenizerFast as Compiled

    own = type(tokenizer)
    plain = issubclass(own, Compiled) and own.decode is Compiled.decode
    if plain and own._decode is Compiled._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode = cast("Callable[..., str]", tokenizer.decode)  # of one text
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


_BEFORE = "a"  # decoded in front of a token: tokenizers may strip a space that begins a text
# Byte-level tokenizers since GPT-2 write printable bytes as themselves, others from U+0100 on.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = sorted(set(range(256)) - set(_SHOWN))
_BYTES = {chr(byte): byte for byte in _SHOWN}
_BYTES |= {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


class TokenBytes:
    """The bytes of each token inside a text; a token may be half a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        before = tokenizer.convert_tokens_to_ids(_BEFORE)
        self._before: list[int] = []
        if isinstance(before, int) and self._decode([before]) == _BEFORE:
            self._before.append(before)

    def of(self, token_id: int) -> bytes:
        text = self._text(token_id)
        if REPLACEMENT in text:
            token = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
            if found := BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(found[1])
            if all(character in _BYTES for character in token):
                return bytes(_BYTES[character] for character in token)
        return text.encode()

    def _text(self, token_id: int) -> str:
        if self._before and token_id not in self._special_ids:
            text = self._decode([*self._before, token_id])
            if text.startswith(_BEFORE):
                return text.removeprefix(_BEFORE)
        return self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        decode = partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        return str(without_panics(partial(decode, token_ids), "write these tokens as text"))


class StopStrings:
    """Ends a text before the first stop string in it, however the text is cut up.

    The string that ends first counts; of strings that end together, the longest. Text that may be
    the beginning of a stop string is held back until it is known not to be one.

    Args:
        stop: the stop strings.
        tokens: special tokens that are stop strings, by id. Their text is not in what is pushed.

    Attributes:
        tokens: as given.
        matched: the stop string that was found, or None; after one, nothing may be pushed.
    """

    def __init__(self, stop: Iterable[str], tokens: Mapping[int, str] | None = None) -> None:
        self.tokens = tokens or {}
        self._patterns = [(string, _borders(string)) for string in stop]
        # How much of each string the text so far ends with (Knuth-Morris-Pratt).
        self._progress = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take in a piece of text; returns what can be handed out."""
        assert self.matched is None, "text after a stop string"
        if not self._patterns:
            return text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if match := self._advance(character):
                self.matched, self._held = match, ""
                return buffer[: end - len(match)]
        keep = max(self._progress)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self, token_id: int | None = None) -> str:
        """The text still held back, when generation ends without a match in the text.

        Args:
            token_id: the last token, which may be a stop string itself.
        """
        if token_id is not None:
            self.matched = self.tokens.get(token_id)
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str:
        """The longest string that ends with this character, else ""."""
        match = ""
        for index, (string, borders) in enumerate(self._patterns):
            length = self._progress[index]
            while length and string[length] != character:
                length = borders[length - 1]
            length += string[length] == character
            self._progress[index] = length
            if length == len(string) > len(match):
                match = string
        return match


def _borders(string: str) -> list[int]:
    """For each prefix of `string`, the length of its longest proper prefix that is its suffix."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        length = borders[end - 1]
        while length and string[length] != string[end]:
            length = borders[length - 1]
        borders[end] = length + (string[length] == string[end])
    return borders
