"""Grammars of calls: they take what templates write, and nothing that is no call."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from
from transformers import AutoConfig

from moe.errors import RequestError
from moe.sampling.constraint import Structures
from moe.sampling.grammar import simplified
from moe.sampling.params import SamplingParams, Structure
from moe.text.tokenizer import TextCodec
from moe.text.tool_calls.grammar import FREE, CallGrammar
from moe.text.tool_calls.parser import CallParser, ParsedCall
from tests.moe.text.tool_calls.templates import JSON_SHAPED, KNOWN, TAGGED
from tests.moe.text.tool_calls.test_calls import format_of, read, written

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
PLACE = {"$ref": "#/$defs/place"}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {"place": PLACE},
    "required": ["place"],
    "$defs": {"place": {"type": "object", "properties": {"at": {"enum": ["x", "y"]}}}},
}
TOOLS = {"weather": CITY, "travel": {"type": "object", "properties": {}}}
ULM = ("weather", {"city": "Ulm", "days": 3})
GO: tuple[str, dict[str, Any]] = ("travel", {})


def takes(grammar: str, text: str) -> bool:
    """Whether all of a text is what the grammar says."""
    made = grammar_from("grammar", grammar)
    matcher = LLMatcher(LLTokenizer("byte"), made, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", KNOWN)
def test_calls_that_a_template_writes_are_in_the_grammar(name: str) -> None:
    format = format_of(name)
    one = CallGrammar(format, {}).calls(TOOLS, several=False)
    many = CallGrammar(format, {}).calls(TOOLS, several=True)
    for call in (ULM, ("weather", {"city": "Ulm"}), GO):
        text = written(name, None, [call]).strip()
        assert takes(one, text)
        assert takes(many, text)
        assert not takes(many, text + "!")
        assert not takes(many, "Ok. " + text)
    if format.several:
        text = written(name, None, [ULM, GO, ULM]).strip()
        assert takes(many, text)
        assert not takes(one, text)
    for wrong in (
        ("rain", {}),
        ("weather", {"days": 3}),
        ("weather", {"city": "Ulm", "days": "x"}),
    ):
        assert not takes(many, written(name, None, [wrong]).strip())


@pytest.mark.parametrize("name", JSON_SHAPED)
def test_schemas_may_refer_to_their_own_parts(name: str) -> None:
    grammar = CallGrammar(format_of(name), {}).calls({"travel": NESTED}, several=False)
    assert takes(grammar, written(name, None, [("travel", {"place": {"at": "y"}})]).strip())
    assert not takes(grammar, written(name, None, [("travel", {"place": {"at": "z"}})]).strip())


NOTES = st.dictionaries(
    st.sampled_from(["description", "title", "default", "examples", "$comment"]),
    st.one_of(st.text(max_size=9), st.dictionaries(st.sampled_from(["title", "type"]), st.text())),
)
NAMED = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"]


@st.composite
def noted(draw: st.DrawFn, depth: int = 3) -> tuple[Any, Any]:
    """A schema, and the same with notes for readers."""
    values: Any = {"title": "kept", "description": ["kept"]}
    leaf = st.sampled_from([True, {"type": "string"}, {"const": values}, {"enum": [values]}])
    if depth == 0 or draw(st.booleans()):
        plain: Any = draw(leaf)
        return plain, plain if plain is True else {**plain, **draw(NOTES)}
    inner = draw(st.lists(noted(depth - 1), min_size=1, max_size=2))
    word = draw(st.sampled_from([*NAMED, "items", "not", "then", "anyOf", "prefixItems"]))
    if word in NAMED:  # a property may be called as notes are
        names = draw(st.permutations(["title", "description", "a"]))
        pair: Any = tuple(
            {n: each[i] for n, each in zip(names, inner, strict=False)} for i in (0, 1)
        )
    elif word in ("anyOf", "prefixItems"):
        pair = tuple([each[i] for each in inner] for i in (0, 1))
    else:
        pair = inner[0]
    return {word: pair[0]}, {**draw(NOTES), word: pair[1]}


@given(noted())
def test_what_schemas_tell_readers_does_not_count(pair: tuple[Any, Any]) -> None:
    plain, with_notes = pair
    assert simplified(with_notes) == simplified(plain)


@pytest.mark.parametrize("name", JSON_SHAPED)
@pytest.mark.parametrize(
    ("about", "child", "size"),
    [
        ({}, "#", "#/properties/size"),
        ({"$id": "https://a.b/tree"}, "#", "https://a.b/tree#/properties/size"),
        ({"$defs": {"x": {"$ref": "#"}, "y": {"enum": [1, 2]}}}, "#/$defs/x", "#/$defs/y"),
    ],
)
def test_references_are_relative_to_the_schema_of_the_arguments(
    name: str, about: dict[str, Any], child: str, size: str
) -> None:
    """Not to the object that some models write around the arguments."""
    properties = {
        "size": {"enum": [1, 2]},
        "most": {"$ref": size},
        "child": {"anyOf": [{"$ref": child}, {"type": "null"}]},
    }
    tree = {"type": "object", "properties": properties, "additionalProperties": False} | about
    grammar = CallGrammar(format_of(name), {}).calls({"grow": tree}, several=False)
    for arguments, right in (
        ({"size": 1, "most": 2}, True),
        ({"child": {"size": 1, "child": {"most": 2, "child": None}}}, True),
        ({"most": 3}, False),
        ({"child": {"name": "grow", "arguments": {}}}, False),
        ({"child": {"child": {"size": 3}}}, False),
    ):
        assert takes(grammar, written(name, None, [("grow", arguments)]).strip()) == right


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"llama"}))
def test_text_is_free_until_a_call_begins(name: str) -> None:
    format = format_of(name)
    grammar = CallGrammar(format, {}).text_or_calls(TOOLS, several=True)
    call = written(name, None, [ULM]).strip()
    for text in ("", "Hi", "Hi <", call[:3], f"Hi {call}", call):
        assert takes(grammar, text), text
    for text in (
        format.opening,
        f"Hi {format.opening}!",
        call.replace("weather", "rain"),
        call[:-9],
    ):
        assert not takes(grammar, text), text
    if format.several:
        calls = written(name, None, [ULM, GO]).strip()
        assert takes(grammar, f"Hi {calls}")
        assert not takes(grammar, f"Hi {calls[:-30]}")


@pytest.mark.parametrize("name", KNOWN)
def test_an_answer_is_of_a_form_or_calls(name: str) -> None:
    """As agents ask for it: tools in each turn, and the form of the last answer."""
    grammar, form = CallGrammar(format_of(name), {}), Structure.json_schema(CITY)
    made = grammar.answer_or_calls(form, "", TOOLS, several=True)
    call = written(name, None, [ULM]).strip()
    answer = '{"city": "Ulm"}'
    assert takes(made, call)
    assert takes(made, answer)
    for wrong in ("Ulm", f"{answer} {call}", "Well, " + call, call.replace("weather", "rain")):
        assert not takes(made, wrong)
    choice = grammar.answer_or_calls(Structure.choice(["yes", "no"]), "", TOOLS, several=True)
    assert takes(choice, "no")
    assert not takes(choice, "maybe")


@pytest.mark.parametrize("name", KNOWN)
def test_calls_of_tools_that_are_not_strict_may_have_any_arguments(name: str) -> None:
    """Beside a strict one they are in the same grammar."""
    made = CallGrammar(format_of(name), {}).calls({"weather": CITY, "f": FREE}, several=True)
    assert takes(made, written(name, None, [GO]).strip().replace("travel", "f"))
    assert takes(made, written(name, None, [("f", {"a": 1, "b": "x y"})]).strip())
    assert not takes(made, written(name, None, [("weather", {"city": "Ulm", "b": "x"})]).strip())


def test_calls_without_delimiters_cannot_be_told_from_text() -> None:
    with pytest.raises(RequestError, match="strict tools need delimiters around calls"):
        CallGrammar(format_of("llama"), {}).text_or_calls(TOOLS, several=True)


@pytest.mark.parametrize("name", JSON_SHAPED)
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "string"}]},
        {"$ref": "#/$defs/any", "$defs": {"any": {}}},
    ],
)
def test_arguments_are_an_object_whatever_a_schema_leaves_open(name: str, schema: Any) -> None:
    """Anything else would come as content, though a call was required."""
    grammar = CallGrammar(format_of(name), {}).calls({"f": schema}, several=False)
    call = written(name, None, [("f", {"a": 1})]).strip()
    assert takes(grammar, call)
    body = call.rfind("{") if call.count("{") > 1 else call.index("{")
    end = call.index("}", body) + 1
    for other in ("null", "7", '"x"', "[]"):
        assert not takes(grammar, call[:body] + other + call[end:])


def test_arguments_that_are_no_object_are_refused() -> None:
    grammar = CallGrammar(format_of("hermes"), {})
    for said in ("string", ["array", "null"]):
        with pytest.raises(RequestError, match=r"'f' must be an object.* send a schema of type"):
            grammar.calls({"f": {"type": said}}, several=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_arguments_of_too_many_levels_are_refused(name: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(199):
        deep = {"type": "array", "items": deep}
    grammar = CallGrammar(format_of(name), {})
    with pytest.raises(RequestError, match=r"'f': it is nested too deeply; send a schema with"):
        grammar.calls({"f": {"properties": {"a": deep}}}, several=False)


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"$ref": "#/$defs/Zip", "description": "Of the city."},
        "unit": {"allOf": [{"$ref": "#/$defs/Unit"}], "default": "1"},
        "yes": {"const": "true"},
        "place": {"$ref": "#/$defs/Place"},
        "tree": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "size": {"enum": [1, 2]},
        "same": {"$ref": "#/properties/zip"},
    },
    "$defs": {
        "Zip": {"type": "string"},
        "Unit": {"enum": ["1", "2"]},
        "Place": {"type": "object", "properties": {"zip": {"$ref": "#/$defs/Zip"}}},
    },
}

INNER = {"properties": REFERRING["properties"] | {"same": {"$ref": "#/$defs/All/properties/zip"}}}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "schema",
    [REFERRING, {"$ref": "#/$defs/All", "$defs": REFERRING["$defs"] | {"All": INNER}}],
)
def test_tagged_values_have_the_types_that_references_lead_to(name: str, schema: Any) -> None:
    format, tools = format_of(name), {"f": schema}
    made = CallGrammar(format, {}).calls(tools, several=False)
    for value in (
        {"zip": "12345", "unit": "1", "yes": "true", "same": "null"},
        {"place": {"zip": "7"}, "size": 2},
        {"tree": {"zip": "7", "tree": None}},
        {"tree": None},
    ):
        text = written(name, None, [("f", value)]).strip()
        assert takes(made, text)
        (call,) = read(CallParser(format, tools), [text])[1]
        assert json.loads(call.arguments) == value
    for wrong in ({"unit": "3"}, {"yes": "false"}, {"place": {"zip": 7}}, {"size": 3}):
        assert not takes(made, written(name, None, [("f", wrong)]).strip())


@pytest.mark.parametrize("name", TAGGED)
def test_references_that_lead_nowhere_end(name: str) -> None:
    """The type is not known, so the value is read as JSON and cannot be enforced."""
    format = format_of(name)
    for reference in ("#/$defs/a", "#/properties/x", "#x", "https://a.b", "#/$defs/c", 5):
        choices = [{"$ref": "#/$defs/c"}] * 2
        schema = {
            "properties": {"x": {"$ref": reference}},
            "$defs": {"a": {"$ref": "#/$defs/a"}, "c": {"anyOf": choices}},
        }
        with pytest.raises(RequestError, match="'x' of several types, or of none that is said"):
            CallGrammar(format, {}).calls({"f": schema}, several=False)
        text = written(name, None, [("f", {"x": 7})])
        assert read(CallParser(format, {"f": schema}), [text])[1] == [ParsedCall("f", '{"x": 7}')]


@pytest.mark.parametrize("name", TAGGED)
def test_a_long_name_is_not_said_back(name: str) -> None:
    grammar, long = CallGrammar(format_of(name), {}), "a" * 5000
    for schema in (
        {"properties": {}, "required": [long]},
        {"properties": {long: {"type": ["string", "null"]}}},
        {"properties": {long: {"type": "string", "pattern": "x"}}},
        {"properties": {long: {"type": "string", "enum": 5}}},
    ):
        with pytest.raises(RequestError) as caught:
            grammar.calls({"f": schema}, several=False)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", TAGGED)
def test_what_tags_cannot_say_is_refused(name: str) -> None:
    grammar = CallGrammar(format_of(name), {})
    for schema, what in (
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "more than properties"),
        ({"type": "object", "minProperties": 1}, "more than properties"),
        ({"properties": {}, "required": ["a"]}, "required argument 'a', which is no property"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "'a' of several types"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'a' that is not any string"),
        ({"properties": {"a": {}}, "required": 5}, "required that is no list of names"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "required that is no list of names"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum is no list of strings"),
        ({"properties": {"a": {"type": "string", "enum": [None]}}}, "enum is no list of strings"),
        ({"properties": {"a": {"type": "string", "enum": []}}}, "enum is no list of strings"),
    ):
        with pytest.raises(RequestError, match=f"{what}.* cannot be enforced"):
            grammar.calls({"f": schema}, several=False)
    chosen = {"properties": {"a": {"type": "string", "enum": ["x", "y"]}}}
    made = grammar.calls({"f": chosen}, several=False)
    assert takes(made, written(name, None, [("f", {"a": "y"})]).strip())
    assert not takes(made, written(name, None, [("f", {"a": "z"})]).strip())


def test_special_tokens_are_tokens_and_not_text() -> None:
    """3000 is one of the shipped tokenizer's; the process that tries grammars knows bytes only."""
    grammar = CallGrammar(format_of("mistral"), {"[TOOL_CALLS]": 3000})
    directory = Path(__file__).parents[4] / "examples" / "demo-model"
    codec = TextCodec.from_directory(directory, AutoConfig.from_pretrained(directory))
    structures = Structures(codec, codec.vocab_size)
    for made in (
        grammar.calls(TOOLS, several=True),
        grammar.text_or_calls(TOOLS, several=True),
    ):
        assert "<[3000]>" in made
        assert "[TOOL_CALLS]" not in made
        for known, text in ((True, made), (False, made.replace("3000", "4096"))):
            params = SamplingParams(structure=Structure.grammar(text))
            assert params.structure is not None
            structures.check(params.structure)
            with nullcontext() if known else pytest.raises(RequestError, match="too large"):
                constraint = structures.constraint(params)
            if known and text.startswith("start: <["):
                assert constraint is not None
                allowed = np.unpackbits(constraint.allowed_bits(), bitorder="little")
                assert allowed.nonzero()[0].tolist() == [3000]


def test_what_the_grammar_lets_through_is_read_as_calls() -> None:
    format = format_of("hermes")
    text = '<tool_call>\n{ "name":"weather",\n  "arguments":{"city":"a","days":1}}\n</tool_call>'
    assert takes(CallGrammar(format, {}).calls(TOOLS, several=True), text)
    arguments = json.dumps({"city": "a", "days": 1})
    assert read(CallParser(format, TOOLS), [text])[1] == [ParsedCall("weather", arguments)]
