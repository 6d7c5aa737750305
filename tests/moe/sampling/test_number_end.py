"""Numbers of JSON end, whoever chooses among the tokens that may come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe.sampling.constraint import Structures
from moe.sampling.number_end import DIGITS, EXPONENT
from moe.sampling.params import SamplingParams, Structure
from moe.text.tokenizer import TextCodec, load_tokenizer
from moe.text.tool_calls.grammar import json_of
from tests.moe.sampling.test_constraint import ENDS, MODEL, VOCAB

MOST = 2 * DIGITS + EXPONENT + 40  # three runs, each a token longer at most, and what joins them
NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}
Choose = Callable[[list[tuple[int, str]]], int]


@pytest.fixture(scope="module")
def structures() -> Structures:
    return Structures(TextCodec(load_tokenizer(MODEL)[0], 4096, ENDS), VOCAB)


def walk(structures: Structures, structure: Structure, choose: Choose, most: int) -> str:
    """What is written if tokens are chosen so; it ends within so many characters."""
    tokenizer = structures._codec.require_tokenizer("")
    constraint = structures.constraint(SamplingParams(structure=structure))
    assert constraint is not None
    text = ""
    while len(text) <= most:
        bits = np.unpackbits(constraint.allowed_bits(), bitorder="little")[:VOCAB]
        allowed = [(int(i), tokenizer.decode([int(i)])) for i in np.flatnonzero(bits)]
        token_id = choose(allowed)
        if token_id in ENDS:
            return text
        text += dict(allowed)[token_id]
        constraint.take(token_id)
        if constraint.is_over:
            return text
    raise AssertionError(f"{structure} does not end: {text}")


def adversary(allowed: list[tuple[int, str]]) -> int:
    """Takes the longest digits, what makes room for more, and the end only where it must."""
    others = [(i, text) for i, text in allowed if i not in ENDS] or allowed
    digits = [(i, text) for i, text in others if text[:1].isdigit()]
    more = [(i, text) for i, text in others if text[:1] in (".", "e", "E")]
    return max(digits or more or others, key=lambda pair: len(pair[1]))[0]


@pytest.mark.parametrize("schema", [{}, NUMBER, INTEGER, {"type": ["number", "null"]}])
def test_an_adversary_comes_to_an_end(structures: Structures, schema: Any) -> None:
    text = walk(structures, Structure.json_schema(schema), adversary, MOST)
    assert len(text) >= DIGITS
    json.loads(text)


@pytest.mark.parametrize("seed", range(4))
def test_random_texts_come_to_an_end(structures: Structures, seed: int) -> None:
    noise = random.Random(seed)
    schema = {
        "type": "object",
        "properties": {"a": NUMBER, "b": {"type": "array", "items": INTEGER, "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    structure = Structure.grammar(f'start: "<c>" {json_of(schema)} "</c>"\n')
    text = walk(structures, structure, lambda allowed: noise.choice(allowed)[0], 3 * MOST + 400)
    assert json.loads(text.removeprefix("<c>").removesuffix("</c>")).keys() == {"a", "b"}


def only(text: str) -> Choose:
    """Follows a text, by tokens of one character, and then ends."""
    left = iter(text)

    def choose(allowed: list[tuple[int, str]]) -> int:
        wanted = next(left, None)
        found = [i for i, each in allowed if (i in ENDS if wanted is None else each == wanted)]
        assert found, (wanted, allowed[:20])
        return found[0]

    return choose


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (Structure.json_schema({"type": "string"}), '"' + "1" * 50 + '"'),
        (Structure.json_schema({}), '{"a":"1e' + "7" * 50 + '"}'),
        (Structure.json_schema({"type": "string", "pattern": "^[0-9]+$"}), f'"{"12" * 40}"'),
        (Structure.json_schema(NUMBER), f"-{'1' * 40}.{'2' * 40}E-123"),
        (Structure.regex("[01]+"), "01" * 40),
    ],
)
def test_other_digits_are_not_barred(
    structures: Structures, structure: Structure, text: str
) -> None:
    assert walk(structures, structure, only(text), 200) == text


@pytest.mark.parametrize("text", ["1" * 41, f"1.{'2' * 41}", "1e1234", "5E+0000"])
def test_a_fork_bars_the_same(structures: Structures, text: str) -> None:
    tokenizer = structures._codec.require_tokenizer("")
    one = structures.constraint(SamplingParams(structure=Structure.json_schema(NUMBER)))
    assert one is not None
    *begin, last = (tokenizer.convert_tokens_to_ids(character) for character in text)
    for token_id in begin:
        assert one.allowed_bits()[token_id // 8] >> token_id % 8 & 1
        one.take(token_id)
    for each in (one, one.fork()):
        assert not each.allowed_bits()[last // 8] >> last % 8 & 1
