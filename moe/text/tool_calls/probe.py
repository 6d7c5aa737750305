"""Finds how a model writes tool calls by probing its chat template.

The template renders an answer with calls whose names, keys and values occur nowhere else; the text
around them is what the model was taught to write. A format counts as found only if it reads what
the template writes of other calls (`moe.text.tool_calls.read_back`). No architecture is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.text.chat import REASONING_KEY, MessageDict
from moe.text.tool_calls.format import BracedBody, CallFormat, Channels, NamedBody
from moe.text.tool_calls.read_back import Answers, Render
from moe.text.tool_calls.spots import Spot, assemble, departs, locate

_ASKED, _ANSWERED, _THOUGHT = "probe question", "probe answer", "probe thought"
_TOOL = "probe_tool"
# Ids have nine letters and digits: some templates accept nothing else.
_FIRST: tuple[str, dict[str, Any]] = (
    "probe_first",
    {"key_one": "value one", "key_two": {"in": [True]}, "key_six": 31337, "key_seven": "value two"},
)
_SECOND: tuple[str, dict[str, Any]] = (
    "probe_second",
    {
        "key_three": "value three",
        "key_four": {"in": []},
        "key_five": 41337,
        "key_nine": "value six",
    },
)
_CALLS = (_FIRST, _SECOND)
# Ids with which models are taught that are given only those of calls (Kimi K2).
_BY_ID, _NUMBERED = "functions.", ":0"


class _NoFormat(Exception):
    """The format of calls is unknown; the message says why."""


@dataclass(frozen=True)
class ToolSupport:
    """The format of a model's calls, or the reason why it can be given no tools."""

    format: CallFormat | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else self.format.as_dict()
        return {"enabled": self.format is not None, "why": self.reason, "format": shown}


def probe_tools(
    render: Render, special: Collection[str], ends: Collection[str] = ()
) -> ToolSupport:
    """Derive the format of calls.

    Args:
        render: the model's chat template.
        special: texts of the tokens that an answer does not show, end tokens included.
        ends: texts of the end tokens.
    """
    try:
        made = _ToolProbe(render, special, ends).run()
        return ToolSupport(made, "found by probing the chat template")
    except _NoFormat as reason:
        return ToolSupport(None, str(reason))
    except HelperLimitError:
        return ToolSupport(None, "the chat template takes too long or too much memory")


