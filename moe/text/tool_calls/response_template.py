"""`ResponseTemplate`: the tokenizer's own word on how its model's answers are to be read.

Some tokenizers carry a ``response_template`` (transformers 5.18 and newer): delimiters around the
fields of a message, such as ``content``, ``thinking`` and ``tool_calls``. `TemplateParser` reads an
answer by it while it is generated, with transformers' own parser. As with `CallParser`, what is no
call of a tool that the request has stays text.

Regular expressions of such a template are strangers' code: each search has a time limit, and a
template with expressions that cannot be given one is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe.text.tool_calls.parser import ParsedCall, Schemas, parsed_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that templates give to reasoning."""
PREFIX_TOKENS = 512
"""Tokens at the end of a prompt that are looked at for the beginning of the answer."""
_SECONDS = 0.1  # of a search
_LIMITED = ("text", "json", "kv-lines", "python-call-list")  # have no expressions of their own
_MOST_CHARACTERS = 1 << 16  # of a template

Parts = list[str | ParsedCall]


class ResponseTemplate:
    """A tokenizer's template for answers.

    Args:
        source: what the tokenizer carries.

    Raises:
        ValueError: transformers does not know such a template, or it cannot be used safely.
    """

    def __init__(self, source: object) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        written = json.dumps(source)
        if not isinstance(source, dict) or len(written) > _MOST_CHARACTERS:
            raise ValueError(f"a response template must be an object of {_MOST_CHARACTERS} letters")
        self._spec = load_response_template(source)
        for field in self._spec.fields.values():
            if field.content not in _LIMITED or "value_parser" in field.content_args:
                raise ValueError(f"expressions inside {field.content} have no time limit")
            field.open_re, field.close_re = _limited(field.open_re), _limited(field.close_re)
        self._spec.start_anchor_re = _limited(self._spec.start_anchor_re)
        self._texts = re.sub(r"\\\\(.)", r"\1", written)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ResponseTemplate | str:
        """The template that a tokenizer carries; or why none is used."""
        source = getattr(tokenizer, "response_template", None)
        if source is None:
            return "the tokenizer has no response_template"
        try:
            return cls(source)
        except Exception as error:  # a file of a stranger; older releases have no such module
            return f"the tokenizer's response_template cannot be used: {error!s:.200}"

    @property
    def has_calls(self) -> bool:
        return "tool_calls" in self._spec.fields

    def mentions(self, text: str) -> bool:
        """Return whether a special token is a part of a delimiter."""
        return text in self._texts

    def parser(self, prompt: str, tools: Schemas, most: int | None) -> TemplateParser:
        """A parser of one answer.

        Args:
            prompt: the end of the prompt, which may have begun the answer.
            tools: the tools of the request.
            most: drop calls after this many; None: drop nothing.
        """
        return TemplateParser(self._spec, prompt, tools, most)


class _Limited:
    """A compiled expression whose searches end in time. Raises `TimeoutError`."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, *args: Any, **options: Any) -> Any:
        return self._pattern.search(*args, timeout=_SECONDS, **options)

    def match(self, *args: Any, **options: Any) -> Any:
        return self._pattern.match(*args, timeout=_SECONDS, **options)

    def finditer(self, *args: Any, **options: Any) -> Any:
        return self._pattern.finditer(*args, timeout=_SECONDS, **options)


def _limited(pattern: Any) -> Any:
    return None if pattern is None else _Limited(pattern)


class TemplateParser:
    """Parses one answer; made by `ResponseTemplate.parser`.

    Attributes:
        thinking: the last text was reasoning.
    """

    def __init__(self, spec: Any, prompt: str, tools: Schemas, most: int | None) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self.thinking = False
        self._fields, self._tools, self._left = spec.fields, tools, most
        self._reasoning: list[str] = []
        self._parts: Parts = []
        self._space: dict[str, str | None] = {}  # space that ends a field so far; None: it is empty
        self._body = ""
        self._parser: Any = None
        try:
            begun = prompt if any(True for _ in spec.start_anchor_re.finditer(prompt)) else ""
            functions: list[Any] = [{"name": name, "parameters": tools[name]} for name in tools]
            self._parser = ResponseParser(spec, prefix=begun, tools=functions)
        except (TimeoutError, ValueError):  # the answer is text
            return
        for event in self._parser.initial_events:  # only which field is open matters
            self._follow(event["field"], event["type"] != "region_close")

    def push(self, text: str) -> tuple[str, Parts]:
        """Take in a piece of text; returns reasoning, and text and calls that became final."""
        self._read(text, ended=False)
        return self._taken()

    def finish(self) -> tuple[str, Parts]:
        """The rest, when the answer has ended."""
        self._read("", ended=True)
        return self._taken()

    def _read(self, text: str, *, ended: bool) -> None:
        if self._parser is None:
            self._parts += [text] if text else []
            return
        try:
            events = self._parser.finalize()[1] if ended else self._parser.feed(text)
        except Exception:  # a search takes too long, or what it has found is no JSON: stays text
            self._parser, self.thinking = None, False
            self._parts += [kept] if (kept := self._body + text) else []
            return
        for event in events:
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        field, kind = event["field"], event["type"]
        self._follow(field, kind != "region_close")
        if field == "tool_calls":
            if kind == "region_chunk":
                self._body += event["text"]
            elif kind == "region_close":
                self._call(event["value"])
                self._body = ""
        elif kind == "region_chunk":
            self._text(field, event["text"])

    def _follow(self, field: str, is_open: bool) -> None:
        self.thinking = is_open and field in THOUGHTS
        if not is_open:
            self._space.pop(field, None)

    def _text(self, field: str, text: str) -> None:
        """Text of a field, without the space around it."""
        if self._fields[field].content_args.get("strip", True):
            space = self._space.get(field)
            text = text.lstrip() if space is None else space + text
            kept = text.rstrip()
            if space is None and not kept:
                return
            self._space[field] = text[len(kept) :]
            text = kept
        if not text:
            return
        if field in THOUGHTS:
            self._reasoning.append(text)
        elif self._left != 0:
            self._parts.append(text)

    def _call(self, value: object) -> None:
        made = []
        for each in value if isinstance(value, list) else [value]:
            about = each.get("function", each) if isinstance(each, dict) else {}
            made.append(parsed_call(about.get("name"), about.get("arguments", {}), self._tools))
        if self._left == 0:
            return
        calls = [call for call in made if call is not None]
        if len(calls) < len(made):
            self._parts.append(self._body)
            return
        self._parts += calls if self._left is None else calls[: self._left]
        if self._left is not None:
            self._left = max(self._left - len(calls), 0)

    def _taken(self) -> tuple[str, Parts]:
        reasoning, parts = "".join(self._reasoning), self._parts
        self._reasoning, self._parts = [], []
        return reasoning, parts
