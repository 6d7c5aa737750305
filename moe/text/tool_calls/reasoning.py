"""Reasoning before an answer: finds its format, and parses it.

`probe_reasoning` lets the chat template render an answer with reasoning that occurs nowhere else;
the texts before it, and between it and the answer, are what the model was taught to write.
Templates that only open the reasoning at the end of a prompt, or leave it empty, show its tag
there. No architecture is named.

`ReasoningParser` separates reasoning from an answer while it is generated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.text.chat import REASONING_KEY, MessageDict
from moe.text.tool_calls.read_back import Render
from moe.text.tool_calls.scanner import Scan, StreamScanner, overlap
from moe.text.tool_calls.spots import departs

_KEYS = (REASONING_KEY, "thinking", "reasoning")  # names that templates read a message's by
# Variables that turn reasoning on: some models reason only then.
SWITCHES = ("enable_thinking", "thinking")
_OPTIONS: tuple[dict[str, Any], ...] = ({}, dict.fromkeys(SWITCHES, True))
_ASKED, _THOUGHT, _ANSWERED = "probe question", "probe thought", "probe answer"
_TOOL = "probe_tool"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Degrees of reasoning that clients ask for, from the least."""
_TAUGHT = ("low", "medium", "high")
_DEFAULT = "medium"
_NO_EFFORT = "probe effort"
_EMPTY = re.compile(r"([<\[])(?P<name>[\w:-]+)([>\]])\s*\1/(?P=name)\3")
_FIRST = re.compile(r"[<\[][^<>\[\]\s]+[>\]]")
_LAST = re.compile(r"[<\[][^<>\[\]\s]+[>\]]\s*\Z")
_TAGS = re.compile(r"(?:[<\[][^<>\[\]\s]+[>\]]\s*)+")
_TAG = re.compile(r"(<[\w:-]+>|\[[A-Z_]+\])\s*\Z")


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning is between `open` and `close`, and the answer follows. Space does not matter.

    Attributes:
        lead: the text that begins an answer without reasoning, as with channels, and that may
            follow `close`; or "".
        key: the template's name for a message's reasoning; None: it reads none.
    """

    open: str
    close: str
    lead: str = ""
    key: str | None = None

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.open, self.close, self.lead)

    def opened_by(self, prompt: str) -> bool:
        """Return whether the answer to a prompt begins inside reasoning."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Return whether a prompt has ended the reasoning already: its answer is not to reason."""
        return prompt.rstrip().endswith(self.close)

    def as_dict(self) -> dict[str, str | None]:
        return {"opens": self.open, "closes": self.close, "key": self.key}


@dataclass(frozen=True)
class ReasoningSupport:
    """The format of a model's reasoning, or the reason why that is not known.

    Attributes:
        switch: the template's variable that turns reasoning on and off; None: it has none.
        efforts: values of ``reasoning_effort`` that the template reads, of `EFFORTS` in their
            order; empty: it reads none.
    """

    format: ReasoningFormat | None
    reason: str
    switch: str | None = None
    efforts: tuple[str, ...] = ()

    @property
    def takes_effort(self) -> bool:
        """The template reads ``reasoning_effort``."""
        return bool(self.efforts)

    def nearest(self, effort: str) -> str | None:
        """The effort nearest to one of `EFFORTS` that the template reads. None: what the template
        does by itself, which counts as medium, is as near; or ``none``, which it does not read."""
        if effort in self.efforts or effort == "none":
            return effort if effort in self.efforts else None
        levels = [*(level for level in self.efforts if level != "none"), _DEFAULT]
        place = EFFORTS.index(effort)
        best = min(levels, key=lambda level: abs(EFFORTS.index(level) - place))
        return best if best in self.efforts else None

    def as_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else self.format.as_dict()
        return {
            "enabled": self.format is not None,
            "why": self.reason,
            "format": shown,
            "switch": self.switch,
            "takes_effort": self.takes_effort,
            "efforts": list(self.efforts),
        }


def probe_reasoning(render: Render) -> ReasoningSupport:
    """Derive the format of reasoning from a model's chat template."""
    reason = "the chat template neither writes the reasoning of earlier answers nor opens any"
    found = None
    try:
        for options in _OPTIONS:
            found = _ReasoningProbe(render, options).run()
            if found is not None:
                reason = "found by probing the chat template"
                break
        switch = next((name for name in SWITCHES if _reads(render, name, True, False)), None)
        efforts = _efforts(render)
    except HelperLimitError:
        return ReasoningSupport(None, "the chat template takes too long or too much memory")
    return ReasoningSupport(found, reason, switch, efforts)


