"""Control tokens that a client spells: their letters stay text, and never become the token.

A tokenizer finds control tokens such as ``<|im_end|>`` in whatever it is given, also inside of a
user's message or a tool's result, where they would end the message. `ControlTokens.hide` replaces
such spellings with `Masks` before the template renders, so that they can be told from those that
the template writes; `encode` then gives the prompt's tokens with the spellings as text.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from moe.fair_pool import without_interpreter

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

Ranges = Sequence[tuple[int, int]]
"""Places of clients' spellings in a text: begin and end of each, in order."""


class Masks:
    """Stand-ins for spellings in one conversation: letters and digits that no client can guess."""

    def __init__(self) -> None:
        self._key = f"moe{secrets.token_hex(8)}"
        self._spellings: list[str] = []
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._spellings)

    def hide(self, value: Any, spelling: re.Pattern[str] | None) -> Any:
        """JSON with masks in the place of spellings, in all of its texts."""
        if spelling is None:
            return value
        if isinstance(value, str):
            return spelling.sub(lambda found: self._mask(found[0]), value)
        if isinstance(value, list | tuple):
            return [self.hide(each, spelling) for each in value]
        if isinstance(value, dict):
            return {self.hide(k, spelling): self.hide(v, spelling) for k, v in value.items()}
        return value

    def show(self, text: str) -> tuple[str, Ranges] | None:
        """A text with the spellings again, and where they stand; None: masks came back damaged."""
        parts, ranges, length = [], [], 0
        pattern = re.compile(rf"{self._key}x(\d+)x")
        if text.casefold().count(self._key) != len(pattern.findall(text)):
            return None
        for index, part in enumerate(pattern.split(text)):
            if index % 2:
                part = self._spellings[int(part)]
                ranges.append((length, length + len(part)))
            parts.append(part)
            length += len(part)
        return "".join(parts), ranges

    def _mask(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._spellings))
        if number == len(self._spellings):
            self._spellings.append(text)
        return f"{self._key}x{number}x"


class ControlTokens:
    """The control tokens of a tokenizer: those that it splits texts at, and calls special.

    Args:
        ends: ids of tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> None:
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        added = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self._added = added
        self._ids = {
            token_id
            for token_id, token in added.items()
            if (token.special or token_id in ends) and token.content.strip()
        }

    @cached_property
    def spelling(self) -> re.Pattern[str] | None:
        """An expression that finds control tokens in a text; None: there are none."""
        return self.spelling_but(())

    def spelling_but(self, these: Collection[int]) -> re.Pattern[str] | None:
        """The same without some tokens."""
        texts = [self._added[token_id].content for token_id in self._ids if token_id not in these]
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if texts else None

    def encode(self, text: str, token_ids: list[int], ranges: Ranges) -> list[int]:
        """The tokens of a prompt with the spellings in some ranges as text.

        Args:
            token_ids: those that the tokenizer gives the text. They are returned where its own
                vocabulary has a control token that ordinary rules give, or it is told to cut.
        """
        if self._backend is None or not ranges:
            return token_ids
        encoding = _encoding(self._backend, text)
        if encoding.ids != token_ids:
            return token_ids
        made: list[int] = []
        for part in self._parts(token_ids, encoding, ranges, len(text)):
            ids = token_ids[part.begin : part.end]
            if part.spelled:
                ids = self._blind.encode(text[part.start : part.stop], inside=part.start > 0)
                if not self._ids.isdisjoint(ids):
                    return token_ids
            made += ids
        return made

    def _parts(
        self,
        token_ids: Sequence[int],
        encoding: Encoding,
        ranges: Ranges,
        length: int,
    ) -> Iterator[_Part]:
        """A prompt in parts: each control token of the template's is one, and what is between."""
        ends = [end for _, end in ranges]
        begin, start, spelled = 0, 0, False
        for at, token_id in enumerate(token_ids):
            if token_id not in self._ids:
                continue
            first, last = encoding.token_to_chars(at) or (start, start)
            index = bisect_right(ends, first)  # the first range that ends behind its beginning
            if index < len(ranges) and ranges[index][0] < last:
                spelled = True
                continue
            yield _Part(begin, at, start, first, spelled)
            yield _Part(at, at + 1, first, last, spelled=False)
            begin, start, spelled = at + 1, last, False
        yield _Part(begin, len(token_ids), start, length, spelled)

    @cached_property
    def _blind(self) -> _Blind:
        assert self._backend is not None
        added = {i: token for i, token in self._added.items() if i not in self._ids}
        return _Blind(self._backend, added)


def _encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text without the interpreter, which ``tokenizer.encode`` holds to its end."""
    with without_interpreter():
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding


class _Part(NamedTuple):
    """Tokens from `begin` to `end` of a prompt, which are its text from `start` to `stop`.

    `spelled`: some of them are control tokens that a client spells.
    """

    begin: int
    end: int
    start: int
    stop: int
    spelled: bool


class _Blind:
    """A tokenizer without its control tokens, which shares the other's vocabulary.

    Args:
        added: the tokens that it still splits texts at, by their ids in the other.
    """

    def __init__(self, other: Tokenizer, added: Mapping[int, AddedToken]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._cut = f"moe{secrets.token_hex(8)}cut"
        self._own = Tokenizer(other.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (rules := getattr(other, part)) is not None:
                setattr(self._own, part, rules)
        self._own.add_tokens(list(added.values()))
        self._own.add_special_tokens([AddedToken(self._cut, special=True, normalized=False)])
        # It numbers those that the vocabulary does not have by itself.
        self._ids = {self._own.token_to_id(token.content): i for i, token in added.items()}

    def encode(self, text: str, *, inside: bool) -> list[int]:
        """The tokens of a text between two control tokens; `inside`: it does not begin a prompt."""
        lead = self._cut if inside else ""
        ids = _encoding(self._own, f"{lead}{text}{self._cut}").ids[inside:-1]
        return [self._ids.get(token_id, token_id) for token_id in ids]
