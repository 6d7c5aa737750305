"""Rows of the list of faults seen in other servers that need time, a crowd or a log to show.

Bad values are in `test_refusals.py`, bad transport in `test_transport.py`, slow clients in
`test_connections.py`. The name or id of each test begins with its row, so that ``pytest -k c21``
runs all of one row.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe import MoE
from moe.errors import BusyError
from moe.fair_pool import without_interpreter
from moe.sampling.constraint import fault, faults
from moe.server import bodies, generation
from moe.text.chat import RENDERERS
from moe.text.tokenizer import TextCodec

URL = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}] * 3000, "max_tokens": 1}
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
CUBIC = "{% for a in messages %}{% for b in messages %}{% for c in messages %}" + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(ENDLESS, id="C11-endless-template"),
        pytest.param(CUBIC, id="C11-cubic-template"),
    ],
)
def test_templates_have_a_time_limit(
    template: str, serve: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RENDERERS, "_seconds", 1)
    monkeypatch.setattr(model.codec.tokenizer, "chat_template", template)
    with serve() as server:
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(server.http.post("/v1/chat/completions", json=CHAT))
        )
        asking.start()
        while asking.is_alive():  # the event loop is free meanwhile
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert answers[0].status_code == 400
        assert (
            "chat template takes more than 1 s of a processor"
            in answers[0].json()["error"]["message"]
        )
        assert server.http.post(URL, json=SHORT).status_code == 200


@pytest.mark.parametrize("route", [URL, "/v1/chat/completions"], ids=["C11-text", "C11-chat"])
def test_text_that_cannot_fit_is_not_tokenised(
    route: str, server: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        pytest.fail("was tokenised")

    huge = "x" * 2_000_000
    prompt = {"prompt": huge} if route == URL else {"messages": [{"role": "user", "content": huge}]}
    with monkeypatch.context() as patch:
        patch.setattr(type(model.codec.tokenizer), "encode", never)
        refused = server.http.post(route, json={"model": "tiny", **prompt})
    assert refused.status_code == 400
    assert re.search(
        r"the prompt has 2\d+ characters, more than 256 tokens can have \(5 each at most\)",
        refused.json()["error"]["message"],
    )
    assert server.http.post(URL, json=SHORT).status_code == 200


def test_c19_request_ids_are_made_here(server: Any) -> None:
    same = {"x-request-id": "mine"}
    answers = [server.http.post(URL, json=SHORT, headers=same) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert "mine" not in ids
    assert {a.json()["id"].removeprefix("cmpl-") for a in answers} == ids


@contextmanager
def tokenising(model: MoE, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Tokenisation that waits to be let go; the event says that it has begun."""
    encode: Callable[..., list[int]] = TextCodec.encode
    begun, go_on = threading.Event(), threading.Event()

    def slow(codec: TextCodec, *args: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return encode(codec, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TextCodec, "encode", slow)
        yield begun
        go_on.set()


def test_c20_a_client_that_leaves_while_its_prompt_is_tokenised(
    wait_for: Any, serve: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        with tokenising(model, monkeypatch) as begun:
            with server.in_flight(SHORT):
                assert begun.wait(20)
            wait_for(lambda: server.occupancy["waiting_requests"] == 0, "it to be forgotten")
        wait_for(server.is_idle, "an idle engine")
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c11_long_texts_of_one_client_leave_threads_for_others(
    serve: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode: Callable[..., list[int]] = TextCodec.encode
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(codec: TextCodec, prompt: Any, *args: Any, **options: Any) -> list[int]:
        if len(prompt) > 10_000:
            begun.release()
            with without_interpreter():
                assert go_on.wait(60)
        return encode(codec, prompt, *args, **options)

    with serve() as server, monkeypatch.context() as patch:
        patch.setattr(TextCodec, "encode", slow)
        long = {"model": "tiny", "prompt": "x" * 40_000}
        asking = [
            threading.Thread(target=lambda: server.http.post("/tokenize", json=long))
            for _ in range(6)
        ]
        for thread in asking:
            thread.start()
        try:
            assert begun.acquire(timeout=20)
            assert begun.acquire(timeout=20)
            assert server.http.post(URL, json=SHORT, timeout=20).status_code == 200
        finally:
            go_on.set()
        for thread in asking:
            thread.join(30)


def test_c20_a_client_that_leaves_is_not_tokenised_for(
    wait_for: Any, serve: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode: Callable[..., list[int]] = TextCodec.encode
    texts, go_on = list[str](), threading.Event()

    def slow(codec: TextCodec, prompt: Any, *args: Any, **options: Any) -> list[int]:
        texts.append(prompt)
        assert go_on.wait(60)
        return encode(codec, prompt, *args, **options)

    with serve() as server, monkeypatch.context() as patch:
        patch.setattr(TextCodec, "encode", slow)
        queue = server.service.queue
        for number in range(5):
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/tokenize", json={"prompt": f"text {number}"}, timeout=1)
        wait_for(lambda: queue._num_texts == 0, "all texts to be forgotten")
        go_on.set()
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert sorted(texts) == ["a", "text 0", "text 1", "text 2"]


def test_d1_texts_to_tokenise_count_as_waiting(
    serve: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(max_waiting=1) as server:
        with tokenising(model, monkeypatch) as begun:
            asking = threading.Thread(
                target=lambda: server.http.post("/detokenize", json={"tokens": [5]})
            )
            asking.start()
            assert begun.wait(20)
            refused = server.http.post("/tokenize", json={"prompt": "a"})
        asking.join(30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_c11_tokenize_has_a_limit(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.server.routes._LEAST_TOKENS", 1)  # the context is 256
    assert server.http.post("/tokenize", json={"prompt": "x" * 1024}).json()["count"] == 1024
    for text in ("x" * 1025, "x" * 100_000):
        refused = server.http.post("/tokenize", json={"prompt": text})
        assert refused.status_code == 400
        assert "1024" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_d7_answers_have_a_limit_on_memory(wait_for: Any, serve: Any, stream: bool) -> None:
    wish = {**SHORT, "max_tokens": 200, "logprobs": 20, "n": 8, "ignore_eos": True}
    with serve() as server:
        server.service.queue.memory.allow(3 * 2**20)
        if stream:  # takes what it can send, and holds little
            assert server.http.post(URL, json=wish | {"stream": True}).status_code == 200
        else:
            refused = server.http.post(URL, json=wish)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "out_of_memory")
        assert server.http.post(URL, json=SHORT).status_code == 200
        wait_for(lambda: server.service.queue.memory.held == 0, "all to be given back")


def test_d7_what_the_end_of_a_stream_repeats_is_counted(wait_for: Any, serve: Any) -> None:
    include = ["message.output_text.logprobs"]
    wish = {"input": "hello", "max_output_tokens": 100, "include": include, "stream": True}
    with serve() as server:
        server.service.queue.memory.allow(300_000)
        fits = server.http.post("/v1/responses", json=wish)
        assert '"type":"response.incomplete"' in fits.text
        wish |= {"top_logprobs": 20}
        refused = server.http.post("/v1/responses", json=wish)
        assert '"type":"response.failed"' in refused.text
        assert "answers that are not sent yet may hold" in refused.text
        wait_for(lambda: server.service.queue.memory.held == 0, "all to be given back")


def test_c2_half_sent_bodies_have_a_limit_on_memory(wait_for: Any, serve: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000000\r\n"
    head += b"content-type: application/json\r\n\r\n"
    with serve() as server:
        memory = server.service.queue.memory
        memory.allow(8 * 2**20)
        with server.connect() as first, server.connect() as second:
            first.sendall(head + b" " * 1_500_000)
            wait_for(lambda: memory.held >= 6_000_000, "a body to be counted")
            second.sendall(head + b" " * 1_000_000)
            assert b"503" in second.recv(100)
        wait_for(lambda: memory.held == 0, "bodies to be forgotten")
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c13_what_is_known_of_grammars_is_bounded_and_recursion_refused() -> None:
    assert (faults.cache_info().maxsize or 0) <= 256
    deep = "start: " + "(" * 20_000 + '"a"' + ")" * 20_000
    assert "nested" in fault("grammar", deep)
    assert fault("grammar", 'start: "(" start ")" | "x"') == ""


def test_a_check_of_a_grammar_that_the_system_kills_says_nothing_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Linux does with some process where memory runs out."""
    killed, source = tmp_path / "python", 'start: "c13"'
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", str(killed))
        with pytest.raises(BusyError, match="ended a process that the request needs"):
            fault("grammar", source)
    assert fault("grammar", source) == ""


def test_a_request_ends_with_what_is_there_when_its_time_is_up(
    serve: Any, wait_for: Any, gate: Any
) -> None:
    """Before the first token it is refused; then the next token is the last."""
    with serve() as server:
        late = server.http.post(URL, json={**SHORT, "timeout": 0.2})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        gate.open.set()
        wait_for(server.is_idle, "an idle engine")
    with serve(request_timeout_s=0.5) as server:
        ask = {**SHORT, "max_tokens": 250, "ignore_eos": True}
        gate.open.clear()
        gate.steps_before = 5
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(server.http.post(URL, json={**ask, "timeout": 60}))
        )
        asking.start()
        timed_out = server.service.queue.metrics.timeouts._value
        wait_for(lambda: timed_out.get() == 1, "its time to be up")
        gate.open.set()
        asking.join(60)
        body = answers[0].json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert 1 <= body["usage"]["completion_tokens"] <= 7
        assert "moe_requests_timed_out_total 1.0" in server.http.get("/metrics").text


def test_the_time_of_a_request_counts_while_its_text_and_images_are_prepared(
    serve: Any, wait_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, release = TextCodec.encode, threading.Event()

    def held(*given: Any, **more: Any) -> list[int]:
        release.wait(60)
        return encode(*given, **more)

    async def endless(*_: Any) -> None:
        await asyncio.sleep(60)

    chat = {**CHAT, "messages": [{"role": "user", "content": "x"}]}
    held_up: list[tuple[Any, str, Any]] = [(TextCodec, "encode", held)]
    held_up.append((generation, "fetch_images", endless))
    with serve() as server:
        for target, name, slow in held_up:
            with monkeypatch.context() as patched:
                patched.setattr(target, name, slow)
                late = server.http.post("/v1/chat/completions", json={**chat, "timeout": 0.2})
                assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
                assert not release.is_set()
        release.set()
        wait_for(server.is_idle, "an idle engine")
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c22_nothing_that_clients_write_gets_into_logs_or_other_answers(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "s3cret\nmoe: a line of its own\x1b[31m"
    for body in (SHORT | {"prompt": secret}, SHORT | {secret: 1}, SHORT | {"user": secret}):
        server.http.post(URL, json=body, headers={"authorization": "Bearer s3cret"})
    server.http.get("/" + secret.replace("\n", "%0a").replace("\x1b", "%1b"))
    assert "s3cret" not in caplog.text
    assert "s3cret" not in server.http.get("/metrics").text
    assert "s3cret" not in server.http.get("/v1/status").text


def test_d4_prefixes_are_shared_within_one_salt_only(
    wait_for: Any, serve: Any, text_checkpoint: Path
) -> None:
    def load() -> MoE:
        return MoE.from_pretrained(text_checkpoint, memory={"prefix_tokens": 1000})

    with serve(load=load) as server:

        def hits(salt: str | None) -> int:
            before = server.http.get("/v1/status").json()["engine"]["prefixes"]["hit_tokens"]
            body = {**SHORT, "prompt": "x" * 100, "cache_salt": salt}
            assert server.http.post(URL, json=body).status_code == 200
            wait_for(server.is_idle, "an idle engine")  # known prefixes do not count
            after = server.http.get("/v1/status").json()["engine"]["prefixes"]["hit_tokens"]
            return int(after - before)

        assert [hits(salt) for salt in (None, None, "a", "b", "a")] == [0, 96, 0, 0, 96]
        text = server.http.get("/metrics").text
        assert "moe_prefix_hit_tokens_total 192.0" in text
        assert "moe_prefix_asked_tokens_total 500.0" in text


NOT_HERE = {
    "C14": "tests/moe/text/tool_calls/test_calls.py: parsers take time in proportion to the text",
    "D2": "tests/moe/engine/test_scheduler.py: everybody finishes",
    "D3": "tests/moe/engine/test_engine.py: cancelled in every state, and idle means empty",
    "D5": "tests/moe/engine/test_prefix.py: a flood under one salt costs that salt",
}


def test_every_row_of_the_list_has_a_test_or_a_reason() -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    tested = {row.upper() for row in re.findall(r"(?i)(?<=[_\"])[cd]\d+(?=[-_]|\"\))", text)}
    rows = {f"C{n}" for n in range(1, 25)} | {f"D{n}" for n in range(1, 8)}
    assert tested | set(NOT_HERE) == rows
    assert not tested & set(NOT_HERE)


@pytest.mark.parametrize("names", [("moe-text",), ("AnyIO worker thread",)])
def test_b14_a_shortage_of_threads_is_told_and_is_over_when_it_is_over(
    names: tuple[str, ...], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, missing = threading.Thread.start, threading.Event()

    def starting(thread: threading.Thread) -> None:
        if missing.is_set() and thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    missing.set()
    with serve() as server:
        for _ in range(6):  # more than there are threads for texts
            refused = server.http.post(URL, json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "busy"
            assert refused.headers["retry-after"]
        missing.clear()
        assert server.http.post(URL, json=SHORT).status_code == 200
        assert server.is_idle()


def test_c11_large_bodies_are_checked_one_after_the_other(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else twenty threads of Python keep the engine's from its turn for most of a second."""
    begun, go_on, parse = threading.Semaphore(0), threading.Event(), bodies.parse

    def slow(model: Any, data: bytes, *more: Any) -> Any:
        if len(data) > bodies.HEAVY_BYTES:
            begun.release()
            assert go_on.wait(60)
        return parse(model, data, *more)

    monkeypatch.setattr(bodies, "parse", slow)
    large = {"model": "tiny", "prompt": "x" * 40_000}
    with serve() as server, ThreadPoolExecutor(6) as threads:
        try:
            asked = [threads.submit(server.http.post, "/tokenize", json=large) for _ in range(6)]
            assert begun.acquire(timeout=20)
            assert server.http.post(URL, json=SHORT, timeout=20).status_code == 200
            assert not begun.acquire(blocking=False)
        finally:
            go_on.set()
        assert {each.result(30).status_code for each in asked} == {200}