def _reads(render: Render, name: str, *values: object) -> bool:
    """Return whether the value of a variable changes the prompt."""
    prompts = {_ReasoningProbe(render, {name: value}).prompt() for value in values}
    return None not in prompts and len(prompts) > 1


def _efforts(render: Render) -> tuple[str, ...]:
    """The values of ``reasoning_effort`` that a template reads: those that change the prompt.

    One that writes down whatever it is told was taught with `_TAUGHT`.
    """

    def prompt(effort: str) -> str | None:
        return _ReasoningProbe(render, {"reasoning_effort": effort}).prompt()

    other, plain = prompt(_NO_EFFORT), _ReasoningProbe(render, {}).prompt()
    if other is not None and _NO_EFFORT in other:
        return _TAUGHT
    found = {effort: prompt(effort) for effort in EFFORTS}
    # A template that names none of them writes the same for all.
    if other is None and len({*found.values()} - {None}) < 2:
        return tuple(e for e, text in found.items() if text not in (None, plain))
    return tuple(e for e, text in found.items() if text is not None and text != other)


class _ReasoningProbe:
    def __init__(self, render: Render, options: dict[str, Any]) -> None:
        self._render = render
        self._options = options

    def prompt(self) -> str | None:
        """A rendered prompt; None if the template refuses the options."""
        return self._text([_user()], add_generation_prompt=True)

    def run(self) -> ReasoningFormat | None:
        prompt = self.prompt()
        plain = self._text([_user(), _answer()])
        if prompt is None or plain is None or _ANSWERED not in plain:
            return None
        opened = self._opened(prompt, plain)
        for key in _KEYS:
            for called in (False, True):
                text = self._text(_thought(key, called=called))
                found = None if text is None else _around(text, prompt, opened, plain)
                found = None if found is None else self._read_back(found, key, prompt)
                if found is not None:
                    lead = self._lead(plain, prompt.rstrip().removesuffix(opened), found[0])
                    return ReasoningFormat(*found, lead, key)
        empty = _EMPTY.fullmatch(self._lead(plain, prompt, _ANSWERED))
        tag = f"{empty[1]}{empty['name']}{empty[3]}" if empty else "" if opened in plain else opened
        return ReasoningFormat(tag, f"{tag[0]}/{tag[1:]}") if tag else None

    def _read_back(self, around: tuple[str, str], key: str, prompt: str) -> tuple[str, str] | None:
        """The texts around reasoning if they read what the template writes, also before calls,
        where only the first tag of what closes it may stand; None: neither reads it."""
        open, close = around
        first = _FIRST.match(close)
        choices = [close]
        if first is not None and _TAGS.fullmatch(close):
            choices.append(first[0])
        texts = [self._text(_thought(key, called=called)[:2]) for called in (False, True)]
        written = [text for text in texts if text is not None and _THOUGHT in text]
        for choice in choices:
            format = ReasoningFormat(open, choice)
            if all(_is_read(format, text, prompt) for text in written):
                return open, choice
        # Of messages on channels, calls are read by `ChannelParser`.
        return None if _TAGS.fullmatch(close) else around

    def _opened(self, prompt: str, plain: str) -> str:
        """The tag that ends a prompt, if it does not begin every assistant's turn; or ""."""
        found = _TAG.search(prompt)
        if found is None:
            return ""
        # After an earlier question the template may write empty reasoning.
        turn = prompt[: found.start()].rstrip()
        return found[1] if plain.startswith(turn) else ""

    def _lead(self, plain: str, prompt: str, open: str) -> str:
        lead = plain[departs(prompt, plain) : plain.find(_ANSWERED)].strip()
        return "" if lead.startswith(open) else lead

    def _text(self, messages: list[MessageDict], **options: Any) -> str | None:
        try:
            return self._render(messages, **options, **self._options)
        except RequestError as error:
            if isinstance(error.__cause__, HelperLimitError):
                raise error.__cause__ from None
            return None


