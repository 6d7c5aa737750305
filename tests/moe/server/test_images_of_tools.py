"""Images that tools have returned: on each route the model reads the rows of the picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import MoE
from moe.text.tokenizer import ImagePrompt
from tests.moe.image_models import make, picture
from tests.moe.server.conftest import TAKES, Running, Serve
from tests.moe.test_images import SMALL, data_url, png

TEMPLATE = (
    "{%- for tool in tools or [] %} w1 {{ tool | tojson }}{% endfor %}"
    "{%- for m in messages %} w2 {% if m.content is string %}{{ m.content }}{% else %}"
    "{%- for c in m.content or [] %}{% if c.type == 'image' %}"
    " <|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ c.text }}{% endif %}"
    "{%- endfor %}{% endif %}{% for call in m.tool_calls or [] %} <call> "
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    " </call>{% endfor %} </s>{% endfor %}{% if add_generation_prompt %} w2 {% endif %}"
)


@pytest.fixture(scope="module")
def seeing(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("seeing")
    make("qwen3_vl_moe", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serve(load=lambda: MoE.from_pretrained(path, SMALL)) as running:
        yield running


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """A question, a call, and its result with words and an image, for each route."""
    asked = {"role": "user", "content": "w9"}
    function = {"name": "look", "arguments": "{}"}
    part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    shown = [{"type": "text", "text": "w7"}, {"type": "image", "source": source}]
    return {
        "/v1/chat/completions": {
            "messages": [
                asked,
                {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]},
                {
                    **{"role": "tool", "tool_call_id": "c1"},
                    "content": [{"type": "text", "text": "w7"}, part],
                },
            ],
            "max_tokens": 3,
        },
        "/v1/responses": {
            "input": [
                asked,
                {"type": "function_call", "call_id": "c1", **function},
                {
                    **{"type": "function_call_output", "call_id": "c1"},
                    "output": [
                        {"type": "input_text", "text": "w7"},
                        {"type": "input_image", "image_url": url},
                    ],
                },
            ],
            "max_output_tokens": 3,
        },
        "/v1/messages": {
            "model": "tiny",
            "messages": [
                asked,
                {"role": "assistant", "content": [used]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": shown}],
                },
            ],
            "max_tokens": 3,
        },
    }


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[ImagePrompt]:
    """The prompts with images that the model is asked to read from here on."""
    read: list[ImagePrompt] = []
    request = MoE.request

    def recorded(model: MoE, token_ids: Any, *more: Any, **options: Any) -> Any:
        if isinstance(token_ids, ImagePrompt):
            read.append(token_ids)
        return request(model, token_ids, *more, **options)

    monkeypatch.setattr(MoE, "request", recorded)
    return read


def rows_of(prompt: ImagePrompt, mark: int) -> torch.Tensor:
    """The embeddings (tokens of the image, H) that the model reads in the image's place."""
    rows = torch.as_tensor(prompt.rows.part(0, len(prompt))["inputs_embeds"])[0]
    return rows[torch.tensor(prompt) == mark]


@TAKES
def test_the_model_reads_the_picture_on_each_route(
    seeing: Running, prompts: list[ImagePrompt]
) -> None:
    url, other = (data_url(png(picture(seed, 64, 96))) for seed in (1, 2))
    for image in (url, other):
        for route, body in bodies(image).items():
            answer = seeing.http.post(route, json=body)
            assert answer.status_code == 200, answer.text
            assert "x-moe-ignored" not in answer.headers
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    body = {"messages": [shown], "max_tokens": 3}
    assert seeing.http.post("/v1/chat/completions", json=body).status_code == 200
    *of_tools, of_user = prompts
    assert [list(prompt) for prompt in of_tools] == [list(of_tools[0])] * 6
    mark = max(of_user, key=of_user.count)
    expected = rows_of(of_user, mark)
    assert len(expected) == 6
    for prompt in of_tools[:3]:
        assert torch.equal(rows_of(prompt, mark), expected)
    for prompt in of_tools[3:]:
        assert not torch.equal(rows_of(prompt, mark), expected)
