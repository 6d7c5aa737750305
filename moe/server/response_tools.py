"""The tools of OpenAI's Responses: functions, tools with one text as input, namespaces of both.

The model sees them all as functions of one chat; `tools_by_name` knows which is which.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Tag

from moe.server.bodies import RequestBody
from moe.server.fields import Json, by_type
from moe.server.openai.tools import (
    MAX_TOOLS,
    CustomDefinition,
    Description,
    FunctionDefinition,
    function_of,
)

ToolNames = Mapping[tuple[str | None, str], str]
"""(namespace, name) of a tool -> the name that the model calls it by."""


class ResponsesTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    @property
    def chat(self) -> Json:
        return function_of(**self.model_dump(exclude={"type"}, exclude_none=True))


class ResponsesCustomTool(CustomDefinition):
    """A tool whose input is one text."""

    type: Literal["custom"]

    @property
    def chat(self) -> Json:
        return function_of(**self.function)


class ResponsesNamespace(RequestBody):
    """Tools that belong together."""

    place = "tools."

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=64)
    description: Description | None = None
    """The model reads it with each of the tools."""
    tools: Annotated[
        list[
            Annotated[
                Annotated[ResponsesTool, Tag("function")]
                | Annotated[ResponsesCustomTool, Tag("custom")],
                by_type("function", "custom"),
            ]
        ],
        Field(max_length=MAX_TOOLS),
    ]


AnyTool = Annotated[
    Annotated[ResponsesTool, Tag("function")]
    | Annotated[ResponsesCustomTool, Tag("custom")]
    | Annotated[ResponsesNamespace, Tag("namespace")],
    by_type("function", "custom", "namespace"),
]


class NamedTool(NamedTuple):
    """A tool by the name that the model calls it by.

    Attributes:
        namespace: None: it is in none.
        chat: as chats have it.
    """

    tool: ResponsesTool | ResponsesCustomTool
    namespace: str | None
    chat: Json

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, ResponsesCustomTool)


def tools_by_name(
    tools: Iterable[ResponsesTool | ResponsesCustomTool | ResponsesNamespace],
) -> tuple[dict[str, NamedTool], ToolNames]:
    """All tools that can be called: name for the model -> tool, and (namespace, name) -> that name.

    A tool keeps its own name; where several have the same, those in namespaces begin with theirs.
    Raises `ValueError` if two have the same name in the same place.
    """
    found: list[tuple[ResponsesNamespace | None, ResponsesTool | ResponsesCustomTool]] = []
    for tool in tools:
        if isinstance(tool, ResponsesNamespace):
            found += [(tool, own) for own in tool.tools]
        else:
            found.append((None, tool))
    counts = Counter(tool.name for _, tool in found)
    named, names = dict[str, NamedTool](), dict[tuple[str | None, str], str]()
    for space, tool in found:
        name, chat = tool.name, tool.chat
        if space is not None:
            if counts[name] > 1:
                name = f"{re.sub(r'[^a-zA-Z0-9_.-]', '_', space.name)}__{name}"[-64:]
            about = (space.description, chat["function"].get("description"))
            text = "\n".join(part for part in about if part)
            chat = function_of(**chat["function"] | {"name": name, "description": text or None})
        if name in named:
            raise ValueError(f"tools: {name!r} is there twice")
        own = None if space is None else space.name
        named[name] = NamedTool(tool, own, chat)
        names[own, tool.name] = name
    return named, names


def names_of(tool: Any) -> list[object]:
    """The name of a tool, or its type: of those that servers run, ``allowed_tools`` says that."""
    about = tool if isinstance(tool, dict) else {}
    return [about.get("name") or about.get("type")]
