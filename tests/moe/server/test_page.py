"""The page as it is served: its files, its policy, what needs the key, and how to turn it off."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

import pytest

from moe.server.page import PATHS, STATIC

OURS = [file for file in STATIC.iterdir() if file.suffix in (".html", ".js", ".css")]


def test_every_file_that_the_page_names_is_served(server: Any) -> None:
    asked, left = set[str](), ["/"]
    while left:
        path = left.pop()
        answer = server.http.get(path)
        assert answer.status_code == 200, path
        asked.add(path)
        base = "/page/index.html" if path == "/" else path
        kind = answer.headers["content-type"].split(";")[0]
        if kind in ("text/html", "text/javascript"):
            text = re.sub(r"/\*.*?\*/|//[^\n\"]*$", "", answer.text, flags=re.DOTALL | re.MULTILINE)
            named = re.findall(r'(?:src|href)="(/[^"]+)"|\bfrom\s*"(\.[^"]+)"', text)
            left += [urljoin(base, a or b) for a, b in named if urljoin(base, a or b) not in asked]
    assert asked <= PATHS
    assert {"/page/main.js", "/page/vendor/uplot/uPlot.esm.js", "/page/style.css"} <= asked


def test_the_policy_lets_only_the_files_run(server: Any) -> None:
    for path in ("/", "/page/main.js"):
        headers = server.http.get(path).headers
        policy = dict(
            part.split(maxsplit=1) for part in headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        for source in ("script-src", "style-src", "img-src", "connect-src"):
            assert policy[source] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_that_has_not_changed_is_not_sent_again(server: Any) -> None:
    tag = server.http.get("/page/main.js").headers["etag"]
    answer = server.http.get("/page/main.js", headers={"if-none-match": tag})
    assert (answer.status_code, answer.content) == (304, b"")


def test_c17_ranges_are_not_served(server: Any) -> None:
    """Merging many of them takes quadratic time in some libraries (CVE-2025-62727)."""
    whole = server.http.get("/page/main.js").content
    many = ",".join(f"{at}-{at}" for at in range(0, 400, 2))
    for ranges in ("0-9", "-1", many):
        answer = server.http.get("/page/main.js", headers={"range": f"bytes={ranges}"})
        assert (answer.status_code, answer.content) == (200, whole)
        assert answer.headers["accept-ranges"] == "none"


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_our_files_name_no_other_origin_and_no_inline_code(file: Any) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|\binnerHTML\b|\beval\b|new Function|document\.write", text)
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_each_library_has_its_licence_and_its_version() -> None:
    listed = (STATIC / "vendor" / "README.md").read_text()
    for folder in (STATIC / "vendor").iterdir():
        if folder.is_dir():
            assert (folder / "LICENSE").stat().st_size > 500, folder.name
            assert f"/{folder.name}) |" in listed.lower(), folder.name


def test_with_a_key_the_files_are_public_and_nothing_else_is(serve: Any) -> None:
    with serve(api_key="k3y") as server:
        for path in PATHS:
            assert server.http.get(path).status_code == 200, path
        for path in ("/page/", "/page/none.js", "/page/../moe", "/v1/models", "/openapi.json"):
            assert server.http.get(path).status_code == 401, path
        key = {"authorization": "Bearer k3y"}
        for path in ("/page/none.js", "/page/..%2f__init__.py", "/page/%2fetc/passwd"):
            assert server.http.get(path, headers=key).status_code == 404, path


def test_it_can_be_turned_off(serve: Any) -> None:
    with serve(page=False) as server:
        assert server.http.get("/").status_code == 404
        assert server.http.get("/page/main.js").status_code == 404
        assert server.http.get("/v1/models").status_code == 200
