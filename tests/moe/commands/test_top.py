"""``moe top``: figures from two snapshots, the screen, and servers that it cannot show."""

from __future__ import annotations

import io
from collections.abc import Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moe.cli import main
from moe.commands.top import HOT, PLACES, TopScreen, _binned, figures, size
from moe.expert_map import ELSEWHERE
from offload.offloaded import PLACES as STREAMED

LAYOUT: dict[str, Any] = {
    "type": "layout",
    "places": [*STREAMED, ELSEWHERE],
    "layers": [{"bits": [8] * 6, "ranks": None}] * 3,
    "memory_plan": {"lines": [{"name": "trunk", "bytes": 2**20}]},
    "status": {
        "architecture": "Tiny",
        "device": "cpu",
        "packing": {"enabled": True, "why": ""},
        "fused": {"enabled": False, "why": "not equal"},
        "speculation": {"enabled": False, "why": "speculation.mode is off"},
        "notices": ["a notice"],
    },
}
FIRST: dict[str, Any] = {
    "type": "snapshot",
    "number": 1,
    "time": 100.0,
    "state": "ready",
    "progress": None,
    "prompt_tokens": 10,
    "generated_tokens": 100,
    "first_token": {"count": 1, "seconds": 0.5},
    "between_tokens": {"count": 0, "seconds": 0.0},
    "occupancy": {"running_requests": 2, "waiting_requests": 1, "kv_tokens": 50},
    "kv_tokens_limit": 1000,
    "layers": [{"tokens": [0] * 6, "where": "444000"} for _ in range(3)],
    "cache": {"hits": 0, "misses": 0, "stall_seconds": 0.0, "disk_bytes": 0},
    "drafts": None,
    "ranks": None,
}
SECOND = deepcopy(FIRST) | {
    "number": 2,
    "time": 102.0,
    "generated_tokens": 150,
    "first_token": {"count": 3, "seconds": 1.5},
    "cache": {"hits": 30, "misses": 10, "stall_seconds": 0.5, "disk_bytes": 4 * 2**20},
    "drafts": {"ngram": {"drafts": 2, "verified": 8, "accepted": 6}},
    "ranks": [{"rank": 0, "tokens": 5, "served": 1200, "seconds": 0.25}, None],
}


def shown(*events: dict[str, Any], width: int = 100, height: int = 40) -> str:
    screen, out = TopScreen("http://x"), io.StringIO()
    for event in events:
        screen.take(event)
    Console(file=out, width=width, height=height, color_system="truecolor").print(screen)
    return out.getvalue()


def test_figures_are_differences_over_time() -> None:
    assert figures(FIRST, SECOND) == {
        "tokens/s": "25.0",
        "prompt tokens/s": "0.0",
        "first token": "0.50 s",
        "running, waiting": "2, 1",
        "KV tokens": "50 of 1,000",
        "cache hits": "75%",
        "from disk/s": "2 MiB",
        "waiting for disk": "25%",
    }


def test_the_screen_says_what_runs_and_what_is_off() -> None:
    text = shown(LAYOUT, FIRST, SECOND)
    for part in ("Tiny on cpu", "ready", "trunk 1 MiB", "25.0", "in memory", "on disk", "ngram"):
        assert part in text
    for part in ("6 (75%)", "1,200", "fused is off: not equal", "a notice"):
        assert part in text
    assert "packing" not in text
    assert "no drafts: speculation.mode is off" in shown(LAYOUT, FIRST)


def test_before_there_is_a_model_it_says_how_far() -> None:
    loading = FIRST | {"state": "loading", "progress": {"fraction": 0.25}, "layers": []}
    assert "loading 25%" in shown(loading)


def test_a_server_that_began_again_has_no_rates_yet() -> None:
    again = FIRST | {"generated_tokens": 0, "time": 200.0}
    assert "-25" not in shown(LAYOUT, SECOND, again)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=300), st.integers(1, 200))
def test_a_column_shows_the_busiest_of_its_experts(heat: list[float], width: int) -> None:
    columns = _binned(heat, ["memory"] * len(heat), width)
    assert len(columns) <= max(width, 1)
    strongest = max(column[1] for column in columns)
    assert max(heat) < HOT or strongest == PLACES["memory"][1][1]


def test_every_place_of_the_stream_has_a_name_and_a_colour() -> None:
    assert {*STREAMED, ELSEWHERE} == set(PLACES)


@pytest.mark.parametrize(("number", "text"), [(5, "5 B"), (2048, "2 KiB"), (3 * 2**40, "3 TiB")])
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


@pytest.fixture
def refusing() -> Iterator[Any]:
    """A server that answers with the status in its path."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path.split("/")[1]))

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "wants another key; give it by --api-key or MOE_API_KEY"),
        (404, "has no /v1/experts/stream; it is not moe, or an older one"),
        (503, "answers with status 503"),
    ],
)
def test_what_a_server_refuses_is_told(
    refusing: str, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"{refusing}/{status}"]) == 2
    assert f"moe: the server at {refusing}/{status} {says}\n" == capsys.readouterr().err


def test_no_server_and_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:1", "--once"]) == 2
    assert "cannot reach a server at http://127.0.0.1:1: " in capsys.readouterr().err
    assert main(["top", "127.0.0.1:1", "--once"]) == 2
    assert "cannot reach a server at http://127.0.0.1:1: " in capsys.readouterr().err
    assert main(["top", "ftp://localhost"]) == 2
    assert "it begins with http:// or https://" in capsys.readouterr().err
