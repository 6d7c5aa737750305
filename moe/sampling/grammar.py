"""Turns a structure into a grammar of llguidance; as the program of helper processes
(`moe.helper_process`), checks that it can be followed.

A schema of a few kilobytes can keep the compiler busy for hours, a grammar of many rules overflows
its stack, and ``a{900000}`` compiles at once but takes a second for each token. So each structure
is first compiled there, and some texts written by it, with less time, memory and stack than here. A
text of a schema that comes to a point where nothing may follow shows that the schema cannot be
followed.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import quote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

STEPS = 48
STEP_SECONDS = 0.02
STACK = 2**21  # threads here have four times as much
LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # up to 2 KB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # unlike a step, this has no time limit
    verbose_errors=False,
)
# As in llama.cpp: enough for pretty printing, and a model cannot write white space for ever.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"


_TEXTS, _WALK_SECONDS = 12, 0.5
"""Random texts by which a schema is tried, and most seconds of all schemas of a request."""
_TURNS = b'",:{}[]0'
"""Bytes at which a JSON text goes another way; every other byte of a random text is one of them,
where it may be."""

NOTES = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly")
    + ("writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "$vocabulary")
)
"""Keywords that only tell readers about a value."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("anyOf", "allOf", "oneOf", "not", "if", "then", "else"),
)
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems")
_OF_OBJECTS = (
    *("propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas"),
    "dependencies",
)
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_UNENFORCED = frozenset(
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template")
    + ("json-pointer", "relative-json-pointer", "regex")
)
"""Formats of JSON Schema that restrict a text, and that no grammar here has. Every other name is a
note: ``password``, ``binary``, ``path``."""
_ANY_TEXT = ("", "^", "$", ".*", "^.*")
"""Patterns that every text has."""
_DEEPEST, _TOO_DEEP = 128, "it is nested too deeply"


def grammar_of(kind: str, source: str) -> str:
    """The grammar of a structure. Raises `ValueError` if it is not valid."""
    if kind == "json_schema":
        try:
            source = json.dumps(simplified(json.loads(source)), allow_nan=False)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
        # Keywords that cannot be enforced are errors, even if the schema asks for leniency.
        return LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": False}
        )
    return grammar_from(cast(Any, kind), source)


