"""Reads the types of values from a JSON schema, with references inside a tool's schema followed.

Schemas are clients' own, so each function looks at a bounded number of their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from moe.errors import RequestError

ABOUT = {"description", "title", "default", "examples", "$schema", "$id", "$comment"}
"""Keys that do not say which values are valid."""
_MOST_STEPS, _MOST_PARTS, _MOST_CHOICES = 8, 16, 64
_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
_JSON_TYPES |= {dict: "object", type(None): "null"}


def resolved(schema: object, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with its ``$ref`` and ``allOf`` replaced by what they stand for.

    Args:
        whole: what references are relative to.

    Returns:
        Still with ``$ref`` or ``allOf`` if one leads nowhere, or says something else of a key.
    """
    made = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(_MOST_STEPS):
        key = next((key for key in ("$ref", "allOf") if key in made), None)
        if key is None:
            break
        parts = [_found(made[key], whole)] if key == "$ref" else made[key]
        merged = {name: value for name, value in made.items() if name != key}
        if not isinstance(parts, list) or len(parts) > _MOST_PARTS:
            break
        if not all(isinstance(part, Mapping) and _merge(merged, part) for part in parts):
            break
        made = merged
    return made


def types_of(schema: object, whole: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows; empty if it names none. References are relative to `whole`."""
    types: set[str] = set()
    waiting = [schema]
    for _ in range(_MOST_CHOICES):
        if not waiting:
            break
        one = resolved(waiting.pop(), whole)
        said = one.get("type")
        own = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        choices = [one[key] for key in ("anyOf", "oneOf") if isinstance(one.get(key), list)]
        if not own and not choices:
            values = one.get("enum", [one["const"]] if "const" in one else [])
            own = [_JSON_TYPES.get(type(v)) for v in values] if isinstance(values, list) else []
        types |= {name for name in own if isinstance(name, str)}
        waiting += [choice for group in choices for choice in group]
    return types


def unsaid(what: str) -> RequestError:
    """The error for a part of a tool's schema that the grammar of its calls cannot express."""
    return RequestError(
        f"tools: {what} cannot be enforced in the way this model writes calls; leave out strict "
        "and tool_choice"
    )


def _found(reference: object, whole: Mapping[str, Any]) -> object:
    """Follow a JSON pointer; None: it leads to nothing, or is no pointer into this schema."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    at: object = whole
    for name in unquote(reference).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = dict(zip(map(str, range(len(at))), at, strict=True))
        at = at.get(key) if isinstance(at, Mapping) else None
    return at


def _merge(into: dict[str, Any], part: Mapping[str, Any]) -> bool:
    """Add the keys of a part; False: both say something of a key, and not the same."""
    for key, value in part.items():
        if into.setdefault(key, value) != value and key not in ABOUT:
            return False
    return True
