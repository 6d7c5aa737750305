"""Chat templates: programs that come with a model and turn messages into text.

`check_message` checks a message; `with_calls` and `with_reasoning` write its tool calls and its
reasoning as the template reads them; `render` runs the template.

transformers runs them in jinja2's immutable sandbox, in helper processes (`moe.text.renderer`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.errors import BusyError, RequestError
from moe.helpers import HelperLimitError, Helpers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe.text.tool_calls.format import CallFormat

MessageDict = dict[str, Any]
RENDERERS = Helpers(
    Path(__file__).with_name("renderer.py"),
    memory=2**30,
    seconds=5,
    most_bytes=2**26,
    kept=2,  # 60 MB each
)
REASONING_KEY = "reasoning_content"
"""The key of a message's reasoning, before `with_reasoning` renames it for the template."""
_TEMPLATE_NAMES = {"raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token"} | {
    *("unk_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens"),
    *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop"),
}
"""Variables that transformers and jinja2 put into every template."""


class TemplateSyntaxFault(ValueError):
    """A template cannot be read, whatever the messages; the message says the line and why."""


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[MessageDict], **options: Any
) -> str:
    """Render messages as text with the tokenizer's chat template.

    Args:
        **options: ``tools``, ``add_generation_prompt`` and ``continue_final_message`` of
            `apply_chat_template`, and further variables for the template.

    Raises:
        RequestError: the template cannot be read, refused the messages, or (with
            `HelperLimitError` as the cause) needed too much time or memory.
        BusyError: the machine has no process for it.
    """
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    try:
        if own is not PreTrainedTokenizerBase.apply_chat_template:  # transformers' code, no jinja
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        return _render(tokenizer, list(messages), options)
    except BusyError:
        raise
    except HelperLimitError as error:
        raise RequestError(
            f"the model's chat template {error}; send fewer or shorter messages"
        ) from error
    except TemplateSyntaxFault as error:
        raise RequestError(
            f"the model's chat template cannot be read: {error}; mend it where the model's files "
            "are (chat_template.jinja or tokenizer_config.json)"
        ) from error
    except Exception as error:  # a template may fail in any way a program can
        raise RequestError(
            f"the model's chat template refused the messages: {error!s:.300}; "
            "check their roles and order"
        ) from error


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[MessageDict], options: Mapping[str, Any]
) -> str:
    """Render a conversation as ``tokenizer.apply_chat_template(messages, tokenize=False,
    **options)``."""
    asked = {
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "messages": messages,
        "options": options,
    }
    answer = json.loads(RENDERERS.ask(json.dumps(asked, default=_plain).encode()))
    if "syntax" in answer:
        raise TemplateSyntaxFault(answer["syntax"])
    if "fault" in answer:
        raise ValueError(answer["fault"])
    return str(answer["text"])


def _plain(value: Any) -> Any:
    """Return an object that is no JSON as a template sees it; numbers of numpy are numbers."""
    item = getattr(value, "item", None)
    return item() if callable(item) else f"<{type(value).__name__}>"


def check_settings(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, object]) -> None:
    """Raise `RequestError` if one of these is no variable that only the template itself reads."""
    taken = {"self", "messages", "tokenizer", "conversations", *_TEMPLATE_NAMES}
    taken |= {name for name in tokenizer.special_tokens_map if isinstance(name, str)}
    taken |= inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    for name in settings:
        if name in taken or not name.isidentifier() or name.startswith("_"):
            raise RequestError(
                f"chat_template_kwargs may only set variables of the chat template itself, such as "
                f"enable_thinking; {name!r:.80} is set by the server"
            )


def check_message(position: int, message: object) -> None:
    """Raise `RequestError` unless a message has a role, and content or tool calls."""
    where = f"chat message {position}"
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} must be a mapping with role and content, got {message!r}; "
            "do not mix messages with token ids or strings"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} must have a role such as 'user', got {role!r}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"{where} must have a string as its content, got {content!r}")