def _around(text: str, prompt: str, opened: str, plain: str) -> tuple[str, str] | None:
    """The texts before the reasoning and between it and the answer; None: there is no reasoning."""
    begin = text.find(_THOUGHT)
    end = text.find(_ANSWERED, begin + len(_THOUGHT))
    if begin < 0 or end < 0:
        return None
    close = text[begin + len(_THOUGHT) : end].strip()
    apart = departs(prompt, text)
    open = text[apart:begin].strip() or opened
    last, closing = _LAST.search(text, 0, begin), _FIRST.match(close)
    if not open and last is not None and closing is not None:
        tag, rest = last[0].strip(), prompt[apart:].lstrip()
        # The prompt has opened the reasoning, by no tag of every answer, or written an empty one.
        if tag not in plain if not rest else rest.startswith(closing[0]):
            open = tag
    if _TOOL in close:  # calls come before the content: the first tag closes the reasoning
        first = _FIRST.match(close)
        close = first[0] if first else ""
    return (open, close) if open and close else None


def _is_read(format: ReasoningFormat, text: str, prompt: str) -> bool:
    """Return whether the reasoning of an answer, and nothing else, is read as that."""
    opened = text.rfind(format.open, 0, text.find(_THOUGHT))
    begin = opened if opened >= 0 else departs(prompt, text)
    parser = ReasoningParser(format, inside=opened < 0)
    parts = [parser.push(text[begin:]), parser.finish()]
    thought, rest = ("".join(part) for part in zip(*parts, strict=True))
    return thought.strip() == _THOUGHT and (_ANSWERED in rest or _TOOL in rest)


def _user() -> MessageDict:
    return {"role": "user", "content": _ASKED}


def _answer() -> MessageDict:
    return {"role": "assistant", "content": _ANSWERED}


def _thought(key: str, *, called: bool) -> list[MessageDict]:
    """Messages with reasoning; some templates write it only in answers that call tools."""
    answer = _answer() | {key: _THOUGHT}
    if not called:
        return [_user(), answer]
    function = {"name": _TOOL, "arguments": {}}
    calls = [{"id": "probe0000", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "probe0000", "name": _TOOL, "content": "7"}
    return [_user(), answer | {"tool_calls": calls}, result]


class ReasoningParser:
    """Cuts one answer into reasoning and content.

    The result depends on the text alone, never on how it was cut up. An answer that ends before its
    reasoning does has no content.

    Args:
        inside: the prompt has opened the reasoning.

    Attributes:
        found: the answer begins with reasoning.
        over: the reasoning has ended, or there is none.
    """

    def __init__(self, format: ReasoningFormat, *, inside: bool) -> None:
        self.found = self.over = False
        self._format = format
        self._inside = inside
        self._scanner = StreamScanner()
        self._at = 0  # everything before is handed out
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """Take in a piece of text; returns reasoning and content that became final."""
        self._scanner.text += text
        next(self._reading, None)
        out = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return out

    def finish(self) -> tuple[str, str]:
        """The rest, when the answer has ended."""
        self._scanner.ended = True
        return self.push("")

    def _read(self) -> Scan[None]:
        scanner = self._scanner
        opened = yield from scanner.literal(0, self._format.open)
        if opened is not None or self._inside:
            self.found = True
            self._at = yield from scanner.skip(opened or 0)
            closed = yield from self._think()
            self.over = True
            lead = yield from scanner.literal(closed, self._format.lead)
            self._at = yield from scanner.skip(closed if lead is None else lead)
        elif (lead := (yield from scanner.literal(0, self._format.lead))) is not None:
            self._at = lead
        self.over = True
        while True:
            self._hand_out(len(scanner.text), self._content)
            yield

    def _think(self) -> Scan[int]:
        """Emit the reasoning; returns where its closing literal ends, or the text."""
        scanner, close = self._scanner, self._format.close
        word = close.split()[0]
        start = self._at
        while True:
            found = scanner.text.find(word, start)
            end = found if found >= 0 else len(scanner.text) - overlap(scanner.text, word)
            keep = scanner.text[self._at : end]
            start = end - self._hand_out(self._at + len(keep.rstrip()), self._reasoning)
            if found >= 0:
                closed = yield from scanner.literal(start, close)
                if closed is not None:
                    return closed
                start += 1
            elif scanner.ended:
                self._hand_out(len(scanner.text), self._reasoning)
                return len(scanner.text)
            else:
                yield

    def _hand_out(self, end: int, to: list[str]) -> int:
        """Emit the text up to a position; returns by how much later positions have shifted."""
        text = self._scanner.text
        to.append(text[self._at : end])
        self._scanner.text, self._at = text[end:], 0
        return end
