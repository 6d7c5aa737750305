"""What a chat over HTTP reads of its earlier turns, on the shipped model with default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from moe import MoE
from moe.kv.prefix_cache import BLOCK

DEMO = Path(__file__).parents[3] / "examples/demo-model"
FIRST = "Once upon a time there was a small dog who lived near the sea. What did he see? " * 4


@pytest.mark.parametrize("reuse", [False, True])
def test_a_further_turn_reads_only_what_is_new(serve: Any, reuse: bool) -> None:
    """The answer counts as new unless `memory.reuse_answers` says that it may be kept."""
    with serve(load=lambda: MoE.from_pretrained(DEMO, memory={"reuse_answers": reuse})) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": FIRST}]
        before = answered = 0
        for turn in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=24, temperature=0
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            kept = before + (answered if reuse else 0)
            assert (cached == 0) if not turn else (kept - BLOCK <= cached <= before + answered)
            before, answered = usage.prompt_tokens, usage.completion_tokens
            said = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "And then?"},
            ]
        body = {"model": "tiny", "messages": messages[:-2], "max_tokens": 1}
        usage = server.http.post("/v1/messages", json=body).json()["usage"]
        assert usage["cache_read_input_tokens"] >= before - BLOCK
        assert usage["input_tokens"] <= BLOCK
