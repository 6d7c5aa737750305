"""How a model writes what it thinks before it answers, found by asking its chat template.

The template renders an answer with reasoning that occurs nowhere else; what stands before it and
between it and the answer is what the model was taught to write. Templates that only open the
reasoning, at the end of a prompt, or leave it empty, show its tag there. No architecture is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moe.errors import RequestError
from moe.text.deadline import DeadlineError
from moe.tools.layout import common
from moe.tools.probe import Message, Render

KEY = "reasoning_content"
_KEYS = (KEY, "thinking", "reasoning")  # what templates call the reasoning of a message
# Some models think only where they are told to, by one of these.
_SWITCHES = ("enable_thinking", "thinking")
_OPTIONS: tuple[dict[str, Any], ...] = ({}, dict.fromkeys(_SWITCHES, True))
_ASKED, _THOUGHT, _ANSWERED = "probe question", "probe thought", "probe answer"
_TOOL = "probe_tool"
_EMPTY = re.compile(r"([<\[])(?P<name>[\w:-]+)([>\]])\s*\1/(?P=name)\3")
_FIRST = re.compile(r"[<\[][^<>\[\]\s]+[>\]]")
_UNFINISHED = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_TAG = re.compile(r"(<[\w:-]+>|\[[A-Z_]+\])\s*\Z")


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands between `open` and `close`; the answer is behind. Space does not matter.

    Attributes:
        lead: what an answer without reasoning begins with, as in channels; else "".
        key: what the template calls the reasoning of a message; None: it reads none.
    """

    open: str
    close: str
    lead: str = ""
    key: str | None = None

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.open, self.close, self.lead)

    def opened_by(self, prompt: str) -> bool:
        """Whether answers to a prompt begin inside the reasoning."""
        return prompt.rstrip().endswith(self.open)

    def as_dict(self) -> dict[str, str | None]:
        return {"opens": self.open, "closes": self.close, "key": self.key}


@dataclass(frozen=True)
class ReasoningSupport:
    """How a model writes its reasoning, or the reason why that is not known.

    Attributes:
        switch: the template's variable that turns reasoning on and off; None: it has none.
        takes_effort: the template reads ``reasoning_effort``.
    """

    format: ReasoningFormat | None
    reason: str
    switch: str | None = None
    takes_effort: bool = False

    def as_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else self.format.as_dict()
        told = {"switch": self.switch, "takes_effort": self.takes_effort}
        return {"enabled": self.format is not None, "why": self.reason, "format": shown} | told


def probe_reasoning(render: Render) -> ReasoningSupport:
    """Derive the format of reasoning from a model's chat template."""
    reason = "the chat template neither writes the reasoning of earlier answers nor opens any"
    found = None
    try:
        for options in _OPTIONS:
            found = _Probe(render, options).run()
            if found is not None:
                reason = "found by probing the chat template"
                break
        switch = next((name for name in _SWITCHES if _reads(render, name, True, False)), None)
        effort = _reads(render, "reasoning_effort", "low", "high")
    except DeadlineError:
        return ReasoningSupport(None, "the chat template takes too long")
    return ReasoningSupport(found, reason, switch, effort)


def _reads(render: Render, name: str, *values: object) -> bool:
    """Whether prompts differ by what a variable of the template is."""
    prompts = {_Probe(render, {name: value}).prompt() for value in values}
    return None not in prompts and len(prompts) > 1


class _Probe:
    def __init__(self, render: Render, options: dict[str, Any]) -> None:
        self._render = render
        self._options = options

    def prompt(self) -> str | None:
        """None: the template takes no such options."""
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
                found = None if text is None else _around(text, prompt, opened)
                if found is not None:
                    lead = self._lead(plain, prompt.rstrip().removesuffix(opened), found[0])
                    return ReasoningFormat(*found, lead, key)
        empty = _EMPTY.fullmatch(self._lead(plain, prompt, _ANSWERED))
        tag = f"{empty[1]}{empty['name']}{empty[3]}" if empty else "" if opened in plain else opened
        return ReasoningFormat(tag, f"{tag[0]}/{tag[1:]}") if tag else None

    def _opened(self, prompt: str, plain: str) -> str:
        """The tag at the end of a prompt that is not the beginning of an answer's turn; else ""."""
        found = _TAG.search(prompt)
        if found is None:
            return ""
        # Behind an earlier question there may be a thought that was left out, as an empty one.
        turn = prompt[: found.start()].rstrip()
        return found[1] if plain.startswith(turn) else ""

    def _lead(self, plain: str, prompt: str, open: str) -> str:
        lead = plain[_departs(prompt, plain) : plain.find(_ANSWERED)].strip()
        return "" if lead.startswith(open) else lead

    def _text(self, messages: list[Message], **options: Any) -> str | None:
        try:
            return self._render(messages, **options, **self._options)
        except RequestError as error:
            if isinstance(error.__cause__, DeadlineError):
                raise error.__cause__ from None
            return None


def _around(text: str, prompt: str, opened: str) -> tuple[str, str] | None:
    """What is before a thought and between it and the answer; None: the thought is not there."""
    begin = text.find(_THOUGHT)
    end = text.find(_ANSWERED, begin + len(_THOUGHT))
    if begin < 0 or end < 0:
        return None
    open = text[_departs(prompt, text) : begin].strip() or opened
    close = text[begin + len(_THOUGHT) : end].strip()
    if _TOOL in close:  # calls before content: what closes the reasoning is the first tag
        first = _FIRST.match(close)
        close = first[0] if first else ""
    return (open, close) if open and close else None


def _departs(prompt: str, text: str) -> int:
    """Where a text goes on in another way than a prompt, but never within a tag."""
    end = common(prompt, text)
    unfinished = _UNFINISHED.search(text, 0, end)
    return unfinished.start() if unfinished else end


def _user() -> Message:
    return {"role": "user", "content": _ASKED}


def _answer() -> Message:
    return {"role": "assistant", "content": _ANSWERED}


def _thought(key: str, *, called: bool) -> list[Message]:
    """A turn with reasoning; some templates write it only while tools are being called."""
    answer = _answer() | {key: _THOUGHT}
    if not called:
        return [_user(), answer]
    function = {"name": _TOOL, "arguments": {}}
    calls = [{"id": "probe0000", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "probe0000", "name": _TOOL, "content": "7"}
    return [_user(), answer | {"tool_calls": calls}, result]
