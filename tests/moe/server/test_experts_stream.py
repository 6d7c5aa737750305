"""The experts at work as events: what they say, what they cost, and what is not in them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from moe import MoE, expert_map
from moe.cli import main
from moe.engine.engine import Engine
from moe.server import experts_stream
from moe.server.engine_thread import Errands
from moe.server.experts_stream import ExpertsFeed

STREAM = "/v1/experts/stream"
SECRET = "zebra quagga okapi"
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 60}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_stream, "INTERVAL_S", 0.02)
    monkeypatch.setattr(experts_stream, "MAX_SHARE", 1.0)


@contextmanager
def watching(server: Any, key: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with server.http.stream("GET", STREAM, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def until(events: Iterator[dict[str, Any]], condition: Callable[[Any], bool]) -> dict[str, Any]:
    return next(event for event in events if event["type"] == "snapshot" and condition(event))


def test_the_layout_comes_first_and_counters_are_those_of_the_model(
    server: Any, model: MoE
) -> None:
    with watching(server) as events:
        layout = next(events)
        before = next(events)
        answer = server.http.post("/v1/completions", json=BODY).json()
        made = before["generated_tokens"] + answer["usage"]["completion_tokens"]
        after = until(events, lambda event: event["generated_tokens"] >= made)
    assert layout["type"] == "layout"
    assert layout["memory_plan"] == json.loads(json.dumps(model.memory_plan.as_dict()))
    assert layout["status"]["notices"] == list(model.notices)
    assert [len(layer["bits"]) for layer in layout["layers"]] == [
        layer.num_experts for layer in model.experts.layers
    ]
    assert all(layer["ranks"] is None for layer in layout["layers"])
    stats = model.stats()["layers"]
    assert [layer["tokens"] for layer in after["layers"]] == [
        layer["tokens_per_expert"] for layer in stats
    ]
    places = layout["places"]
    assert {places[int(digit)] for layer in after["layers"] for digit in layer["where"]} == {
        "memory"
    }
    assert after["prompt_tokens"] - before["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert after["first_token"]["count"] == before["first_token"]["count"] + 1
    assert after["first_token"]["seconds"] > before["first_token"]["seconds"]
    assert after["number"] > before["number"]
    assert after["state"] == "ready"


def test_a_text_is_shown_with_the_experts_of_its_tokens(server: Any, model: MoE) -> None:
    def counted() -> list[list[int]]:
        return [layer["tokens_per_expert"] for layer in model.stats()["layers"]]

    before = counted()
    found = server.http.post("/v1/experts/tokens", json={"prompt": SECRET}).json()
    assert "".join(found["tokens"]) == SECRET
    added = [
        [b - a for a, b in zip(*layer, strict=True)]
        for layer in zip(before, counted(), strict=True)
    ]
    for layer, choices in enumerate(found["experts"]):
        assert len(choices) == len(found["tokens"])
        went = [expert for experts in choices for expert in experts]
        assert [went.count(expert) for expert in range(len(added[layer]))] == added[layer]
    refused = server.http.post("/v1/experts/tokens", json={"prompt": SECRET, "model": "other"})
    assert refused.status_code == 404


def test_parts_of_a_text_have_the_experts_of_the_whole(
    server: Any, model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server.http.post("/v1/experts/tokens", json={"prompt": SECRET}).json()
    monkeypatch.setattr("moe.expert_map.PART_TOKENS", 7)
    assert server.http.post("/v1/experts/tokens", json={"prompt": SECRET}).json() == whole


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine does, in order: ``step``, or ``part`` of a text whose experts are shown."""
    did = list[str]()
    step, read = Engine.step, expert_map._read

    def stepping(engine: Engine) -> Any:
        did.append("step")
        return step(engine)

    def part(*arguments: Any) -> Any:
        did.append("part")
        return read(*arguments)

    monkeypatch.setattr(Engine, "step", stepping)
    monkeypatch.setattr(expert_map, "_read", part)
    monkeypatch.setattr(expert_map, "PART_TOKENS", 4)
    return did