class _ToolProbe:
    def __init__(self, render: Render, special: Collection[str], ends: Collection[str]) -> None:
        self._render = render
        self._special = special
        self._ends = ends
        self._answers = Answers(render, special, ends)
        self._ids = ""
        self._refusal: str | None = None

    def run(self) -> CallFormat:
        self._check_tools_are_shown()
        lead, end = self._plain_answer()
        unread = ""
        for made in self._candidates(lead, end):
            why = self._answers.unread(made)
            if not why:
                return made
            if made.several and not self._answers.unread(replace(made, several=False)):
                return replace(made, several=False)
            unread = unread or why
        if unread:
            raise _NoFormat(f"what the chat template writes of {unread} is not read back")
        if hidden := [token for token in self._special if token in lead]:
            raise _NoFormat(f"answers begin with {hidden[0]!r}: channels are not understood")
        raise _NoFormat(
            "the chat template does not write calls of earlier answers, or not as JSON or as "
            "tagged values" + (f" ({self._refusal})" if self._refusal else "")
        )

    def _candidates(self, lead: str, end: str) -> Iterator[CallFormat]:
        """Formats that the text around calls may mean, the likeliest first."""
        words = lead
        for token in self._special:
            words = words.replace(token, "")
        if words != lead and (made := self._on_channels(lead, end)) is not None:
            yield made
        if words != lead and any(map(str.isalnum, words)):  # a channel that is not understood
            return
        for self._ids in ("", _BY_ID):
            for as_text in (False, True):
                if as_text and self._has_notation():
                    continue
                for content in (_ANSWERED, None, ""):
                    spots = self._answer(content, as_text, lead)
                    if spots is None:
                        continue
                    text, begin, calls = spots
                    made = assemble(text, begin, calls, self._tail(text[calls[-1].end :], end))
                    made = None if made is None else self._by_id(made)
                    if made is not None:
                        yield from self._finished(made, as_text, lead)

    def _has_notation(self) -> bool:
        """Return whether the template writes arguments that are objects in a notation of its own:
        JSON in their place is nothing that the model was taught."""
        name, arguments = _FIRST
        text = self._try([_user(), _calling("", False, 1, self._ids)]) or ""
        at = text.find(name)
        spot = None if at < 0 else locate(text, at, name, arguments)
        own = at >= 0 and (spot is None or isinstance(spot.body, BracedBody))
        return own and arguments["key_one"] in text and str(arguments) not in text

    def _by_id(self, made: CallFormat) -> CallFormat | None:
        """The format if calls are written by their ids, which have names and numbers; or if the
        template makes such ids itself, which results of tools then have to repeat."""
        body = made.body
        if not self._ids:
            known = re.search(r"[\w.]*\Z", made.call_open)
            if not isinstance(body, NamedBody) or not body.number or known is None:
                return made
            return self._counted(replace(made, ids=known[0]), known[0] + _FIRST[0] + body.number)
        if not isinstance(body, NamedBody) or not body.middle.startswith(_NUMBERED):
            return None
        number, middle = _NUMBERED[:-1], body.middle.removeprefix(_NUMBERED)
        return replace(made, body=NamedBody(middle, number), ids=self._ids)

    def _counted(self, made: CallFormat, before: str) -> CallFormat:
        """The format with how the template counts calls: it puts this before their number."""
        turn = [_user(), _calling("", False, 1), _result()]
        text = self._try([*turn, *turn]) or ""
        numbers = [int(number) for number in re.findall(rf"{re.escape(before)}(\d{{1,4}})", text)]
        if not numbers:
            return made
        return replace(made, first=numbers[0], restarts=len(numbers) > 1 and len({*numbers}) == 1)

    def _check_tools_are_shown(self) -> None:
        parameters = {"type": "object", "properties": {"key_one": {"type": "string"}}}
        function = {"name": _TOOL, "description": "Probes.", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        text = self._try([_user()], tools=tools, add_generation_prompt=True)
        if text is None or _TOOL not in text:
            raise _NoFormat("the chat template does not tell the model about tools")

    def _plain_answer(self) -> tuple[str, str]:
        """The texts that the template puts before and after the text of an answer."""
        text = self._try([_user(), {"role": "assistant", "content": _ANSWERED}])
        begin = -1 if text is None else text.rfind(_ANSWERED)
        if text is None or begin < 0:
            raise _NoFormat("the chat template does not write answers")
        lead = text[self._prompt_end(text) : begin]
        return lead, text[begin + len(_ANSWERED) :]

    def _on_channels(self, lead: str, end: str) -> CallFormat | None:
        """The format of an answer of messages on channels; None if it is none.

        The model writes the recipient behind the channel, where templates may write it before.
        """
        tokens = sorted(self._special, key=len, reverse=True)
        token = "|".join(map(re.escape, tokens))
        plain = re.fullmatch(rf"({token})(\w+)({token})", lead.strip())
        if plain is None:
            return None
        channel, _, message = plain.groups()
        for as_text in (False, True):
            text = self._try([_user(), _calling(None, as_text, 1)])
            text = text or self._try([_user(), _calling("", as_text, 1)])
            spot = None if text is None else locate(text, 0, *_FIRST)
            if text is None or spot is None or not isinstance(spot.body, NamedBody):
                continue
            before = text[: spot.begin]
            found = re.search(rf"(?P<start>{token})\w*\s(?P<to>to=[\w.]*)\Z", before)
            how = re.fullmatch(
                rf"\s*{re.escape(channel)}(\w+)\s*(?:{token})?\s*(\w*){re.escape(message)}",
                spot.body.middle,
            )
            if found is None or how is None:
                continue
            asked = text[text.find(_ASKED) + len(_ASKED) :]
            ends = [re.match(token, tail.lstrip()) for tail in (text[spot.end :], end, asked)]
            channels = Channels(
                found["start"],
                channel,
                message,
                tuple(dict.fromkeys(each[0] for each in ends if each is not None)),
                found["to"],
                self._thought_channel(channel, message),
            )
            body = NamedBody(f" {how[2]}{message}")
            opened = f"{channel}{how[1]} {found['to']}"
            made = CallFormat(body, call_open=opened, several=False, channels=channels)
            content = None if self._try([_user(), _calling(None, as_text, 1)]) else ""
            return replace(made, arguments_as_text=as_text, no_content=content)
        return None

    def _thought_channel(self, channel: str, message: str) -> str:
        """The channel on which the template writes reasoning; "" if it writes none."""
        for key in (REASONING_KEY, "thinking", "reasoning"):
            answer = {"role": "assistant", "content": _ANSWERED, key: _THOUGHT}
            text = self._try([_user(), answer]) or ""
            found = re.search(rf"{re.escape(channel)}(\w+){re.escape(message)}{_THOUGHT}", text)
            if found is not None:
                return found[1]
        return ""

    def _prompt_end(self, text: str) -> int:
        """Find the end of the prompt in the text of a conversation."""
        prompt = self._try([_user()], add_generation_prompt=True) or ""
        return departs(prompt, text)

    def _answer(
        self, content: str | None, as_text: bool, lead: str
    ) -> tuple[str, int, Sequence[Spot]] | None:
        """An answer with two calls, else with one: the text, where the answer begins, the calls."""
        for count in (2, 1):
            text = self._try([_user(), _calling(content, as_text, count, self._ids)])
            if text is None:
                continue
            begin = self._prompt_end(text)
            if content:
                if (found := text.rfind(content)) < 0:
                    return None
                begin = found + len(content)
            elif text.startswith(lead, begin):
                begin += len(lead)
            calls: list[Spot] = []
            for name, arguments in _CALLS[:count]:
                spot = locate(text, calls[-1].end if calls else begin, name, arguments)
                if spot is None:
                    break
                calls.append(spot)
            if len(calls) == count:
                return text, begin, calls
        return None

    def _tail(self, tail: str, end: str) -> str:
        """The text after the last call, without the text that ends every answer."""
        known = set(self._ends)
        if end and tail.endswith(end):
            tail = tail[: -len(end)]
        else:
            known |= {token for token in self._special if token in end or token == tail.strip()}
        ends = [tail.find(token) for token in known]
        return tail[: min((at for at in ends if at >= 0), default=len(tail))]

    def _finished(self, made: CallFormat, as_text: bool, lead: str) -> Iterator[CallFormat]:
        """The format with what the template may accept as the content of an answer without text."""
        for content in (None, ""):
            spots = self._answer(content, as_text, lead)
            if spots is not None and "None" not in spots[0][spots[1] : spots[2][0].begin]:
                yield replace(made, arguments_as_text=as_text, no_content=content)

    def _try(self, messages: Sequence[MessageDict], **options: Any) -> str | None:
        calling = any(message.get("tool_calls") for message in messages)
        try:
            text = self._render(messages, **options)
        except RequestError as error:
            if isinstance(error.__cause__, HelperLimitError):
                raise error.__cause__ from None
            if calling and self._refusal is None:
                self._refusal = f"{error!s:.200}"
            return None
        if calling:  # what else it refuses is no reason
            self._refusal = ""
        return text


def _user() -> MessageDict:
    return {"role": "user", "content": _ASKED}


def _result() -> MessageDict:
    return {"role": "tool", "tool_call_id": "probe0000", "name": _FIRST[0], "content": "7"}


def _calling(content: str | None, as_text: bool, count: int, ids: str = "") -> MessageDict:
    calls = [
        {
            "id": f"{ids}{_CALLS[index][0]}{_NUMBERED}" if ids else f"probe000{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else dict(given)},
        }
        for index, (name, given) in enumerate(_CALLS[:count])
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}
