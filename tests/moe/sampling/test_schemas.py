"""Schemas as others write them: what asks for nothing is dropped, dead ends are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe.errors import RequestError, StructureError
from moe.sampling import grammar
from moe.sampling.constraint import Structures
from moe.sampling.grammar import simplified
from moe.sampling.params import Structure
from moe.text.tokenizer import TextCodec, load_tokenizer
from tests.moe.sampling.test_constraint import ENDS, MODEL, VOCAB, make
from tests.moe.sampling.test_schema_suite import takes, written

INTEGERS = {"type": "array", "items": {"type": "integer"}}
OBJECT = {"type": "object", "additionalProperties": {"type": "integer"}}
TEXT = {"type": "string"}
LEAF: list[Any] = [
    (INTEGERS, {"uniqueItems": False}),
    (INTEGERS | {"maxItems": 1}, {"uniqueItems": True}),
    (TEXT, {"uniqueItems": True}),
    (OBJECT, {"propertyNames": {"type": "string"}}),
    (OBJECT, {"propertyNames": {"type": ["string", "null"], "description": "a name"}}),
    (OBJECT, {"propertyNames": {}}),
    (OBJECT, {"propertyNames": {"minLength": 0}}),
    (OBJECT, {"propertyNames": {"type": "string", "pattern": ".*"}}),
    (OBJECT, {"propertyNames": True}),
    (INTEGERS, {"propertyNames": {"pattern": "^a"}}),
    (OBJECT, {"unevaluatedProperties": True}),
    (OBJECT, {"unevaluatedProperties": {"title": "any"}}),
    (INTEGERS, {"unevaluatedItems": {}}),
    (INTEGERS, {"unevaluatedProperties": False}),
    (OBJECT, {"dependentRequired": {}}),
    (OBJECT, {"dependentRequired": {"a": []}}),
    (OBJECT, {"dependentSchemas": {"a": True, "b": {}}}),
    (OBJECT, {"dependencies": {"a": [], "b": {}}}),
    (TEXT, {"not": False}),
    (TEXT, {"not": {"not": {}}}),
    (TEXT, {"then": {"minLength": 3}, "else": False}),
    (TEXT, {"if": {"minLength": 3}}),
    (TEXT, {"if": {"minLength": 3}, "then": True, "else": {"description": "shorter"}}),
    (INTEGERS, {"minContains": 0}),
    (INTEGERS, {"maxContains": 3}),
    (INTEGERS, {"contains": {"const": 1}, "minContains": 0}),
    (TEXT, {"contains": {"const": 1}}),
    (TEXT, {"allOf": [{}, True, {"title": "x"}]}),
    (TEXT, {"anyOf": [{"minLength": 9}, {}]}),
    (TEXT, {"contentMediaType": "text/html", "contentEncoding": "base64", "contentSchema": {}}),
    (TEXT, {"deprecated": True, "readOnly": True, "writeOnly": False, "$comment": "x"}),
    *(
        (TEXT, {"format": name})
        for name in ("password", "binary", "byte", "path", "json-string", "emoji", "x y", "")
    ),
    ({"type": "integer"}, {"format": "int64"}),
    ({"type": ["integer", "null"]}, {"format": "date"}),
]


@pytest.mark.parametrize(("plain", "more"), LEAF, ids=lambda part: json.dumps(part)[:40])
def test_what_asks_for_nothing_changes_no_grammar(plain: Any, more: Any) -> None:
    def around(inner: Any) -> Any:
        return {
            "type": "object",
            "properties": {"format": inner, "not": {"anyOf": [inner, {"type": "null"}]}},
            "required": ["format"],
            "$defs": {"uniqueItems": inner},
        }

    assert simplified(plain) == plain
    assert simplified(plain | more) == plain
    assert simplified(around(plain | more)) == around(plain)
    assert grammar._fault("json_schema", json.dumps(plain | more)) == ""


def test_values_are_no_schemas() -> None:
    schema = {
        "enum": [{"uniqueItems": False, "title": "x"}],
        "const": {"description": "y", "format": "path"},
        "properties": {"a": {"const": {"then": 1}}},
    }
    assert simplified(schema) == schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (INTEGERS | {"uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]; leave them out'),
        (OBJECT | {"propertyNames": {"pattern": "^a"}}, 'Unimplemented keys: ["propertyNames"]'),
        (OBJECT | {"propertyNames": {"type": "string", "maxLength": 3}}, '["propertyNames"]'),
        (OBJECT | {"dependentRequired": {"a": ["b"]}}, 'keys: ["dependentRequired"]'),
        (TEXT | {"not": {}}, 'keys: ["not"]'),
        (TEXT | {"if": {"minLength": 3}, "then": {"maxLength": 5}}, 'keys: ["if", "then"]'),
        (INTEGERS | {"contains": {"const": 1}, "minContains": 2}, '["contains", "minContains"]'),
        (TEXT | {"format": "idn-email"}, 'the format "idn-email" cannot be enforced; leave it out'),
        (TEXT | {"pattern": "(?=a)b"}, "a pattern has look-around, which cannot be enforced"),
        (TEXT | {"pattern": "["}, "a pattern is no regular expression that can be enforced"),
        (TEXT | {"minLength": -1}, "minLength has a value that it cannot have"),
        ({"properties": 3}, "properties has a value that it cannot have"),
        ({"type": 3}, "type has a value that it cannot have"),
        ({"multipleOf": 0}, "a keyword has a value that it cannot have"),
        ({"enum": []}, "no text is like that"),
        ({"const": 1, "type": "string"}, "no text is like that"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' has no value"),
        ({"$ref": "#/definitions/x"}, "$ref leads to '/definitions/x', which is not there"),
        ({"$ref": "other.json"}, "$ref leads out of the schema; put what it names under $defs"),
        ({"type": "integer", "minimum": -(10**40), "maximum": 10**40}, "too many digits"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "choices of oneOf that overlap"),
        ({"const": float("inf")}, "a number in it is too large"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_our_words(schema: Any, why: str) -> None:
    found = grammar._fault("json_schema", json.dumps(schema))
    assert why in found
    assert not re.search(r"regex parse|Unsatisf|NoExt|non-verbose|lexer|guidance|_|\n", found)


@pytest.mark.parametrize("depth", [40, 1000, 30000])
def test_schemas_that_are_nested_too_deeply_are_refused(depth: int) -> None:
    schema = '{"type":"array","items":' * depth + "{}" + "}" * depth
    why = grammar._fault("json_schema", schema)
    assert why == ("" if depth < 128 else "it is nested too deeply")


CLOSED = {"type": "object", "additionalProperties": False}
INTEGER = {"type": "integer"}
DEAD: dict[str, dict[str, Any]] = {
    "one name": {"properties": {"a": INTEGER}, "patternProperties": {"^a$": INTEGER}},
    "a required one": {
        "properties": {"ab": INTEGER},
        "required": ["ab"],
        "patternProperties": {"^ab$": {}},
    },
    "two": {
        "properties": {"a": INTEGER, "b": INTEGER},
        "patternProperties": {"^(a|b)$": INTEGER},
    },
    "two patterns": {
        "properties": {"x": INTEGER, "y": {"type": "null"}},
        "patternProperties": {"^x$": {}, "^[y]$": {}},
        "required": ["x"],
    },
}


MANY = {f"name{i}": {"type": "string"} for i in range(9)}
AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda dead: dead,
    "required": lambda dead: {"type": "object", "properties": {"x": dead}, "required": ["x"]},
    "among many": lambda dead: {"type": "object", "properties": MANY | {"a/b ~%": dead}},
    "deep": lambda dead: {"type": "object", "properties": {"x": AROUND["among many"](dead)}},
    "in a list": lambda dead: {
        "type": "object",
        "properties": {"x": {"items": AROUND["deep"](dead)}},
    },
    "in any property": lambda dead: {"additionalProperties": AROUND["deep"](dead)},
    "in a choice": lambda dead: {
        "properties": {"x": {"anyOf": [{"type": "null"}, AROUND["deep"](dead)]}}
    },
    "referred to": lambda dead: {
        "properties": {"x": {"$ref": "#/$defs/some%20node"}},
        "$defs": {"some node": AROUND["deep"](dead)},
    },
    "in a tree": lambda dead: {
        "$ref": "#/definitions/node",
        "definitions": {
            "node": {"properties": {"next": {"$ref": "#/definitions/node"}, "x": dead}}
        },
    },
}


@pytest.mark.parametrize(
    ("name", "around"),
    [*((name, "alone") for name in DEAD), *(("one name", around) for around in AROUND)],
)
def test_dead_ends_are_refused_by_name(name: str, around: str) -> None:
    schema = AROUND[around](CLOSED | DEAD[name])
    why = grammar._fault("json_schema", json.dumps(schema))
    assert re.match(r"a text may begin as it says and cannot go on \(patternProperties[),]", why)


@pytest.mark.parametrize(
    "more",
    [
        {"properties": {"score": INTEGER}},
        {"properties": {"score": INTEGER}, "patternProperties": {"^s": INTEGER}},
        {"patternProperties": {"^(a|b)$": INTEGER}},
    ],
)
def test_schemas_without_dead_ends_pass(more: Any) -> None:
    for around in ("alone", "in a tree"):
        schema = AROUND[around](CLOSED | more)
        assert grammar._fault("json_schema", json.dumps(schema)) == ""
    for seed in range(20):
        written(CLOSED | more, seed)


def test_parts_that_no_value_has_to_follow_are_not_tried() -> None:
    impossible = CLOSED | {"required": ["b"], "patternProperties": {"^a$": INTEGER}}
    for schema in (
        {"type": "object", "properties": {"x": impossible}},
        {"type": "object", "$defs": {"never used": CLOSED | DEAD["one name"]}},
    ):
        assert grammar._fault("json_schema", json.dumps(schema)) == ""


def test_names_of_zod_and_pydantic() -> None:
    record = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string", "format": "password", "writeOnly": True},
    }
    assert takes(record, {"a": "x"})
    assert not takes(record, {"a": 1})


@pytest.fixture(scope="module")
def structures() -> Structures:
    return Structures(TextCodec(load_tokenizer(MODEL)[0], 4096, ENDS), VOCAB)


def test_a_tool_with_a_dead_end_is_named(structures: Structures) -> None:
    schema = Structure.json_schema(CLOSED | DEAD["one name"])
    whole = Structure.grammar(
        'start: "call " %json {"type": "object"}', [("tools: the schema of 'f'", schema)]
    )
    with pytest.raises(RequestError, match="tools: the schema of 'f' cannot be followed: a text"):
        structures.check(whole)


def test_an_error_in_the_middle_of_a_text_is_in_our_words(structures: Structures) -> None:
    sampler = make(structures, Structure.json_schema(CLOSED | DEAD["one name"]))
    text = structures._codec.require_tokenizer("").encode('{"a":9, ')
    sampler.replay(text)
    with pytest.raises(StructureError) as found:
        sampler.sample(torch.zeros(VOCAB))
    assert str(found.value) == (
        "the structure cannot be followed any further: nothing may follow what is written; "
        "make it simpler"
    )


@pytest.mark.parametrize("kind", [[[]], [{}], [None], {}, 5, None])
def test_what_is_no_type_is_left_to_the_grammar(kind: object) -> None:
    schema = {"type": "object", "properties": {"a": {"type": kind, "format": "x-note"}}}
    assert simplified(schema)["properties"]["a"] == {"type": kind}
