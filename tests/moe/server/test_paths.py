"""Paths as clients write them, and names of models that the server does not have."""

from __future__ import annotations

from typing import Any

import pytest

from moe.server.paths import foreign
from moe.server.serve import Service

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "/completions", {"prompt": "hi", "max_tokens": 1}),
        ("POST", "/responses", {"input": "hi", "max_output_tokens": 1}),
        ("POST", "/responses/input_tokens", {"input": "hi"}),
        ("POST", "/messages", {"model": "tiny", **CHAT}),
        ("POST", "/v1/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]}),
        ("GET", "/models", None),
        ("GET", "/models/small/tiny", None),
        ("GET", "/v1/health", None),
    ],
)
def test_routes_answer_without_their_version_and_with_it_twice(
    server: Any, method: str, path: str, body: Any
) -> None:
    answer = server.http.request(method, path, json=body)
    if path == "/v1/health":
        assert answer.status_code == 404, "routes that have no version get none"
        return
    assert answer.status_code == 200, answer.text


def test_such_a_path_needs_the_key_and_is_counted_as_its_route(serve: Any) -> None:
    with serve(api_key="s3cret") as server:
        assert server.http.post("/chat/completions", json=CHAT).status_code == 401
        refused = server.http.post("/messages", json=CHAT)
        assert refused.status_code == 401
        assert refused.json()["type"] == "error", "Anthropic's clients know this shape"
        key = {"authorization": "Bearer s3cret"}
        assert server.http.post("/chat/completions", json=CHAT, headers=key).is_success
        metrics = server.http.get("/metrics", headers=key).text
        assert 'route="/v1/chat/completions",status="200"} 1.0' in metrics
        assert 'route="/chat' not in metrics


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "has no embeddings"),
        ("/embeddings", "has no embeddings"),
        ("/v1/audio/speech", "neither hears nor speaks"),
        ("/v1/images/generations", "makes no images"),
        ("/v1/responses/resp_1", "keeps no answers"),
        ("/v1/batches", "`moe generate --batch-file`"),
        ("/v1/messages/batches", "`moe generate --batch-file`"),
        ("/api/chat", "no Ollama server: send OpenAI's requests to /v1/chat/completions"),
        ("/api/tags", "no Ollama server"),
        ("/props", "/v1/status says"),
        ("/slots", "/v1/status says"),
        ("/completion", "/v1/completions"),
        ("/v1/load_lora_adapter", "chosen when the server starts"),
        ("/docs", "/openapi.json describes"),
        ("/nothing", "no GET at this path"),
    ],
)
def test_a_404_says_what_is_missing(server: Any, path: str, why: str) -> None:
    refused = server.http.get(path)
    assert refused.status_code == 404, refused.text
    error = refused.json()["error"]
    message = error["message"]
    assert why in message
    assert message.endswith("; /openapi.json lists what there is")
    assert (foreign(path) != "") == (path != "/nothing")


def test_no_route_of_this_server_is_called_foreign(server: Any) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert [path for path in paths if foreign(path)] == []


def test_every_model_name_is_answered_where_that_is_set(serve: Any, server: Any) -> None:
    assert server.http.post("/v1/chat/completions", json=CHAT | {"model": "gpt"}).status_code == 404
    with serve(any_model=True) as running:
        for route, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", CHAT),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ):
            got = running.http.post(route, json=body | {"model": "claude-haiku"})
            assert got.status_code == 200, got.text
            assert got.json()["model"] == "claude-haiku"
        listed = running.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "small/tiny"]
        assert running.http.get("/v1/models/gpt-x").json()["id"] == "gpt-x"
        assert running.http.post("/v1/chat/completions", json=CHAT).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], ["demo-model"]),
        (["a"], ["a"]),
        (["*"], ["demo-model", "*"]),
        (["a", "*"], ["a", "*"]),
    ],
)
def test_a_star_among_the_served_names_is_every_name(
    monkeypatch: pytest.MonkeyPatch, given: list[str], names: list[str]
) -> None:
    from moe.server import serve as process
    from moe.server.listener import bind
    from moe.settings.profile import load_profile

    found: list[str] = []

    async def run(service: Service) -> int:
        found.extend(service.model_names)
        return 0

    monkeypatch.setattr(process, "_run", run)
    profile = load_profile({}, environ={})
    with bind("127.0.0.1", 0) as listener:
        process.serve("examples/demo-model", profile, listener, None, given)
    assert found == names
