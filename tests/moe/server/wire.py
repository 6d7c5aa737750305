"""Server-sent events as they come over the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events_of(http: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a stream says; every event goes by the name of its type."""
    answer = http.post(route, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_wrong_types(http: httpx.Client, route: str, body: dict[str, Any], fields: Any) -> None:
    """Whatever a field is, the answer is an answer or says what is wrong with it."""
    values: list[Any] = ["x", [], {}, True, 3, [1], {"a": 1}, [{}], [{"type": []}], [[]], 1e300]
    for field in fields:
        for value in [*values, *([{"role": "user", "content": value}] for value in values)]:
            answer = http.post(route, json=body | {field: value})
            assert answer.status_code in (200, 400, 404), (field, value, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"]