def simplified(schema: Any, depth: int = 0) -> Any:
    """A schema without the keywords that forbid nothing: notes, and what asks for nothing.

    Raises `ValueError` where it is nested too deeply.
    """
    if depth > _DEEPEST:
        raise ValueError(_TOO_DEEP)
    if isinstance(schema, (list, tuple)):
        return [simplified(each, depth + 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in NOTES}
    for key in kept.keys() & set(_NAMED):
        if isinstance(named := kept[key], Mapping):  # a property may be called title
            kept[key] = {name: simplified(inner, depth + 1) for name, inner in named.items()}
    for key in kept.keys() & set(_INNER):
        kept[key] = simplified(kept[key], depth + 1)
    return {key: value for key, value in kept.items() if not _asks_nothing(key, value, kept)}


def moved(schema: Any, to: str) -> Any:
    """A schema whose references find what they mean where the whole is at a pointer, ``#/...``."""
    if isinstance(schema, list):
        return [moved(part, to) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {k: v if k in ("const", "enum") else moved(v, to) for k, v in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        kept["$ref"] = to + reference[1:]
    return kept


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; none where it names none, or what is no type."""
    found = schema.get("type")
    names: list[Any] = found if isinstance(found, list) else [found]
    return set(names) if all(isinstance(name, str) for name in names) else set()


def _asks_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether every value is valid by this keyword of a schema whose parts are
    `simplified`."""
    types = _types(schema)
    if types and (
        (key in _OF_ARRAYS and "array" not in types)
        or (key in _OF_OBJECTS and "object" not in types)
        or (key == "format" and "string" not in types)
    ):
        return True
    match key:
        case "format":
            return isinstance(value, str) and value not in _FORMATS | _UNENFORCED
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "propertyNames":
            return _is_open(value) or _allows_strings(value)
        case "unevaluatedProperties" | "unevaluatedItems":
            return _is_open(value)
        case "minContains" | "maxContains":
            own = schema.get("minContains") == 0 and "maxContains" not in schema
            return own or "contains" not in schema
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "dependentRequired":
            return isinstance(value, Mapping) and not any(value.values())
        case "dependentSchemas" | "dependencies":
            parts = value.values() if isinstance(value, Mapping) else [False]
            return all(_is_open(part) or part == [] for part in parts)
        case "not":
            return value is False or (isinstance(value, Mapping) and _is_open(value.get("not")))
        case "if":
            return all(_is_open(schema.get(part, True)) for part in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _is_open(value)
        case "allOf":
            return isinstance(value, list) and all(map(_is_open, value))
        case "anyOf":
            return isinstance(value, list) and any(map(_is_open, value))
    return False


def _is_open(schema: object) -> bool:
    return schema is True or schema == {}


def _allows_strings(schema: object) -> bool:
    """Return whether a schema says no more than that a value may be a text."""
    if not isinstance(schema, Mapping):
        return False
    every_text = schema.get("minLength", 0) == 0 and schema.get("pattern", "") in _ANY_TEXT
    if not every_text or schema.keys() - {"type", "minLength", "pattern"}:
        return False
    types = schema.get("type", "string")
    return "string" in (types if isinstance(types, list) else [types])


_TOO_SLOW = (
    f"a step takes more than {STEP_SECONDS:g} s of a processor; repetitions of a fixed text have "
    "to be shorter"
)
_NO_TEXT = "no text is like that"
_WORDS = (
    (rf"{_TOO_DEEP}.*", _TOO_DEEP),
    (r"Out of range float.*", "a number in it is too large"),
    (r"Unimplemented keys: (\[.*\])", r"Unimplemented keys: \1; leave them out"),
    (
        r"Unknown format: (.*)",
        r'the format "\1" cannot be enforced; leave it out, or say it by a pattern',
    ),
    (r"Invalid type: (.*)", r"Invalid type: \1"),
    (r"Unsatisfiable schema: required property '(.*?)'.*", rf"{_NO_TEXT}: '\1' has no value"),
    (r"Unsatisfiable schema.*", _NO_TEXT),
    (r"oneOf constraints.*", "choices of oneOf that overlap cannot be enforced; use anyOf"),
    (r"Pointer '(.*?)' does not exist.*", r"$ref leads to '\1', which is not there"),
    (r"regex parse error.*look-around.*", "a pattern has look-around, which cannot be enforced"),
    (r"regex parse error.*", "a pattern is no regular expression that can be enforced"),
    (r"Failed to generate regex for .*range.*", "bounds of a number have too many digits"),
    (r"Expected .*? for '(\w+)'.*", r"\1 has a value that it cannot have"),
    (r"(\w+) must be .*", r"\1 has a value that it cannot have"),
)
"""Errors of llguidance about a schema, and ours."""


def _in_our_words(error: str) -> str:
    """Put llguidance's message about a schema into our words."""
    for theirs, ours in _WORDS:
        if found := re.match(theirs, error, re.DOTALL):
            return found.expand(ours)
    if "etriev" in error or "$ref" in error or "://" in error:
        return "$ref leads out of the schema; put what it names under $defs"
    return "a keyword has a value that it cannot have, or is used as it cannot be enforced"


def why_not_further(error: str) -> str:
    """Put llguidance's message in the middle of a text into our words."""
    if error.startswith("NoExtension"):
        return "nothing may follow what is written"
    return "it takes too many states or steps"


def _fault(kind: str, source: str, seconds: float = _WALK_SECONDS) -> str:
    """Why a structure cannot be followed, or ""; random texts may take so many seconds."""
    is_schema = kind == "json_schema"
    try:
        grammar = grammar_of(kind, source)
    except ValueError as error:
        return _in_our_words(str(error)) if is_schema else str(error)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    why = str(matcher.get_error())
    if why.startswith("NoExtension"):
        return _NO_TEXT
    if why:
        return _in_our_words(why) if is_schema else why
    if not _is_quick(matcher.deep_copy()):
        return _TOO_SLOW
    return _dead_end_anywhere(matcher, source, seconds) if is_schema else ""


def _dead_end_anywhere(matcher: LLMatcher, source: str, seconds: float) -> str:
    """Try the schema, and objects inside it alone: random texts seldom come to those."""
    schema = simplified(json.loads(source))
    pointers = list(itertools.islice(_objects_inside(schema), _MOST_OBJECTS))
    seconds /= 1 + len(pointers)
    why = _dead_end(matcher, source, seconds)
    outer = moved(schema, "#/$defs/whole") if pointers else {}
    for pointer in pointers if not why else ():
        inner = {"$ref": f"#/$defs/whole{pointer}", "$defs": {"whole": outer}}
        with suppress(ValueError):
            grammar = grammar_of("json_schema", json.dumps(inner))
            own = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
            if own.is_error() or not any(own.compute_bitmask()):
                continue  # nothing is like that: such a property is left out
            why = why or _dead_end(own, source, seconds)
    return why


def _objects_inside(schema: object) -> Iterator[str]:
    """Pointers to the schemas inside one that may have dead ends.

    They are those that a value has to follow and nothing else: none inside an ``allOf``, nor of a
    choice that stands beside other keywords.
    """
    definitions = {
        f"#/{group}/{_escaped(name)}": part
        for group in ("$defs", "definitions")
        for name, part in _named(schema, group)
    }
    waiting, known = [("", schema)], {""}
    for pointer, at in waiting:  # which grows
        if not isinstance(at, Mapping):
            continue
        if pointer and at.keys() & _ENDS_INSIDE:
            yield pointer
        inside = [(f"{pointer}/{key}", at[key]) for key in _VALUES if key in at]
        alone = not at.keys() - _ALONE
        for key in (*_OF_VALUES, *(("anyOf", "oneOf") if alone else ())):
            parts = _named(at, key)
            inside += [(f"{pointer}/{key}/{_escaped(name)}", part) for name, part in parts]
        reference = at.get("$ref") if alone else None
        if isinstance(reference, str) and reference in definitions:
            inside.append((reference[1:], definitions[reference]))
        waiting += [(path, part) for path, part in inside if path not in known]
        known.update(path for path, _ in inside)


def _named(schema: object, key: str) -> Iterable[tuple[str, object]]:
    """The parts of a keyword by their names in a pointer."""
    parts = schema.get(key) if isinstance(schema, Mapping) else None
    if isinstance(parts, list):
        return [(str(index), part) for index, part in enumerate(parts)]
    return parts.items() if isinstance(parts, Mapping) else ()


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), errors="replace")


def _dead_end(matcher: LLMatcher, source: str, seconds: float) -> str:
    """Write random texts; a message if one comes to where nothing may follow."""
    start = time.thread_time()
    for seed in range(_TEXTS):
        noise, text, own = random.Random(seed), bytearray(), matcher.deep_copy()
        for _ in range(2 * STEPS):
            bits = int.from_bytes(own.compute_bitmask(), "little")
            if str(own.get_error()).startswith("NoExtension"):
                keywords = [key for key in _KNOWN_ENDS if f'"{key}"' in source]
                named = f" ({', '.join(keywords)})" if keywords else ""
                begun = text.decode(errors="replace")[-40:]
                return f"a text may begin as it says and cannot go on{named}: after {begun!r}"
            allowed = [byte for byte in range(256) if bits >> byte & 1]
            if not allowed or own.is_error() or time.thread_time() - start > seconds:
                break
            turns = [byte for byte in allowed if byte in _TURNS]
            text.append(noise.choice(turns if turns and noise.random() < 0.5 else allowed))
            own.consume_token(text[-1])
    return ""


_MOST_OBJECTS = 24
_ENDS_INSIDE = {"patternProperties", "allOf", "minProperties", "maxProperties"}
_VALUES = ("items", "additionalProperties")
_OF_VALUES = ("properties", "patternProperties", "prefixItems")
_ALONE = {"$ref", "anyOf", "oneOf", "type", "$defs", "definitions", "$schema", "$id"}
"""Keywords beside which a choice or a reference means what it means alone."""
_KNOWN_ENDS = ("patternProperties", "allOf", "$ref", "minProperties", "maxProperties", "pattern")
"""Keywords that are seen where texts have dead ends, the most frequent first."""


def _is_quick(matcher: LLMatcher) -> bool:
    """Write a text of random bytes; False if three of its steps take too long, or it does."""
    noise, slow, start = random.Random(0), 0, time.thread_time()
    for _ in range(STEPS):
        begun = time.thread_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        slow += time.thread_time() - begun > STEP_SECONDS
        if slow == 3 or time.thread_time() - start > STEPS * STEP_SECONDS / 4:
            return False
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed or matcher.is_error() or not matcher.consume_token(noise.choice(allowed)):
            break  # complete, or for a request to find out
    return True


def answer(request: bytes) -> bytes:
    """Kinds and sources of structures as JSON to why each cannot be followed, or "" if it can.

    In a thread, whose stack may overflow.
    """
    structures = json.loads(request)
    threading.stack_size(STACK)
    found: list[str] = []
    seconds = _WALK_SECONDS / len(structures)

    def look() -> None:
        found.extend(_fault(kind, source, seconds) for kind, source in structures)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return json.dumps(found).encode()
