"""OpenAI's Python client: a chat, and a round of a tool, streamed, on both of its APIs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import openai

QUESTION = "Read notes/word.txt and tell me the word in it."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
ABOUT: Any = {"name": "read_file", "description": "Read a text file.", "parameters": PARAMETERS}
client = openai.OpenAI(base_url=f"{os.environ['ADDRESS']}/v1", api_key="none", max_retries=0)
model = os.environ["MODEL"]

function: Any = {"type": "function", "strict": False, **ABOUT}

messages: list[Any] = [{"role": "user", "content": QUESTION}]
while True:
    with client.chat.completions.stream(
        model=model, messages=messages, tools=[{"type": "function", "function": ABOUT}]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        text = Path(json.loads(call.function.arguments)["path"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
print(message.content)

items: list[Any] = [{"role": "user", "content": QUESTION}]
while True:
    with client.responses.stream(model=model, input=items, tools=[function]) as responses:
        response = responses.get_final_response()
    items += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for asked in calls:
        text = Path(json.loads(asked.arguments)["path"]).read_text()
        items.append({"type": "function_call_output", "call_id": asked.call_id, "output": text})
print(response.output_text)
