"""Anthropic's Python client: a round of a tool, streamed, and a count of tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=os.environ["ADDRESS"], api_key="none", max_retries=0)
messages: list[Any] = [
    {"role": "user", "content": "Read notes/word.txt and tell me the word in it."}
]
tool: Any = {
    "name": "read_file",
    "description": "Read a text file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
asked: Any = {"model": os.environ["MODEL"], "tools": [tool]}
assert client.messages.count_tokens(messages=messages, **asked).input_tokens > 20
while True:
    with client.messages.stream(messages=messages, max_tokens=1000, **asked) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    if message.stop_reason != "tool_use":
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": Path(str(block.input["path"])).read_text(),
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
print(*(block.text for block in message.content if block.type == "text"))
