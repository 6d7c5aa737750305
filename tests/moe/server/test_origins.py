"""Web pages of other origins (CORS): those that are allowed may ask, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from moe.errors import ProfileError
from moe.server import routes
from moe.settings.profile import load_profile

PAGE, OTHER = "https://page.example", "https://other.example"
BODY = {"prompt": "hello", "max_tokens": 1}
URL = "/v1/completions"


def preflight(server: Any, origin: str) -> Any:
    """What a browser asks before it sends a key or JSON."""
    asks = {"access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    return server.http.options(URL, headers={"origin": origin, **asks})


def allowed(answer: Any) -> str | None:
    origin: str | None = answer.headers.get("access-control-allow-origin")
    return origin


def test_pages_that_are_allowed_may_ask_and_still_need_the_key(serve: Any) -> None:
    with serve(api_key="s3cret", allowed_origins=[PAGE]) as server:
        assert preflight(server, PAGE).status_code == 200
        assert allowed(preflight(server, PAGE)) == PAGE
        assert preflight(server, OTHER).status_code == 400
        assert allowed(preflight(server, OTHER)) is None
        for key, status in (("s3cret", 200), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}", "origin": PAGE}
            answer = server.http.post(URL, json=BODY, headers=headers)
            assert (answer.status_code, allowed(answer)) == (status, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            answer = server.http.post(URL, json=BODY, headers=headers | {"origin": OTHER})
            assert allowed(answer) is None


def test_a_page_cannot_point_its_own_name_here(serve: Any) -> None:
    """All origins may ask, and the name of the host still has to be this one."""
    with serve(allowed_origins=["*"]) as server:
        headers = {"origin": OTHER, "host": "other.example"}
        assert server.http.post(URL, json=BODY, headers=headers).status_code == 400
        answer = server.http.post(URL, json=BODY, headers={"origin": OTHER})
        assert (answer.status_code, allowed(answer)) == (200, "*")


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", '["*"]', "", "https://*.a"])
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ProfileError, match=r'must be like "https://example.org", or "\*" for all'):
        load_profile({"server": {"allowed_origins": [origin]}}, environ={})


@pytest.mark.parametrize("path", ["/metrics", "/v1/status", "/v1/experts/stream", "/v1/models"])
def test_c23_pages_of_other_origins_cannot_make_a_server_without_a_key_work(
    path: str, serve: Any
) -> None:
    """An image or a script needs no CORS, and a stream holds a viewer's place."""
    with serve() as server, serve(allowed_origins=[PAGE]) as open_to_one:
        for site in ("cross-site", "same-site"):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
            for asked in (server, open_to_one):
                refused = asked.http.get(path, headers=headers)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "cross_site"
            named = {**headers, "origin": PAGE}
            with open_to_one.http.stream("GET", path, headers=named) as answer:
                assert answer.status_code == 200
        for site in ("same-origin", "none"):
            with server.http.stream("GET", path, headers={"sec-fetch-site": site}) as answer:
                assert answer.status_code == 200
        assert server.http.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


@pytest.mark.parametrize("trusted", [(), ("127.0.0.0/8",), ("192.0.2.1",)])
def test_c23_only_named_proxies_say_who_asks(
    trusted: tuple[str, ...], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = list[str]()
    caller_of = routes.caller_of

    def noted(request: Any) -> str:
        callers.append(caller_of(request))
        return callers[-1]

    monkeypatch.setattr(routes, "caller_of", noted)
    forged = {"x-forwarded-for": "198.51.100.7"}
    with serve(trusted_proxies=trusted) as server:
        body = {"prompt": "hello"}
        assert server.http.post("/tokenize", json=body, headers=forged).status_code == 200
    assert callers == ["198.51.100.7" if trusted == ("127.0.0.0/8",) else "127.0.0.1"]


def test_proxies_that_are_none() -> None:
    with pytest.raises(ProfileError, match=r"must be an address or a network.*got 'localhost'"):
        load_profile({"server": {"trusted_proxies": ["localhost"]}}, environ={})
