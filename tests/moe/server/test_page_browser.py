"""The page in a real browser: a chat, the experts at work, a wrong key, a server that goes away.

Skipped, with the reason, where no browser is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe import MoE
from tests.browser import Browser, open_browser, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
ROOT = Path(__file__).parents[3]
DEMO, DATA = ROOT / "examples" / "demo-model", ROOT / "tests" / "data"
LIMITED = "document.querySelector('#max-tokens').value = arguments[0]"
SENT = (
    "const input = document.querySelector('#input'); input.value = arguments[0];"
    "document.querySelector('#form').requestSubmit()"
)
ANSWER = ".message.assistant:last-child"
PIXELS = "return document.querySelector('#map').toDataURL()"
OVERFLOW = "return document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Browser]:
    """The page of the shared server. Afterwards: the console is empty, and nothing else was asked
    than this server."""
    browser.complaints()
    browser.origins()
    browser.show(server.url)
    browser.wait(lambda: browser.text("#state") == "Live")
    yield browser
    assert browser.complaints() == []
    assert browser.origins() == {server.url}
    browser.driver.get("about:blank")


def ask(browser: Browser, text: str, tokens: int | None = 12) -> None:
    browser.run(LIMITED, "" if tokens is None else tokens)
    browser.run(SENT, text)


def ended(browser: Browser) -> Any:
    return browser.wait(lambda: browser.text(f"{ANSWER} footer"))


def test_a_chat_streams_and_can_be_answered_again(page: Browser) -> None:
    ask(page, "hello")
    assert "12 tokens" in ended(page)
    first = page.text(f"{ANSWER} > .text")
    assert first.strip()
    assert page.text(".message.user .text") == "hello"
    page.click(f"{ANSWER} .again")
    assert "12 tokens" in ended(page)
    assert page.text(f"{ANSWER} > .text") == first  # greedy
    assert page.run("return document.querySelectorAll('.message').length") == 2
    ask(page, "more")
    ended(page)
    assert page.run("return document.querySelectorAll('.message').length") == 4
    page.click("#clear")
    assert page.run("return document.querySelectorAll('.message').length") == 0


def test_stop_ends_the_request(page: Browser, server: Any, gate: Any, wait_for: Any) -> None:
    gate.steps_before = 3
    ask(page, "hello", None)
    page.wait(lambda: server.occupancy["running_requests"] == 1)
    page.click("#stop")
    assert "Stopped" in ended(page)
    gate.open.set()
    wait_for(server.is_idle, "the request was cancelled")
    assert page.run("return document.querySelector('#stop').hidden")


def test_what_a_model_writes_is_shown_and_runs_nothing(page: Browser, say: Any) -> None:
    say(
        "# Hi\n**bold** `code` [a](https://example.org/)\n\n"
        "<img src='https://example.org/x.png' onerror='window.hit = 1'>"
        "<script>window.hit = 1</script><b style='color:red' onclick='hit = 1'>b</b>"
        "[x](javascript:window.hit=1)"
    )
    ask(page, "hello", None)
    ended(page)
    html = page.run(f"return document.querySelector('{ANSWER} > .text').innerHTML")
    for shown in ("<h1>Hi</h1>", "<strong>bold</strong>", "<code>code</code>", "noopener"):
        assert shown in html
    assert "&lt;script&gt;" in html  # HTML is shown as what it is
    for gone in ("<img", "<script", "<b", "javascript:"):
        assert gone not in html
    assert page.run("return window.hit ?? null") is None


def test_the_heat_map_moves_and_an_expert_can_be_chosen_by_keys(
    page: Browser, server: Any, model: MoE
) -> None:
    before = page.run(PIXELS)
    ask(page, "hello hello hello", 60)
    page.wait(lambda: page.run(PIXELS) != before)
    ended(page)
    page.run("document.querySelector('[data-span=all]').click()")
    page.type("#map", "\ue015\ue014")  # down, right
    assert page.text("#expert-title") == "Layer 1, expert 1"
    tokens = model.stats()["layers"][1]["tokens_per_expert"]
    page.wait(lambda: f"{tokens[1]:,}, number" in page.text("#expert-facts"))
    assert "in memory" in page.text("#expert-facts")
    page.click("#own-ask")
    page.wait(lambda: "tokens went to this expert" in page.text("#own-count"))
    marked = page.run("return document.querySelectorAll('#own-text mark').length")
    assert page.text("#own-count").startswith(f"{marked} of the last ")
    assert "hello hello hello" in page.text("#own-text")
    page.run("document.querySelector('#busiest').open = true")
    page.wait(lambda: "in memory" in page.text("#busiest tbody"))
    page.type("#map", "\ue00c")  # Escape
    assert page.run("return document.querySelector('#expert').hidden")


def test_the_heat_map_follows_the_domain_of_the_text(browser: Browser, serve: Any) -> None:
    """On the shipped model: with prose the busiest experts are those that prose goes to, with C++
    soon those of C++."""

    def busiest() -> set[tuple[int, ...]]:
        rows = browser.run(
            "return [...document.querySelectorAll('#busiest tbody tr')]"
            ".map(row => [...row.cells].slice(0, 2).map(cell => Number(cell.textContent)))"
        )
        return {tuple(row) for row in rows}

    def tokens(model: MoE) -> NDArray[np.int64]:
        return np.array([each["tokens_per_expert"] for each in model.stats()["layers"]])

    def read(model: MoE, text: str) -> set[tuple[int, ...]]:
        """Ask about a text; the experts that got the most of it."""
        before = tokens(model)
        ask(browser, text, 1)
        ended(browser)
        went_LE = tokens(model) - before
        hottest = np.argsort(went_LE, axis=None)[::-1][: len(busiest()) or 12]
        return {tuple(place) for place in np.stack(np.unravel_index(hottest, went_LE.shape), 1)}

    prose, code = (
        [text[at : at + 2000] for at in range(0, 16000, 2000)]
        for text in ((DATA / f"heldout_{kind}.txt").read_text() for kind in ("prose", "cpp"))
    )
    with serve(load=lambda: MoE.from_pretrained(DEMO)) as server:
        browser.show(server.url)
        browser.wait(lambda: browser.text("#state") == "Live" and server.service.queue.model)
        browser.run("document.querySelector('#busiest').open = true")
        browser.wait(busiest)
        model = server.service.queue.model
        of_prose = read(model, prose[0])
        browser.wait(lambda: len(busiest() & of_prose) > 6)
        # What is new weighs more than what was, so it takes no more than a few texts.
        of_code = read(model, code[0])
        for text in code[1:]:
            if len(busiest() & of_code) > len(busiest() & of_prose):
                break
            read(model, text)
        browser.wait(lambda: len(busiest() & of_code) > len(busiest() & of_prose))
        browser.driver.get("about:blank")


def test_the_panels_say_what_the_status_says(page: Browser, model: MoE) -> None:
    for line in model.memory_plan.lines:
        assert not line.bytes or line.name in page.text("#memory-legend")
    status = model.status()
    assert status["fused"]["why"] in page.text("#how")
    assert status["speculation"]["why"] in page.text("#drafts-why")
    for notice in status["notices"]:
        assert notice in page.text("#notices")
    assert page.run("return document.querySelector('#cache-card').hidden")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 1600])
def test_it_fits_and_has_names_for_everything(
    page: Browser, server: Any, width: int, dark: bool
) -> None:
    page.show(server.url, width, 900, dark=dark)
    page.wait(lambda: page.text("#state") == "Live")
    for view in ("chat", "live"):
        page.run(f"document.querySelector('.views [data-view={view}]').click()")
        ask(page, "hello", 4)
        ended(page)
        assert page.run(OVERFLOW) <= 0
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, textarea, canvas, summary')]"
        ".filter(e => e.checkVisibility() && !e.closest('[aria-hidden=true]'))"
        ".filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []


def test_text_has_contrast(page: Browser, server: Any) -> None:
    """WCAG AA: 4.5 to 1 for text, in both themes."""
    contrast = (
        "const of = name => { const e = document.createElement('i'); document.body.append(e);"
        "e.style.color = `var(${name})`; const c = getComputedStyle(e).color.match(/[\\d.]+/g)"
        ".slice(0, 3).map(v => v / 255)"
        ".map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);"
        "e.remove(); return .2126 * c[0] + .7152 * c[1] + .0722 * c[2] };"
        "const [a, b] = [of(arguments[0]), of(arguments[1])].sort((a, b) => b - a);"
        "return (a + .05) / (b + .05)"
    )
    for dark in (False, True):
        page.show(server.url, dark=dark)
        for ground in ("--card", "--ground"):
            for text in ("--text", "--soft", "--accent", "--bad", "--wait"):
                assert page.run(contrast, text, ground) >= 4.5, (dark, text, ground)
        assert page.run(contrast, "--on-accent", "--accent") >= 4.5
        assert page.run(contrast, "--text", "--tint") >= 4.5
    page.wait(lambda: page.text("#state") == "Live")


def test_a_wrong_key_is_told_and_the_right_one_works(browser: Browser, serve: Any) -> None:
    with serve(api_key="k3y") as server:
        browser.show(server.url)
        browser.wait(lambda: browser.run("return document.querySelector('dialog').open"))
        assert browser.text("#key-error") == ""
        browser.type("#key", "wrong\n")
        browser.wait(lambda: "missing or wrong" in browser.text("#key-error"))
        browser.type("#key", "k3y\n")
        browser.wait(lambda: browser.text("#state") == "Live")
        browser.wait(lambda: browser.text("#model") == "tiny")
        ask(browser, "hello", 3)
        assert "3 tokens" in ended(browser)
        assert not browser.run("return document.querySelector('dialog').open")
        assert browser.run("return Object.keys(localStorage).join() + document.cookie") == ""
        browser.driver.get("about:blank")


def test_a_server_that_goes_away_and_comes_back(browser: Browser, serve: Any) -> None:
    with serve() as server:
        browser.show(server.url)
        browser.wait(lambda: browser.text("#state") == "Live")
        port = server.service.listener.getsockname()[1]
    browser.wait(lambda: browser.text("#state") == "No connection")
    ask(browser, "hello")
    assert "connection to the server broke" in ended(browser)

    with serve(port=port):
        browser.wait(lambda: browser.text("#state") == "Live")
        browser.click(f"{ANSWER} .again")
        browser.wait(lambda: "12 tokens" in browser.text(f"{ANSWER} footer"))
        browser.driver.get("about:blank")
