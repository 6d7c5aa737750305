"""A server of a model that writes canvases: the same API, and refusals by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe import MoE, SamplingParams
from moe.cli import main
from tests.methods.diffusion.test_images import make_seeing
from tests.methods.diffusion.test_writer import SIZES, make_model
from tests.moe.image_models import picture
from tests.moe.server.conftest import Running
from tests.moe.test_images import SMALL, asking, data_url, png

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 3, "temperature": 1}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def path(text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("canvases") / "model", **SIZES[0])
    for file in text_checkpoint.glob("*token*"):
        shutil.copy(file, made)
    shutil.copy(text_checkpoint / "chat_template.jinja", made)
    return made


@pytest.fixture(scope="module")
def served(path: Path, serve: Any) -> Iterator[Running]:
    with serve(load=lambda: MoE.from_pretrained(path)) as running:
        yield running


def test_whole_streamed_and_chat_answers(path: Path, served: Running) -> None:
    params = SamplingParams(max_new_tokens=8, seed=3)
    (expected,) = MoE.from_pretrained(path).generate("hello", params)
    answer = served.http.post(URL, json=BODY).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    streamed = served.http.post(URL, json=BODY | {"stream": True}).text
    assert streamed.count("data: {") > 1
    assert streamed.rstrip().endswith("data: [DONE]")
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    body = {key: value for key, value in BODY.items() if key != "prompt"} | messages
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    stop = expected.text[2]
    cut = served.http.post(URL, json=BODY | {"stop": stop}).json()["choices"][0]
    assert cut["text"] == expected.text[: expected.text.index(stop)]
    assert cut["finish_reason"] == "stop"
    scored = served.http.post(URL, json=BODY | {"logprobs": 2}).json()["choices"][0]
    assert scored["text"] == expected.text
    assert len(scored["logprobs"]["token_logprobs"]) == len(expected.tokens)
    status = served.http.get("/v1/status").json()
    assert status["engine"]["canvases"]["passes"]["decode"] > 0
    assert 'phase="decode"' in served.http.get("/metrics").text
    assert served.is_idle()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"response_format": {"type": "json_object"}}, "structure"),
        ({"structured_outputs": {"regex": "a+"}}, "structure"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structure"),
        ({"presence_penalty": 1}, "presence_penalty"),
    ],
)
def test_what_canvases_cannot_do_is_refused(
    served: Running, changes: dict[str, Any], name: str
) -> None:
    answer = served.http.post(URL, json=BODY | changes)
    assert answer.status_code == 400
    assert f"{name} is not possible with this model" in answer.text


def test_images_are_refused_where_nothing_reads_them(served: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "model.images=true" in answer.text


def test_images_are_read_if_asked_for(tmp_path: Path, serve: Any) -> None:
    path = make_seeing(tmp_path / "model", "vision")
    image = picture(3, 64, 64)
    params = SamplingParams(max_new_tokens=8, seed=3, temperature=1)
    with MoE.from_pretrained(path, SMALL) as model:
        (expected,) = model.generate([asking(image)], params)
    url = {"type": "image_url", "image_url": {"url": data_url(png(image))}}
    said = [{"type": "text", "text": asking()[0]["content"][0]["text"]}, url]
    said.append({"type": "text", "text": "w20 w21"})
    body = {key: value for key, value in BODY.items() if key != "prompt"}
    body |= {"messages": [{"role": "user", "content": said}]}
    with serve(load=lambda: MoE.from_pretrained(path, SMALL)) as running:
        answer = running.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] > 64


def test_the_command_line_writes_canvases(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(path), "--prompt", "hello", "--max-new-tokens", "5", "--seed", "1"]
    assert main(arguments) == 0
    (expected,) = MoE.from_pretrained(path).generate(
        "hello", SamplingParams(max_new_tokens=5, seed=1)
    )
    assert expected.text in capsys.readouterr().out
