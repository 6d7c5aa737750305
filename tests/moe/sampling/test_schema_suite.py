"""Schemas against the JSON-Schema-Test-Suite and a validator, which others wrote.

A schema is refused, or followed: its grammar takes the suite's valid values and none of its invalid
ones, and random texts of it are valid and never come to where nothing may follow.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from moe.sampling import grammar
from tests.world.files import JSON_SCHEMA_TEST_SUITE, needed

BYTES = LLTokenizer("byte")
VALIDATORS = {
    "draft4": jsonschema_rs.Draft4Validator,
    "draft6": jsonschema_rs.Draft6Validator,
    "draft7": jsonschema_rs.Draft7Validator,
    "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft2020-12": jsonschema_rs.Draft202012Validator,
}
TURNS = b'",:{}[]0'
DEEP = pytest.mark.deep


def groups(draft: str, each: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every so many of a draft's schemas that are followed, with their tests."""
    for file in sorted((needed(JSON_SCHEMA_TEST_SUITE) / "tests" / draft).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8"))[::each]:
            schema = group["schema"]
            if isinstance(schema, dict) and not grammar._fault("json_schema", json.dumps(schema)):
                yield file.stem, group


def matcher(schema: Any) -> LLMatcher:
    compiled = grammar.grammar_of("json_schema", json.dumps(schema))
    return LLMatcher(BYTES, compiled, log_level=0, limits=grammar.LIMITS)


def takes(schema: Any, value: Any) -> bool:
    own = matcher(schema)
    text = list(json.dumps(value, ensure_ascii=False).encode())
    return own.try_consume_tokens(text) == len(text) and own.is_accepting()


def orders(value: Any) -> Iterator[Any]:
    """A value with its names in each order: grammars have one."""
    if isinstance(value, dict) and len(value) < 5:
        yield from map(dict, itertools.permutations(value.items()))
    else:
        yield value


def whole_floats(value: Any) -> bool:
    """Whether a value has 1.0, which JSON Schema calls an integer and grammars write as 1."""
    if isinstance(value, list):
        return any(map(whole_floats, value))
    return isinstance(value, float) and value.is_integer()


def written(schema: Any, seed: int) -> bytes | None:
    """A random text of a schema; None where it is not at its end after some time."""
    own, noise, text = matcher(schema), random.Random(seed), bytearray()
    for _ in range(150):
        bits = int.from_bytes(own.compute_bitmask(), "little")
        assert not own.is_error(), (schema, bytes(text))
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed:
            break
        turns = [byte for byte in allowed if byte in TURNS]
        text.append(noise.choice(turns if turns and noise.random() < 0.6 else allowed))
        own.consume_token(text[-1])
    return bytes(text) if own.is_accepting() else None


BESIDE_REFERENCES = ("ref overrides any sibling keywords", "$ref prevents a sibling")
"""Groups of the drafts before 2019-09, where keywords beside a ``$ref`` say nothing. Here they
count in every draft: a request's schema seldom names one."""


@pytest.mark.parametrize(
    ("draft", "each"),
    [("draft2020-12", 6), *(pytest.param(draft, 1, marks=DEEP) for draft in VALIDATORS)],
)
def test_schemas_are_followed_as_the_suite_says_or_refused(draft: str, each: int) -> None:
    followed = taken = made = 0
    for stem, group in groups(draft, each):
        if group["description"].startswith(BESIDE_REFERENCES):
            continue
        schema, followed = group["schema"], followed + 1
        for test in group["tests"]:
            found = any(takes(schema, value) for value in orders(test["data"]))
            if not test["valid"]:
                assert not found, (schema, test)
            elif stem != "format" and not whole_floats(test["data"]):
                assert found or "bignum" in group["description"], (schema, test)
                taken += 1
        validator = VALIDATORS[draft](schema, validate_formats=False)
        for seed in range(2):
            text = written(schema, seed)
            if text is None or _has_infinity(value := json.loads(text)):
                continue
            assert validator.is_valid(value), (schema, text)
            made += 1
    assert min(followed, taken, made) > (20 if each > 1 else 100)


def _has_infinity(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)
