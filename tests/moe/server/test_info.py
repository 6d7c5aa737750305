"""Routes about the model and the server itself."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tokenizers import decoders

from moe import MoE, SamplingParams, __version__
from moe.server import app
from moe.server.routes import most_tokens
from tests.moe.server.conftest import Say

CHAT: Any = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def test_models_tokenize_and_detokenize(client: openai.OpenAI, server: Any, model: MoE) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "small/tiny"]
    for name in ("tiny", "small/tiny"):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="hello", max_tokens=1).model == name
    ids = server.http.post("/tokenize", json={"prompt": "a b"}).json()
    assert ids == {"tokens": model.codec.encode("a b"), "count": 3, "max_model_len": 256}
    chat = server.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == model.codec.encode(CHAT)
    text = server.http.post("/detokenize", json={"tokens": ids["tokens"]}).json()
    assert text == {"prompt": "a b"}


def test_c11_detokenize_has_the_limit_of_tokenize(server: Any, model: MoE) -> None:
    ids = [5] * (most_tokens(model) + 1)
    refused = server.http.post("/detokenize", json={"tokens": ids})
    assert refused.status_code == 400
    assert f"tokens has {len(ids)} ids; at most" in refused.json()["error"]["message"]
    text = server.http.post("/detokenize", json={"tokens": ids[1:]}).json()["prompt"]
    assert text == model.codec.decode([5]) * (len(ids) - 1)


def test_c11_who_watches_holds_up_nobody(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description is made once, and answers to monitors one after the other."""
    made, working, most = [], threading.Semaphore(0), []
    schemas, status = app.nested_schemas, app._status

    def counted(*models: Any) -> Any:
        made.append(models)
        return schemas(*models)

    def alone(application: Any) -> Any:
        working.release()
        most.append(working._value)
        answer = status(application)
        working.acquire()
        return answer

    monkeypatch.setattr(app, "nested_schemas", counted)
    monkeypatch.setattr(app, "_status", alone)
    first = server.http.get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    assert server.http.get("/openapi.json").json() == first.json()
    assert len(made) <= 1  # none: an earlier test has asked
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: httpx.get(f"{server.url}/v1/status"), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert most == [1] * 6


def test_a_request_need_not_name_the_model(server: Any) -> None:
    for route, asked in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
    ):
        assert server.http.post(route, json=asked).json()["model"] == "tiny"


def test_the_version(server: Any) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_a_chat_goes_on_with_its_last_message(client: openai.OpenAI, server: Any) -> None:
    """Ends of the text: the last message left open, or closed, or behind it a new turn."""
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    for ending, text in (
        ({"continue_final_message": True}, "u:Hello\na:It is"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "u:Hello\na:It is"),
        ({"add_generation_prompt": False}, "u:Hello\na:It is\n"),
        ({}, "u:Hello\na:It is\na:"),
    ):
        short: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        chat = client.chat.completions.create(messages=begun, extra_body=ending, **short)
        plain = client.completions.create(prompt=text, **short)
        assert chat.choices[0].message.content == plain.choices[0].text
        ids = server.http.post("/tokenize", json={"messages": begun, **ending}).json()["tokens"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_the_space_before_a_continuation_is_kept(model: MoE, server: Any, say: Say) -> None:
    """Tokenizers like SentencePiece strip the first space of a text: an answer's, not that of the
    rest of a message."""
    say(" and so on")
    assert model.codec.tokenizer is not None
    backend = model.codec.tokenizer.backend_tokenizer
    kept, stripping = backend.decoder, decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Fuse(), stripping])
    try:
        body = {"messages": CHAT, "max_tokens": 30}
        begun = body | {"messages": [*CHAT, {"role": "assistant", "content": "It is"}]}
        for asked, text in (
            (body, "and so on"),
            (begun, "and so on"),
            (begun | {"continue_final_message": True}, " and so on"),
        ):
            got = server.http.post("/v1/chat/completions", json=asked).json()
            assert got["choices"][0]["message"]["content"] == text
        got = server.http.post("/v1/messages", json={"model": "tiny", **begun}).json()
        assert got["content"][0]["text"] == " and so on"
    finally:
        backend.decoder = kept


def test_ends_of_a_chat_that_cannot_be(server: Any) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [*CHAT, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    for route, body, rule in (
        ("/v1/chat/completions", {"messages": CHAT, **both}, "cannot both be true"),
        ("/v1/chat/completions", {"messages": calls, "continue_final_message": True}, "calls"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "only with messages"),
    ):
        refused = server.http.post(route, json=body)
        assert refused.status_code == 400
        assert rule in refused.json()["error"]["message"]


def test_status_and_metrics(wait_for: Any, client: openai.OpenAI, server: Any) -> None:
    client.completions.create(model="tiny", prompt="hello", max_tokens=4)
    wait_for(server.is_idle, "an idle engine")
    status = server.http.get("/v1/status").json()
    assert status["state"] == "ready"
    assert status["profile"]["server.max_waiting"] == {"value": 256, "origin": "default"}
    assert status["model"]["architecture"] == "Qwen3MoeForCausalLM"
    assert status["stats"]["expert_bytes_read"] > 0
    text = server.http.get("/metrics").text
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    assert samples['moe_http_requests_total{route="/v1/completions",status="200"}'] >= 1
    assert samples["moe_requests_running"] == samples["moe_requests_waiting"] == 0
    for phase in ("prefill", "decode"):
        assert samples[f'moe_expert_bytes_read_total{{phase="{phase}"}}'] > 0
        assert samples[f'moe_expert_loads_total{{phase="{phase}"}}'] > 0
    assert samples["moe_kv_tokens"] == 0
    assert samples["moe_kv_tokens_limit"] == status["engine"]["kv_tokens_limit"]
    assert samples["moe_generated_tokens_total"] >= 4
    assert samples["moe_prompt_tokens_total"] >= 5
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {n for n in names if not n.endswith("_created")} == {  # a new metric is a decision
        "moe_http_requests_total",
        "moe_prompt_tokens_total",
        "moe_connections_closed_total",
        "moe_generated_tokens_total",
        "moe_prompt_tokens_waiting",
        "moe_time_to_first_token_seconds",
        "moe_inter_token_seconds",
        "moe_requests_waiting",
        "moe_requests_timed_out_total",
        "moe_requests_running",
        "moe_expert_bytes_read_total",
        "moe_expert_loads_total",
        "moe_prefix_asked_tokens_total",
        "moe_prefix_hit_tokens_total",
        "moe_prefix_evictions_total",
        "moe_prefix_tokens",
        "moe_prompts_waiting",
        "moe_sequences_running",
        "moe_kv_tokens",
        "moe_kv_tokens_limit",
    }


def test_the_description_names_every_route_and_field(server: Any) -> None:
    description = server.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in description["paths"]
    assert "$defs" not in json.dumps(description)
