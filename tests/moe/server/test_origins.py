"""Web pages of other origins (CORS): those that are allowed may ask, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from moe.errors import ProfileError
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