def test_c11_texts_of_one_client_do_not_hold_up_the_tokens_of_others(
    server: Any, reading: list[str]
) -> None:
    """Of 8 texts at a time one part is read between two steps, though all wait."""
    done = threading.Event()

    def show() -> None:
        while not done.is_set():
            server.http.post("/v1/experts/tokens", json={"prompt": SECRET})

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(show)
        try:
            answer = server.http.post("/v1/completions", json=LONG)
        finally:
            done.set()
    assert answer.status_code == 200
    first, last = reading.index("step"), len(reading) - reading[::-1].index("step")
    busy = reading[first:last]
    assert busy.count("part") > 10
    assert ("part", "part") not in set(pairwise(busy))


def test_c11_callers_take_turns_text_by_text() -> None:
    errands, read = Errands(), list[str]()

    def text(name: str) -> Iterator[str]:
        for part in range(2):
            read.append(f"{name}{part}")
            yield name

    futures = [errands.add("a", text(f"a{n}")) for n in range(3)]
    futures.append(errands.add("b", text("b")))
    futures[1].cancel()
    for _ in range(12):
        errands.run_part()
    assert errands.idle
    assert read == ["a00", "a01", "b0", "b1", "a20", "a21"]
    assert futures[0].result() == ["a0", "a0"]

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("no")

    begun = errands.add("a", text("c"))
    errands.run_part()
    begun.cancel()
    failed = errands.add("a", broken())
    for _ in range(3):
        errands.run_part()
    assert read[-1] == "c0"
    with pytest.raises(ValueError, match="no"):
        failed.result(0)


def test_d1_texts_count_among_the_requests_that_wait(serve: Any, gate: Any) -> None:
    """They cannot be queued beyond `server.max_waiting`."""
    with serve(max_waiting=3) as server, ThreadPoolExecutor(9) as threads:
        threads.submit(server.http.post, "/v1/completions", json=LONG)
        assert gate.reached.wait(20)
        ask = partial(server.http.post, "/v1/experts/tokens", json={"prompt": SECRET})
        asked = [threads.submit(ask) for _ in range(8)]
        done = [each.result() for each in islice(as_completed(asked), 5)]
        assert {each.status_code for each in done} == {429}
        gate.open.set()
        assert sorted(each.result().status_code for each in asked) == [200] * 2 + [429] * 6


def test_no_text_of_another_client_is_in_it(server: Any) -> None:
    with watching(server) as events:
        said = [json.dumps(next(events))]
        text = server.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        said += [json.dumps(next(events)) for _ in range(4)]
    for word in (*SECRET.split(), text):
        assert word not in "".join(said)


def test_it_is_behind_the_key(serve: Any) -> None:
    with serve(api_key="k3y") as server:
        assert server.http.get(STREAM).status_code == 401
        with watching(server, "k3y") as events:
            assert next(events)["type"] == "layout"


def test_viewers_share_snapshots_and_nothing_is_taken_for_nobody(
    wait_for: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ExpertsFeed] = []

    class Known(ExpertsFeed):
        def __init__(self, queue: Any) -> None:
            super().__init__(queue)
            made.append(self)

    monkeypatch.setattr(experts_stream, "ExpertsFeed", Known)
    with serve() as server:
        (feed,) = made
        server.http.post("/v1/completions", json=BODY)
        assert feed.snapshots == 0
        with watching(server) as first, watching(server) as second:
            number = until(first, lambda event: event["number"] > 3)["number"]
            assert until(second, lambda event: event["number"] >= number)
            assert len(feed.viewers) == 2
        wait_for(lambda: not feed.viewers, "both have gone")
        taken = feed.snapshots
        time.sleep(0.1)  # five intervals
        assert feed.snapshots <= taken + 1  # one may have been under way


def test_too_many_viewers_are_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_stream, "MAX_VIEWERS", 1)
    with serve() as server, watching(server) as events:
        next(events)
        answer = server.http.get(STREAM)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "too_many_viewers"
        assert "1 clients read this stream already" in answer.json()["error"]["message"]


def test_it_ends_when_the_server_drains(serve: Any) -> None:
    with serve() as server, watching(server) as events:
        next(events)
        start = time.monotonic()
        server.service.stop()
        last = list(events)[-1]
        assert time.monotonic() - start < 20
    assert last["type"] == "snapshot"


def fake_queue(state: str = "ready") -> Any:
    return SimpleNamespace(state=state)


