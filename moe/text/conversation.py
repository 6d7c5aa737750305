"""No message is lost: `render_whole` puts a conversation as the chat template writes all of it.

Templates know some roles and orders. Of the rest, some refuse and some leave out without a word: a
`developer` message, or a system message that is not the first. Others give such an instruction
another place, and so does this: the first of `_ARRANGEMENTS` is taken that the template writes
whole. What no arrangement saves is refused, never lost.

Texts are looked for in the prompt in their order, in one pass. Where that does not find one (a
template may trim, escape, or move it) or proves nothing (a short text is found anywhere), the
template renders the conversation once more with a mark in the place of each text: what it writes
then does not depend on how it writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.text.chat import MessageDict, TemplateSyntaxFault

Messages = list[MessageDict]
_PROVES_NOTHING = 8
"""Characters of texts that are too short for a find to prove anything."""
_MARK = re.compile(r"moe(\d{8})mark", re.IGNORECASE)
_GAP = "\n\n"


def render_whole(
    render: Callable[..., str], messages: Sequence[MessageDict], source: str, **options: Any
) -> str:
    """Render a conversation such that the text of every message is in the prompt.

    A `developer` message is a system message where the template does not mention that role. System
    messages that the template refuses or leaves out are joined to the leading one, or given as the
    user's in their place. Neighbours of one role are joined where turns have to alternate. Text
    beside an answer's tool calls becomes an answer of its own where the
    template writes either; it may be left out where that is refused.

    Args:
        render: `moe.text.chat.render` for a tokenizer.
        source: the chat template.
        **options: of `moe.text.chat.render`.

    Raises:
        RequestError: the template refuses the messages in every arrangement, or leaves one out.
    """
    given = list(messages) if "developer" in source else _developers_as_system(messages)
    refusal: RequestError | None = None
    fewest_lost: list[int] = []
    for arrange in _arrangements(given):
        arranged = arrange(given)
        try:
            text = render(arranged, **options)
        except RequestError as error:
            if isinstance(error.__cause__, HelperLimitError | TemplateSyntaxFault):
                raise
            refusal = refusal or error
            continue
        lost = _lost(render, given, arrange, text, options)
        if not lost:
            return text
        if all(given[at].get("tool_calls") for at in lost):
            return _with_calls_apart(render, given, arrange, options) or text
        fewest_lost = min(fewest_lost or lost, lost, key=len)
    if not fewest_lost:
        assert refusal is not None
        raise refusal
    position = fewest_lost[0]
    role = messages[position].get("role")
    raise RequestError(
        f"chat message {position} has role {role!r:.80}, and the model's chat template leaves it "
        "out of the prompt; give it a role that the template writes there, or do not send it"
    )


def _with_calls_apart(
    render: Callable[..., str],
    messages: Messages,
    arrange: Callable[[Messages], Messages],
    options: dict[str, Any],
) -> str | None:
    """The prompt with texts beside calls as answers of their own; None: not whole either."""

    def apart(given: Messages) -> Messages:
        return list(_calls_apart(arrange(given)))

    try:
        text = render(apart(messages), **options)
    except RequestError:
        return None
    return None if _lost(render, messages, apart, text, options) else text


def _lost(
    render: Callable[..., str],
    messages: Messages,
    arrange: Callable[[Messages], Messages],
    text: str,
    options: dict[str, Any],
) -> list[int]:
    """Positions of the messages that the template has left out of a prompt.

    Args:
        text: the prompt, of the arranged messages.
    """
    if _shows(text, arrange(messages)):
        return []
    marked = [_marked(message, at) for at, message in enumerate(messages)]
    try:
        written = render(arrange(marked), **options)
    except RequestError:  # the template reads texts, and takes none but those
        return []
    found = {int(mark) for mark in _MARK.findall(written)}
    return [at for at, message in enumerate(messages) if _texts(message) and at not in found]


def _shows(text: str, messages: Messages) -> bool:
    """Return whether a prompt shows all texts in their order; False also where a find proves
    nothing."""
    at = 0
    for message in messages:
        for said in _texts(message):
            found = text.find(said, at)
            if found < 0 or len(said) < _PROVES_NOTHING:
                return False
            at = found + len(said)
    return True


def _texts(message: MessageDict) -> list[str]:
    """The texts of a message that have letters, without the space around them."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts)
    return [said for text in texts if isinstance(text, str) and (said := text.strip())]


def _marked(message: MessageDict, at: int) -> MessageDict:
    """A message with a mark in the place of each text, which is JSON where the text may be."""
    mark = f"moe{at:08}mark"

    def marking(text: Any) -> Any:
        said = text.strip() if isinstance(text, str) else ""
        if said.startswith("{"):
            return f'{{"value": "{mark}"}}'
        return f'["{mark}"]' if said.startswith("[") else mark if said else text

    content = message.get("content")
    if isinstance(content, list):
        made: object = [p | {"text": marking(p["text"])} if "text" in p else p for p in content]
    else:
        made = marking(content)
    return {**message, "content": made}


