"""litellm: a round of a tool as OpenAI's chat, and the same question as Anthropic's messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import litellm

litellm.telemetry = False
tool = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a text file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
model, address = os.environ["MODEL"], os.environ["ADDRESS"]
for name, base in ((f"openai/{model}", f"{address}/v1"), (f"anthropic/{model}", address)):
    messages: list[Any] = [
        {"role": "user", "content": "Read notes/word.txt and tell me the word in it."}
    ]
    while True:
        answer: Any = litellm.completion(
            name, messages, tools=[tool], api_base=base, api_key="none", max_retries=0
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = Path(json.loads(call.function.arguments)["path"]).read_text()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    print(message.content)
