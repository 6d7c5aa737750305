"""API keys: several with names and limits; compared as bytes, in constant time."""

from __future__ import annotations

import hmac
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from moe import MoE
from moe.errors import MoEError
from moe.server import keys as keys_module
from moe.server.errors import APIError
from moe.server.keys import make_keys
from moe.server.listener import bind
from moe.server.serve import Service, make_tls
from moe.settings.profile import load_profile
from tests.moe.server.conftest import Running

URL = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


def header(key: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key}


@pytest.mark.parametrize(
    "key", ["clé", "ends in \u00e0", "a\u0085", "\udcff\udcfe", "with space", "日本"]
)
def test_c15_any_key_that_can_be_written_is_known(serve: Any, key: str) -> None:
    """`\u00e0` ends in the byte A0, which is a space in Latin-1; lone surrogates stand for bytes
    of a command line that are not UTF-8."""
    sent = key.encode(errors="surrogateescape")
    with serve(api_key=key) as server:
        for name in (b"authorization", b"x-api-key"):
            value = b"Bearer " + sent if name == b"authorization" else sent
            assert server.http.get("/v1/models", headers={name: value}).status_code == 200
            wrong = server.http.get("/v1/models", headers={name: value + b"x"})
            assert wrong.status_code == 401


def test_c15_the_comparison_is_constant_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared, whichever is right, and by `hmac.compare_digest` only."""
    compared = list[bytes]()

    def spy(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(keys_module, "hmac", type("Spy", (), {"compare_digest": staticmethod(spy)}))
    known = keys_module.ApiKeys([keys_module.ApiKey(n, n.encode()) for n in ("a", "b", "c")])
    for sent, name in ((b"a", "a"), (b"c", "c"), (b"d", None)):
        compared.clear()
        found = known.find(sent)
        assert (found and found.name) == name
        assert len(compared) == 3
        assert all(len(digest) == 32 for digest in compared)


FILE = """
alice: s3cret
bob: {key: other, requests_per_minute: 3}
carol: {key: third, tokens_per_day: 10}
"""


def test_keys_of_a_file_have_limits_of_their_own(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    with serve(keys=path) as server:

        def ask(key: bytes) -> httpx.Response:
            return server.http.post(URL, json=SHORT, headers=header(key))

        assert [ask(b"s3cret").status_code for _ in range(5)] == [200] * 5
        assert [ask(b"other").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [ask(b"third").status_code for _ in range(3)] == [200, 200, 429]  # 9 tokens each
        refused = ask(b"other")
        assert refused.json()["error"]["code"] == "key_limit"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "other" not in refused.text
        assert ask(b"s3cret").status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": "0123456789"}),
        ("/detokenize", {"tokens": [5] * 10}),
        ("/v1/experts/tokens", {"prompt": "0123456789"}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [
            {"role": "user", "content": "0123456789"}]}),
    ],
)  # fmt: skip
def test_every_route_that_reads_a_text_costs_its_tokens(
    route: str, body: Any, serve: Any, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    with serve(keys=path) as server:
        answers = [server.http.post(route, json=body, headers=header(b"third")) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "10 tokens a day" in answers[1].text


def test_what_one_limit_refuses_counts_for_no_other() -> None:
    limits = keys_module.KeyRecord(
        key=SecretStr("x"), requests_per_minute=3, requests_at_once=1, tokens_per_day=10
    )
    key = keys_module.ApiKey("bob", b"x", limits)
    key.begin()
    for _ in range(9):
        with pytest.raises(APIError, match="1 requests at once"):
            key.begin()
    key.end()
    key.spend(10)
    for _ in range(9):
        with pytest.raises(APIError, match="10 tokens a day"):
            key.begin()
    key.renew(b"x", limits.model_copy(update={"tokens_per_day": None}))
    for _ in range(2):
        key.begin()
        key.end()
    with pytest.raises(APIError, match="3 requests a minute"):
        key.begin()


def test_a_key_is_revoked_while_the_server_runs(
    serve: Any, tmp_path: Path, wait_for: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(keys_module, "WATCH_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(FILE)
    with serve(keys=path, api_key="root") as server:

        def asked(key: bytes) -> int:
            return int(server.http.get("/v1/models", headers=header(key)).status_code)

        def write(text: str) -> None:
            fresh = tmp_path / "fresh"
            fresh.write_text(text)
            fresh.replace(path)

        assert [asked(b"other") for _ in range(2)] == [200, 200]
        write("bob: {key: renewed, requests_per_minute: 3}\ndora: fifth\n")
        wait_for(lambda: asked(b"fifth") == 200, "the new file")
        assert [asked(key) for key in (b"s3cret", b"other", b"root")] == [401, 401, 200]
        assert [asked(b"renewed") for _ in range(2)] == [200, 429], "what bob has used is used"
        for broken in ("{", "a: ''", ""):
            caplog.clear()
            write(broken)
            wait_for(lambda: "stay as they were" in caplog.text, "a word about it")
            assert [asked(b"fifth"), asked(b"s3cret")] == [200, 401]
        path.unlink()
        wait_for(lambda: "No such file" in caplog.text, "a word about it")
        assert asked(b"fifth") == 200
        write("dora: sixth\n")
        wait_for(lambda: asked(b"sixth") == 200, "the file again")
        assert asked(b"fifth") == 401
        assert not [word for word in ("sixth", "fifth", "renewed") if word in caplog.text]


def test_keys_share_no_known_prefixes(serve: Any, text_checkpoint: Path, tmp_path: Path) -> None:
    """With a prefix cache by default, times would tell one tenant what another has asked."""
    path = tmp_path / "keys"
    path.write_text("dave: fourth\nerin: fifth\n")
    body = SHORT | {"prompt": "What only dave and erin may know. "}
    with serve(keys=path, load=lambda: MoE.from_pretrained(text_checkpoint)) as server:
        known = []
        for key in (b"fourth", b"fourth", b"fifth"):
            usage = server.http.post(URL, json=body, headers=header(key)).json()["usage"]
            known.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert known == [0, 32, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a line NAME: KEY"),
        ("a: [1]", "a: key: "),
        ("a: ''", "the API key of a in .* is empty"),
        ("a: {key: x, day: 1}", "a: day: Extra inputs"),
        ("a: {key: x, requests_per_minute: 0}", "greater than or equal to 1"),
        ("{", "are not YAML"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(MoEError, match=message):
        make_keys(None, str(path))


def test_files_of_keys_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MoEError, match=r"^cannot read the API keys in .*none: No such file"):
        make_keys(None, str(tmp_path / "none"))
    with pytest.raises(MoEError, match=r"^cannot read the API keys in "):
        make_keys(None, str(tmp_path))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_with_a_certificate_of_its_own(model: Any, certificate: Path) -> None:
    service = Service(
        lambda _: model,
        ["tiny"],
        load_profile({}, environ={}),
        bind("127.0.0.1", 0),
        tls=make_tls(str(certificate), None),
    )
    server = Running(service)
    trusted = ssl.create_default_context(cafile=str(certificate))
    assert server.url.startswith("https://")
    answer = httpx.post(server.url + URL, json=SHORT, verify=trusted)
    assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")  # nobody has vouched for it
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health")
    server.stop()


def test_certificates_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    with pytest.raises(MoEError, match=r"cannot use the certificate .*x\.pem"):
        make_tls(str(tmp_path / "x.pem"), None)
    with pytest.raises(MoEError, match="--ssl-keyfile needs --ssl-certfile"):
        make_tls(None, "key.pem")