def _arrangements(messages: Messages) -> Iterator[Callable[[Messages], Messages]]:
    """The ways to put these messages that differ, from the least change to the largest."""
    tried: list[Messages] = []
    for arrange in _ARRANGEMENTS:
        made = arrange(messages)
        if made and made not in tried:
            tried.append(made)
            yield arrange


def _as_given(messages: Messages) -> Messages:
    return messages


def _developers_as_system(messages: Sequence[MessageDict]) -> Messages:
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def _later_as_users(messages: Messages) -> Messages:
    """Leading system messages as one, and later ones as the user's, where they stand."""
    lead, rest = _leading(_developers_as_system(messages))
    return [*_joined(lead), *_as_users(rest)]


def _all_in_front(messages: Messages) -> Messages:
    """All system messages as one, in front."""
    plain = _developers_as_system(messages)
    system = [message for message in plain if message.get("role") == "system"]
    return [*_joined(system), *(message for message in plain if message.get("role") != "system")]


def _all_as_users(messages: Messages) -> Messages:
    return _as_users(_developers_as_system(messages))


def _all_in_front_as_users(messages: Messages) -> Messages:
    return _as_users(_all_in_front(messages))


def _in_turns(messages: Messages) -> Messages:
    return _neighbours_joined(_later_as_users(messages))


def _in_turns_of_users(messages: Messages) -> Messages:
    return _neighbours_joined(_all_in_front_as_users(messages))


_ARRANGEMENTS = (
    *(_as_given, _developers_as_system, _later_as_users),
    *(_all_in_front, _all_as_users, _all_in_front_as_users),
    *(_in_turns, _in_turns_of_users),
)


def _neighbours_joined(messages: Messages) -> Messages:
    """Messages of the user, and answers without calls, joined to their like beside them: templates
    may want turns to alternate."""
    made: Messages = []
    for message in messages:
        if made and _is_plain(message) and _is_plain(made[-1], message):
            made[-1:] = _joined([made[-1], message])
        else:
            made.append(message)
    return made


def _is_plain(message: MessageDict, like: MessageDict | None = None) -> bool:
    role = message.get("role")
    same = like is None or (role, message.get("name")) == (like.get("role"), like.get("name"))
    return same and role in ("user", "assistant") and not message.get("tool_calls")


def _leading(messages: Messages) -> tuple[Messages, Messages]:
    """The system messages that a conversation begins with, and the rest."""
    roles = (message.get("role") for message in messages)
    at = next((at for at, role in enumerate(roles) if role != "system"), len(messages))
    return messages[:at], messages[at:]


def _as_users(messages: Messages) -> Messages:
    """Messages with the system's as the user's, joined to the user's beside them: templates may
    want turns to alternate."""
    made: Messages = []
    spoken = ("user", "system")
    for by_user, run in groupby(_behind_results(messages), lambda m: m.get("role") in spoken):
        turns = list(run)
        if by_user and any(turn.get("role") == "system" for turn in turns):
            turns = _joined([{**turn, "role": "user"} for turn in turns])
        made += turns
    return made


def _behind_results(messages: Messages) -> Messages:
    """Messages with no system message between calls and their results."""
    made: Messages = []
    waiting: Messages = []
    for message in messages:
        role = message.get("role")
        if role == "system":
            waiting.append(message)
            continue
        if role != "tool":
            made += waiting
            waiting = []
        made.append(message)
    return made + waiting


def _joined(messages: Messages) -> Messages:
    """Messages of one role as one message."""
    if len(messages) < 2:
        return messages
    contents = [message.get("content") for message in messages]
    if all(isinstance(content, str) for content in contents):
        joined: object = _GAP.join(filter(None, contents))
    else:
        joined = list(_parts(contents))
    return [{**messages[0], "content": joined}]


def _parts(contents: Iterable[Any]) -> Iterator[MessageDict]:
    for number, content in enumerate(contents):
        if number:
            yield {"type": "text", "text": _GAP}
        yield from content if isinstance(content, list) else [{"type": "text", "text": content}]


def _calls_apart(messages: Iterable[MessageDict]) -> Iterator[MessageDict]:
    """Messages whose text beside calls is an answer of its own, with the reasoning before it."""
    for message in messages:
        if not (message.get("tool_calls") and _texts(message)):
            yield message
            continue
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        kept = ("role", "name", "tool_calls")
        calls = {name: message[name] for name in kept if name in message}
        yield {**calls, "content": None}
