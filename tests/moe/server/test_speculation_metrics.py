"""What speculation counts is in the metrics, by mode and position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moe import MoE

SETTINGS: dict[str, Any] = {
    "model": {"expert_bits": 8},
    "memory": {"kv_tokens": 512},
    "speculation": {"mode": "auto"},
}
PROMPT = "def f(self, a, b):\n    return"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}


def samples(server: Any) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            yield f"{sample.name} {' '.join(sample.labels.values())}".strip(), sample.value


def test_drafts_are_measured(serve: Any) -> None:
    root = Path(__file__).parents[3]
    model = MoE.from_pretrained(root / "examples/demo-model", SETTINGS)
    with serve(load=lambda: model) as server:
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        stats = server.http.get("/v1/status").json()["stats"]["speculation"]
        found = dict(samples(server))
    assert found["moe_speculation_tokens_total"] == stats["tokens"] == 39  # one comes of the prompt
    assert found["moe_speculation_steps_total"] == stats["steps"] <= 39
    for mode, record in stats["modes"].items():
        for position, counts in enumerate(record["by_position"], 1):
            name = f"total {mode} {position}"
            assert found[f"moe_draft_verified_tokens_{name}"] == counts["verified"]
            assert found[f"moe_draft_accepted_tokens_{name}"] == counts["accepted"]
    assert sum(found[f"moe_speculation_depth_total {d}"] for d in stats["depths"]) == stats["steps"]
    assert found["moe_speculation_gain measured"] == stats["control"]["measured_gain"]


def test_a_model_without_drafts_has_no_such_figures(server: Any) -> None:
    assert "moe_speculation" not in server.http.get("/metrics").text