def take_images(messages: Sequence[Any]) -> tuple[list[MessageDict], list[object]]:
    """Checked messages as chat templates read them, and their images in order.

    Content in parts stays a list in a message with images, where ``{"type": "image"}`` stands for
    one; else its texts are joined. What is null or an empty list is left out: templates ask whether
    it is there. Raises `RequestError`.
    """
    made, images = list[MessageDict](), list[object]()
    for position, message in enumerate(map(_without_nothing, messages)):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = [_part(position, part) for part in content]
            found = [image for _, image in parts if image is not None]
            plain: object = [part for part, _ in parts]
            if not found:
                plain = "".join(part["text"] for part, _ in parts)
            check_message(position, {**message, "content": ""})
            made.append({**message, "content": plain})
            images += found
        else:
            check_message(position, message)
            made.append(dict(message))
    return made, images


def _without_nothing(message: Any) -> Any:
    """A message without fields that say nothing; an answer without calls may have no content."""
    if not isinstance(message, Mapping):
        return message
    plain = {
        name: value
        for name, value in message.items()
        if name == "content" or not (value is None or value == [])
    }
    silent = plain.get("content") is None and not plain.get("tool_calls")
    return plain | {"content": ""} if silent and plain.get("role") == "assistant" else plain


def _part(position: int, part: object) -> tuple[MessageDict, object]:
    """A part of a message for the template, and its image; None: it is text."""
    about = part if isinstance(part, Mapping) else {}
    kind, text = about.get("type"), about.get("text")
    if kind == "text" and isinstance(text, str):
        return {"type": "text", "text": text}, None
    if kind == "image" and about.get("image") is not None:
        return {"type": "image"}, about["image"]
    if kind == "image_url":
        url = about.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if isinstance(url, str):
            return {"type": "image"}, url
    raise RequestError(
        f'chat message {position} must have parts {{"type": "text", "text": ...}}, {{"type": '
        f'"image", "image": BYTES}} or {{"type": "image_url", "image_url": {{"url": ...}}}}, got '
        f"{part!r:.200}"
    )


def with_calls(messages: Sequence[MessageDict], format: CallFormat | None) -> list[MessageDict]:
    """Messages of OpenAI's API with the arguments of tool calls as the template reads them, as JSON
    text or as an object.

    Tool results get the name of their tool, which some templates write. Without a format messages
    stay unchanged. Raises `RequestError` if arguments are not a JSON object.
    """
    if format is None:
        return list(messages)
    names: dict[object, object] = {}
    ids: dict[object, str] = {}
    made = []
    for position, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            calls = [_converted(position, call, format) for call in calls]
            names |= {call.get("id"): call["function"].get("name") for call in calls}
            first = format.first - (len(ids) if format.restarts else 0)
            calls = [_numbered(call, format, ids, first) for call in calls]
            content = message.get("content") or format.no_content
            message = message | {"tool_calls": calls, "content": content}
        elif message.get("role") == "tool" and (name := names.get(message.get("tool_call_id"))):
            given = message["tool_call_id"]
            message = {"name": name} | message | {"tool_call_id": ids.get(given, given)}
        made.append(message)
    return made


def _numbered(
    call: MessageDict, format: CallFormat, ids: dict[object, str], first: int
) -> MessageDict:
    """The call with the id that the model was taught, if the template writes such ids.

    Args:
        ids: those of earlier calls, by the client's; the call's is added.
        first: the number of a call before which there is none in `ids`.
    """
    number = getattr(format.body, "number", "")
    if not format.ids or not number:
        return call
    name = f"{format.ids}{call['function'].get('name')}"
    ids[call.get("id")] = made = f"{name}{number}{first + len(ids)}"
    return call | {"id": made}


def with_reasoning(messages: Sequence[MessageDict], key: str | None) -> list[MessageDict]:
    """Messages with reasoning under the name that the template reads; None: it reads none."""
    made = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != REASONING_KEY}
        if key is not None and message.get(REASONING_KEY):
            plain[key] = message[REASONING_KEY]
        made.append(plain)
    return made


def _converted(position: int, call: object, format: CallFormat) -> MessageDict:
    where = f"chat message {position}"
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(
            f'{where}: tool_calls must be a list of {{"id", "type", "function"}}, got {call!r:.200}'
        )
    function = dict(call["function"])
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not format.arguments_as_text:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}: the arguments of a call must be a JSON object, "
                f"got {function['arguments']!r:.200}"
            )
    elif format.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return dict(call) | {"function": function | {"arguments": arguments}}