@asynccontextmanager
async def feeding(
    monkeypatch: pytest.MonkeyPatch, take: Callable[[ExpertsFeed], tuple[tuple[str, str], float]]
) -> AsyncIterator[ExpertsFeed]:
    monkeypatch.setattr(ExpertsFeed, "_take", take)
    feed = ExpertsFeed(fake_queue())
    yield feed
    for viewer in list(feed.viewers):
        feed.leave(viewer)


def counting(seconds: float, layout: str = "layout") -> Any:
    """Takes numbered snapshots that claim to have cost so much."""

    def take(feed: ExpertsFeed) -> tuple[tuple[str, str], float]:
        feed.snapshots += 1
        return (layout, str(feed.snapshots)), seconds

    return take


def test_snapshots_take_their_share_of_a_processor_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_stream, "MAX_SHARE", 0.01)

    async def run() -> float:
        async with feeding(monkeypatch, counting(0.002)) as feed:
            events = feed.join().events()
            assert [await anext(events) for _ in range(2)] == ["layout", "1"]
            start = time.monotonic()
            assert await anext(events) == "2"
            return time.monotonic() - start

    assert asyncio.run(run()) >= 0.19  # 0.002 s are 1 % of 0.2 s


def test_a_slow_viewer_misses_snapshots_and_gets_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> list[str]:
        async with feeding(monkeypatch, counting(0.0)) as feed:
            slow = feed.join().events()
            seen = [await anext(slow), await anext(slow)]
            while feed.snapshots < 5:
                await asyncio.sleep(0.01)
            return [*seen, await anext(slow)]

    layout, first, later = asyncio.run(run())
    assert (layout, first) == ("layout", "1")
    assert int(later) >= 4


def test_a_later_viewer_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_stream, "INTERVAL_S", 60)

    async def run() -> list[str]:
        async with feeding(monkeypatch, counting(0.0)) as feed:
            early, late = feed.join().events(), None
            assert [await anext(early), await anext(early)] == ["layout", "1"]
            late = feed.join().events()
            return [await asyncio.wait_for(anext(late), 5) for _ in range(2)]

    assert asyncio.run(run()) == ["layout", "1"]


def test_a_snapshot_that_fails_ends_the_streams_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(feed: ExpertsFeed) -> Any:
        if feed.snapshots == 0:
            feed.snapshots += 1
            raise RuntimeError("boom")
        return ("layout", "later"), 0.0

    async def run() -> list[str]:
        async with feeding(monkeypatch, take) as feed:
            with pytest.raises(RuntimeError, match="boom"):
                await anext(feed.join().events())
            again = feed.join().events()  # while the first one has not left yet
            return [await asyncio.wait_for(anext(again), 5) for _ in range(2)]

    assert asyncio.run(run()) == ["layout", "later"]


def test_while_the_model_loads_there_is_its_progress() -> None:
    progress = SimpleNamespace(as_dict=lambda: {"stage": "loading weights", "fraction": 0.25})
    family = SimpleNamespace(name="m", samples=[SimpleNamespace(name="m_total", value=0.0)])
    times = SimpleNamespace(
        name="m",
        samples=[
            SimpleNamespace(name="m_count", value=0.0),
            SimpleNamespace(name="m_sum", value=0.0),
        ],
    )
    counter, histogram = (SimpleNamespace(collect=lambda f=f: [f]) for f in (family, times))
    metrics = SimpleNamespace(
        prompt_tokens=counter, new_tokens=counter, first_token=histogram, between_tokens=histogram
    )
    queue: Any = SimpleNamespace(
        state="loading", progress=progress, model=None, metrics=metrics, engine_status={}
    )
    queue.occupancy = lambda: {"waiting_requests": 0, "running_requests": 0}
    assert experts_stream.layout_text(queue) == ""
    event = experts_stream.snapshot_event(queue)
    assert (event["state"], event["progress"]["fraction"]) == ("loading", 0.25)
    assert (event["layers"], event["cache"]) == ([], None)


def test_top_shows_a_server(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(api_key="k3y") as server:
        assert main(["top", server.url, "--api-key", "k3y", "--once"]) == 0
        shown = capsys.readouterr().out
        assert main(["top", server.url, "--api-key", "wrong", "--once"]) == 2
    assert "wants another key" in capsys.readouterr().err
    for part in ("Qwen3MoeForCausalLM on cpu  ready", "tokens/s", "in memory", "no drafts"):
        assert part in shown
