"""Answers as clients send them back to the tokenizer: fields that say nothing are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from moe.errors import RequestError
from moe.text.tokenizer import TextCodec

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo-model" / "tokenizer.json"
# Each field that is there is read, as gpt-oss's template reads calls.
READS_ALL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}{% endif %}"
    "{% if 'annotations' in m %}{{ m.annotations[0].url }}{% endif %}"
    "{% if 'name' in m %}{{ m.name + '!' }}{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    backend = Tokenizer.from_file(str(TOKENIZER))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = READS_ALL
    return TextCodec(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": "WORD", "tool_calls": []}, "WORD"),
        ({"content": "WORD", "tool_calls": None, "name": None, "annotations": []}, "WORD"),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "WORD"}], "annotations": []}, "WORD"),
        ({"content": "", "reasoning_content": None}, ""),
    ],
)
def test_fields_that_say_nothing_are_left_out(codec: TextCodec, answer: Any, text: str) -> None:
    asked = {"role": "user", "content": "q"}
    ids = codec.encode([asked, {"role": "assistant"} | answer, asked])
    assert codec.decode(ids) == f"<user>q\n<assistant>{text}\n<user>q\n<assistant>"


def test_a_question_has_content(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="chat message 0 must have a string as its content"):
        codec.encode([{"role": "user", "content": None}])
