"""Answers that have to be something, through OpenAI's client, and what is said of bad wishes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from moe import MoE
from moe.commands.batch import open_files, run_batch

DEMO = "examples/demo-model"
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 150,
    "temperature": 1,
    "seed": 1,
}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    tags: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)


@pytest.fixture(scope="module")
def demo() -> MoE:
    model = MoE.from_pretrained(DEMO)
    model.close = lambda: None  # type: ignore[method-assign]  # the server closes it
    return model


@pytest.fixture(scope="module")
def asked(serve: Any, demo: MoE) -> Iterator[openai.OpenAI]:
    with serve(load=lambda: demo) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openais_client_parses_what_it_asked_for(asked: openai.OpenAI) -> None:
    for seed in range(3):
        ask = ASK | {"seed": seed, "max_tokens": 600}  # twenty blanks before each of twelve parts
        answer = asked.beta.chat.completions.parse(**ask, response_format=Person)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_a_stream_brings_the_same_text(asked: openai.OpenAI) -> None:
    format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": [1, "é"]}},
    }
    whole = asked.chat.completions.create(**ASK, response_format=format).choices[0].message.content
    chunks = asked.chat.completions.create(**ASK, response_format=format, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole
    assert json.loads(text) in (1, "é")


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"json": {"type": "integer", "minimum": 10, "maximum": 50}}, "[1-5][0-9]"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["x y", "z"]}, "x y|z"),
        ({"grammar": 'start: "a" | "b"'}, "a|b"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_object": True}, r"(?s)\{.*"),
    ],
)
def test_vllms_fields_on_both_routes(asked: openai.OpenAI, wish: Any, pattern: str) -> None:
    extra = {"structured_outputs": wish}
    chat = asked.chat.completions.create(**ASK, extra_body=extra).choices[0]
    assert re.fullmatch(pattern, chat.message.content or "")
    plain = {key: value for key, value in ASK.items() if key != "messages"} | {"max_tokens": 20}
    texts = asked.completions.create(**plain, prompt="hello", n=2, extra_body=extra).choices
    assert all(re.fullmatch(pattern, choice.text) for choice in texts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"not": {}}},
                }
            },
            r'the JSON schema cannot be followed: Unimplemented keys: \["not"\]',
        ),
        (
            {"structured_outputs": {"regex": "("}},
            "the regular expression cannot be followed: .*unclosed group",
        ),
        (
            {
                "structured_outputs": {"json_object": True},
                "response_format": {"type": "json_object"},
            },
            "response_format and structured_outputs: give one of them",
        ),
        ({"structured_outputs": {}}, "give json, regex, choice, grammar or json_object: true"),
    ],
)
def test_wishes_that_cannot_be_followed(asked: openai.OpenAI, fields: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        asked.chat.completions.create(**ASK, extra_body=fields)


@pytest.mark.parametrize("stream", [False, True])
def test_what_becomes_too_complex_says_so(asked: openai.OpenAI, stream: bool) -> None:
    wish = {"structured_outputs": {"regex": ".*a.{50}b.{50}c.{50}"}}
    body = {**ASK, "max_tokens": 1500, "extra_body": wish, "stream": stream}
    with pytest.raises(openai.APIError, match="cannot be followed any further"):
        list(asked.chat.completions.create(**body))


def test_lines_of_a_batch(demo: MoE, tmp_path: Path) -> None:
    lines = [
        {"custom_id": "a", "body": ASK | {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"custom_id": "b", "body": ASK | {"structured_outputs": {"regex": "("}}},
    ]
    route = {"method": "POST", "url": "/v1/chat/completions"}
    (tmp_path / "in").write_text("\n".join(json.dumps(line | route) for line in lines))
    with open_files(tmp_path / "in", tmp_path / "out") as files:
        run_batch(demo, "tiny", files)
    answers = map(json.loads, (tmp_path / "out").read_text().splitlines())
    got = {answer["custom_id"]: answer["response"] for answer in answers}
    assert got["a"]["body"]["choices"][0]["message"]["content"] in ("yes", "no")
    assert got["b"]["status_code"] == 400


def test_a_model_whose_tokens_are_not_bytes(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="need a fast tokenizer whose tokens are bytes"
    ):
        client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert client.chat.completions.create(**ASK, response_format={"type": "text"}).choices
