"""Images in requests of all three dialects; hostile ones are refused and the server goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from moe import MoE
from moe.server import image_links
from moe.server.openai.request import ChatMessage
from tests.moe.image_models import make, picture
from tests.moe.server.conftest import Running, Serve
from tests.moe.test_images import HOSTILE, SMALL, data_url, png

URL = data_url(png(picture(1, 64, 96)))
SAID = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def seeing(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("seeing")
    make("qwen3_vl_moe", path)
    with serve(load=lambda: MoE.from_pretrained(path, SMALL), allow_image_urls=True) as running:
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
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], **SAID}
    assert seeing.http.post("/v1/chat/completions", json=body).status_code == 400
    marks = chat(URL)
    marks["messages"][0]["content"][0]["text"] = "<|image_pad|>"
    answer = seeing.http.post("/v1/chat/completions", json=marks)
    assert answer.status_code == 400
    assert "processor refused" in answer.json()["error"]["message"]
    assert seeing.http.post("/v1/chat/completions", json=chat(URL)).status_code == 200


PHOTO = png(picture(1, 64, 96))
STUCK = threading.Event()


class Host(BaseHTTPRequestHandler):
    """Another host, with images behind some of its paths."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/slow":
            STUCK.wait(30)
        elif self.path.startswith("/photo"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PHOTO)
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                pass
        elif self.path == "/nonsense":
            self.wfile.write(b"hello\r\n\r\n")
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """The other host; its address, this machine's, counts as public."""
    monkeypatch.setattr(image_links, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(image_links, "is_own", lambda _: False)
    monkeypatch.setattr(image_links, "PORTS", range(1, 2**16))
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        STUCK.set()
        server.shutdown()
        thread.join()


def test_links_are_fetched_and_limited(
    seeing: Running, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"http://127.0.0.1:{host.server_port}"
    said = seeing.http.post("/v1/chat/completions", json=chat(URL)).json()["choices"][0]["message"]
    for link in (
        f"{base}/photo%20of?a=\u00e4 b",
        f"{base}/to//to//photo",
        f"{base}/to/{base}/photo",
    ):
        answer = seeing.http.post("/v1/chat/completions", json=chat(link))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"] == said
    assert ("/photo%20of?a=%C3%A4%20b", f"127.0.0.1:{host.server_port}") in host.asked
    source = {"type": "image", "source": {"type": "url", "url": f"{base}/photo"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [source, source]}]}
    host.asked.clear()
    count = seeing.http.post("/v1/messages/count_tokens", json=body)
    assert count.status_code == 200, count.text
    assert [path for path, _ in host.asked] == ["/photo"]  # once a prompt
    refused = {
        f"{base}/none": "status 404",
        f"{base}/nonsense": "no answer",
        f"{base}/large": "4194304 bytes",
        f"{base}/to//to//to//to//photo": "more than 3 times",
        f"{base}/to/file:///etc/passwd": "must begin with http",
        f"{base}/to/http://[::1]:{host.server_port}/photo": "not public",
        f"http://me:secret@127.0.0.1:{host.server_port}/photo": "no password",
        "http://127.0.0.1:1/photo": "no answer",
        "http://[::/photo": "must begin with http",
        f"https://127.0.0.1:{host.server_port}/photo": "no answer",
    }
    for link, why in refused.items():
        answer = seeing.http.post("/v1/chat/completions", json=chat(link))
        assert answer.status_code == 400, (link, answer.text)
        assert why in answer.json()["error"]["message"], link
    monkeypatch.setattr(image_links, "SECONDS", 0.2)
    answer = seeing.http.post("/v1/chat/completions", json=chat(f"{base}/slow"))
    assert answer.status_code == 400
    assert "took more than 0.2 s" in answer.json()["error"]["message"]
    monkeypatch.setattr(image_links, "is_public", lambda _: False)
    host.asked.clear()
    assert seeing.http.post("/v1/chat/completions", json=chat(f"{base}/photo")).status_code == 400
    assert host.asked == []


@pytest.mark.parametrize(
    ("allowed", "images", "count"),
    [
        (False, object(), 1),
        (True, "it reads text", 1),
        (True, object(), image_links.MAX_IMAGES + 1),
    ],
)
def test_links_stay_where_nobody_would_look_at_them(
    allowed: bool, images: object, count: int
) -> None:
    link = {"type": "image_url", "image_url": {"url": "http://a.example/"}}
    message = ChatMessage.model_validate({"role": "user", "content": [link] * count})
    queue = SimpleNamespace(model=SimpleNamespace(codec=SimpleNamespace(images=images)))
    settings = SimpleNamespace(allow_image_urls=allowed)
    request = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(queue=queue, settings=settings))
    )
    asyncio.run(image_links.fetch_images(cast(Request, request), [message]))
    assert cast(Any, message.content)[0]["type"] == "image_url"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("192.168.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
        ("::ffff:127.0.0.1", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("2002:7f00:1::", False), ("64:ff9b::a00:1", False), ("::", False),
        ("::ffff:93.184.216.34", True), ("168.63.129.16", False), ("192.0.0.192", False),
        ("64:ff9b:1::a00:1", False), ("::ffff:0:127.0.0.1", False), ("fec0::1", False),
        ("5f00::1", False), ("2001:0:7f00:1::", False), ("3fff::1", False), ("::7f00:1", False),
        ("192.88.99.1", False), ("255.255.255.255", False), ("ff0e::1", False),
        ("4000::1", False), ("2001:db8::1", False), ("2a00:1450:4001::1", True),
    ],
)  # fmt: skip
def test_c18_public_addresses(address: str, public: bool) -> None:
    assert image_links.is_public(address) is public


