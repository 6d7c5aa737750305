"""Fields of OpenAI's API that nothing here can honour. Only values that ask for nothing pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

Neutral = dict[str, tuple[object, ...]]

NEUTRAL_CHAT: Neutral = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_COMPLETIONS: Neutral = {"best_of": (1,), "suffix": ("",)}
NEUTRAL_RESPONSES: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
NEUTRAL_MESSAGES: Neutral = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}
_STATELESS = ": the server keeps no answers, so send the whole conversation"
_REASONS = {
    "background": ": the server keeps no answers; leave it out, or stream",
    "conversation": _STATELESS,
    "mcp_servers": ": the client runs all tools",
    "max_tool_calls": ": it is of tools that a server runs, and this one runs none",
    "previous_response_id": _STATELESS,
    "thread": _STATELESS,
}
# Anthropic's client then goes on without.
CODES = {"thread": "thread_unsupported_request"}


def supported(body: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """The body without the fields of `neutral`; raises where one of them asks for something."""
    for name in body.keys() & neutral.keys():
        value = body[name]
        if not any(type(value) is type(n) and value == n for n in neutral[name]):
            about = {"name": name, "why": _REASONS.get(name, "")}
            raise PydanticCustomError("not_supported", "{name} is not supported{why}", about)
    return {name: value for name, value in body.items() if name not in neutral}
