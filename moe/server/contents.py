"""Content given in parts, in any dialect: texts are joined, images get the shape of chats.

What clients send back is read, or stands there as a line of text: a client cannot take its history
back. What the user says is read or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from moe.server.fields import Json
from moe.server.ignored import Ignored, nameable

Validator = Callable[[Any, ValidationInfo], Any]
TEXT_KINDS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IMAGE_KINDS = ("image_url", "input_image", "image")
_LABELS = {"annotations", "cache_control", "citations", "logprobs", "prompt_cache_breakpoint"}
"""Fields of parts that change nothing about them."""


def text_of(*kinds: str, labels: Collection[str] = (), between: str = "") -> Validator:
    """A validator that joins content given in parts into one text.

    Args:
        kinds: types that parts may have.
        labels: further fields that parts may have; they are ignored.
        between: the separator of two parts.
    """

    def text(content: Any, info: ValidationInfo) -> Any:
        if not isinstance(content, list):
            return content
        return between.join(_text(part, kinds, labels, info.context) for part in content)

    return text


def content_of(*kinds: str, labels: Collection[str] = ()) -> Validator:
    """As `text_of`, but content with images stays a list of parts, in the shape of OpenAI's chats.

    Images may have the shape of any dialect: ``image_url``, ``input_image`` or ``image``.
    """

    def content(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        if info.context is not None and info.data.get("role") == "tool":
            return _joined([_of_result(part, kinds, labels, info.context) for part in value], "")
        return _joined([_of_user(part, kinds, labels, info.context) for part in value], "")

    return content


def result_of(*kinds: str, labels: Collection[str] = (), between: str = "") -> Validator:
    """As `content_of`, for what a tool has returned: what cannot be read becomes a line of text,
    where unknown fields are taken; else only text is."""

    def result(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        if info.context is None:
            return between.join(_text(part, kinds, labels, None) for part in value)
        parts = [_of_result(part, kinds, labels, info.context) for part in value]
        return _joined(parts, between)

    return result


def _joined(parts: list[str | Json], between: str) -> str | list[Json]:
    """One text; or, with images among them, parts of a chat."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return between.join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _text(
    part: Any, kinds: Collection[str], labels: Collection[str], ignored: Ignored | None
) -> str:
    """The text of a part. Raises `ValueError` if it is none."""
    about = part if isinstance(part, dict) else {}
    kind = about.get("type")
    known, text = about.keys() == {"type", "text", *(about.keys() & labels)}, about.get("text")
    if ignored is not None:
        if kind == "refusal" and isinstance(about.get("refusal"), str):
            return str(about["refusal"])
        known, kinds = "text" in about, {*kinds, *TEXT_KINDS}
    if not known or not isinstance(kind, str) or kind not in kinds:
        first = next(iter(kinds)) if ignored is None else "text"
        raise ValueError(
            f'only text is supported: parts must be {{"type": "{first}", "text": ...}}'
        )
    if not isinstance(text, str):
        raise ValueError("the text of a part must be a string")
    if ignored is not None:
        more = [(key, v) for key, v in about.items() if key not in _LABELS | {"type", "text"}]
        ignored.add(*nameable((key, v) for key, v in more if key not in labels))
    return text


def _of_user(
    part: Any, kinds: Collection[str], labels: Collection[str], ignored: Ignored | None
) -> str | Json:
    """A part as a text or an image. Raises `ValueError` if it is neither."""
    if _is_image(part):
        return {"type": "image_url", "image_url": {"url": image_url(part, ignored)}}
    if ignored is not None and isinstance(part, dict):
        text = document_text(part)
        if text is not None:
            return text
    return _text(part, kinds, labels, ignored)


def _of_result(
    part: Any, kinds: Collection[str], labels: Collection[str], ignored: Ignored
) -> str | Json:
    """The same of a tool's result: what is neither becomes a line of text."""
    if not isinstance(part, dict) or part.get("type") in TEXT_KINDS:
        return _text(part, kinds, labels, ignored)
    try:
        return _of_user(part, kinds, labels, ignored)
    except ValueError:
        kind = part.get("type")
        if not isinstance(kind, str):
            raise
        ignored.add(f"content.{kind}")
        return unread(kind, part)


def unread(kind: str, part: Json) -> str:
    """The line of text that stands for what this server does not read."""
    names = (part.get(key) for key in ("title", "filename", "tool_name", "name", "query"))
    name = next((name for name in names if isinstance(name, str)), "")
    return f"[{' '.join(f'{kind} {name}'.split())[:200]}: cannot be read here]"


def document_text(part: Json) -> str | None:
    """The text of a document or search result that is given as text; None: it is not."""
    kind, source, content = part.get("type"), part.get("source"), part.get("content")
    title = part.get("title")
    if kind == "document" and isinstance(source, dict):
        content = source.get("content" if source.get("type") == "content" else "data")
        if source.get("type") not in ("text", "content"):
            return None
    elif kind != "search_result":
        return None
    elif isinstance(source, str):
        title = f"{title} ({source})"
    if isinstance(content, list):
        texts = [block.get("text") for block in content if isinstance(block, dict)]
        if not all(isinstance(text, str) for text in texts) or len(texts) < len(content):
            return None
        content = "\n".join(map(str, texts))
    if not isinstance(content, str):
        return None
    return f"{title}\n{content}" if isinstance(title, str) else content


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGE_KINDS


def image_url(part: Json, ignored: Ignored | None = None) -> str:
    """The URL of a part with an image; bytes in base64 become a data URL."""
    known = {"type", "image_url", "source", "detail", "cache_control"}
    if unknown := part.keys() - known:
        if ignored is None:
            raise ValueError(f"an image has no field {min(unknown)!r:.80}; remove it")
        ignored.add(*nameable((name, part[name]) for name in unknown - _LABELS))
    url = part.get("image_url")
    if part["type"] == "image_url" and isinstance(url, dict):
        url = url.get("url")
    if part["type"] == "image":
        source = part.get("source")
        about = source if isinstance(source, dict) else {}
        url = about.get("url")
        if about.get("type") == "base64":
            url = f"data:{about.get('media_type')};base64,{about.get('data')}"
    if not isinstance(url, str):
        raise ValueError(
            "an image must be a data URL, or a link where server.allow_image_urls allows it: in "
            "image_url.url of a chat, in image_url of a part input_image, or as the base64 or url "
            "source of a part image"
        )
    return url


Text = Annotated[str, BeforeValidator(text_of("text"))]
Content = Annotated[
    str | list[Json], BeforeValidator(content_of("text")), WithJsonSchema({"type": "string"})
]
"""A text, or parts with images."""