@given(st.ip_addresses())
def test_c18_what_python_calls_private_is_not_public(address: Any) -> None:
    """ipaddress has lists of its own."""
    if getattr(address, "ipv4_mapped", None) is not None:
        address = address.ipv4_mapped
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert not image_links.is_public(str(address))


def test_c18_links_lead_to_no_other_port_and_not_to_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why(url: str) -> str:
        with pytest.raises(image_links._RefusedError) as refused:
            asyncio.run(image_links.fetch(url, lambda _: None))
        return str(refused.value)

    for port in (1, 22, 8000, 8080, 65535):
        assert why(f"http://93.184.216.34:{port}/") == "links must have the port 80 or 443"
    for url in ("http://a..b/", f"http://{'a' * 64}.example/"):
        assert why(url) == "its host's name is not valid"
    assert (image_links.is_own("127.0.0.1"), image_links.is_own("192.0.2.77")) == (True, False)
    monkeypatch.setattr(image_links, "is_public", lambda _: True)  # as an address of ours may be
    for url in ("http://127.0.0.1/", "https://127.0.0.1:80/"):
        assert why(url) == "its host has an address that is not public"


def test_c18_names_of_one_caller_do_not_hold_up_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        assert host != "slow.example" or go_on.wait(30)
        return [(0, 0, 0, "", ("93.184.216.34", 80))]

    monkeypatch.setattr(image_links.socket, "getaddrinfo", look_up)

    async def run() -> None:
        slow = [
            asyncio.ensure_future(image_links.public_address("slow.example", 80, "one"))
            for _ in range(40)
        ]
        for _ in range(3):
            found = await image_links.public_address("quick.example", 80, "other")
            assert found == "93.184.216.34"
        assert not any(each.done() for each in slow)
        go_on.set()
        await asyncio.gather(*slow)

    asyncio.run(run())


def test_a_model_that_reads_text_refuses(server: Running) -> None:
    answer = server.http.post("/v1/chat/completions", json=chat(URL))
    assert answer.status_code == 400
    said = "the messages have images, and this model reads text only"
    assert answer.json()["error"]["message"] == said
