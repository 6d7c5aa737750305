"""Images in requests of all three dialects; hostile ones are refused and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from tests.moe.image_models import make, picture
from tests.moe.server.conftest import Running, Serve
from tests.moe.test_images import HOSTILE, SMALL, data_url, png

URL = data_url(png(picture(1, 64, 96)))
SAID = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def seeing(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("seeing")
    make("qwen3_vl_moe", path)
    with serve(load=lambda: MoE.from_pretrained(path, SMALL)) as running:
        yield running


def chat(url: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "w9"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], **SAID, **more}


def test_dialects_show_the_same_image(seeing: Running) -> None:
    whole = seeing.http.post("/v1/chat/completions", json=chat(URL)).json()
    said = whole["choices"][0]["message"]["content"]
    assert said
    used = whole["usage"]["prompt_tokens"]
    url = {"type": "input_image", "image_url": URL, "detail": "auto"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "w9"}, url]}
    body = {"input": [item], "max_output_tokens": 4, "temperature": 0}
    answer = seeing.http.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == said
    assert answer["usage"]["input_tokens"] == used
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks = [{"type": "text", "text": "w9"}, {"type": "image", "source": source}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": blocks}], **SAID}
    answer = seeing.http.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"] == said
    counted = {name: body[name] for name in ("model", "messages")}
    count = seeing.http.post("/v1/messages/count_tokens", json=counted).json()
    assert count["input_tokens"] == answer["usage"]["input_tokens"] == used


def test_hostile_images_are_refused_and_the_server_goes_on(seeing: Running) -> None:
    urls = [data_url(data) for data, _ in HOSTILE.values()]
    urls += ["https://127.0.0.1:1/a.png", "file:///etc/passwd", "data:image/png;base64,%%%"]
    for url in urls:
        answer = seeing.http.post("/v1/chat/completions", json=chat(url))
        assert answer.status_code == 400, (url[:60], answer.text)
        assert "image 0 of the prompt" in answer.json()["error"]["message"]
    for part in ({"type": "image_url"}, {"type": "image_url", "image_url": {"url": URL}, "x": 1}):
        body = {"messages": [{"role": "user", "content": [part]}], **SAID}
        assert seeing.http.post("/v1/chat/completions", json=body).status_code == 400
    marks = chat(URL)
    marks["messages"][0]["content"][0]["text"] = "<|image_pad|>"
    answer = seeing.http.post("/v1/chat/completions", json=marks)
    assert answer.status_code == 400
    assert "processor refused" in answer.json()["error"]["message"]
    assert seeing.http.post("/v1/chat/completions", json=chat(URL)).status_code == 200


def test_a_model_that_reads_text_refuses(server: Running) -> None:
    answer = server.http.post("/v1/chat/completions", json=chat(URL))
    assert answer.status_code == 400
    assert "model.images=true" in answer.json()["error"]["message"]
