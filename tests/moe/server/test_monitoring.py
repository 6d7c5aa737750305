"""The Grafana dashboard and the alert rules ask only for metrics and labels that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from experts.manifest import read_manifest
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.server.metrics import Metrics
from moe.settings import ModelSettings
from moe.speculate.speculator import ModeRecord, Report
from offload.capacity import slot_bytes

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
OF_PROMETHEUS = {"job", "instance", "le"}
SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0, "prefix_tokens": 64},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
}
RANK = dict.fromkeys(
    ("rank", "tokens", "served", "seconds", "bytes_out", "bytes_back", "meta_bytes"), 1
)


@pytest.fixture(scope="module")
def labels_of(
    text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str]]:
    """Of each name in the metrics of a server that offloads, drafts and has ranks, its labels."""
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(text_checkpoint, tmp_path_factory.mktemp("stores") / "store", settings)
    plan = MoE.from_pretrained(store, SMALL).memory_plan
    rest = sum(line.bytes for line in plan.lines if line.name != "experts")
    room = (rest + 8 * slot_bytes(read_manifest(store), 8) + 16) / GIB
    model = MoE.from_pretrained(store, SMALL | {"memory": SMALL["memory"] | {"device_gib": room}})
    model.generate([5, 9, 2], SamplingParams(max_new_tokens=2, temperature=0.0))
    report, record = Report(), ModeRecord()
    record.drafts[2, 1] = 1
    report.modes = {"ngram": record}
    stats = model.stats() | {
        "speculation": report.figures() | {"control": None},
        "parallel": {"ranks": [RANK]},
    }
    engine = model.loop()
    readings = {"stats": stats, "engine": engine.status(), "occupancy": engine.occupancy()}
    metrics = Metrics(lambda: readings)
    metrics.requests.labels("/v1/completions", "200").inc()
    model.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def names_in(expression: str) -> list[tuple[str, set[str]]]:
    """Metrics of an expression, each with the labels that select it."""
    return [
        (name, set(re.findall(r"(\w+)\s*[=!]~?", selector)))
        for name, selector in re.findall(r"\b(moe_\w+)(\{[^}]*\})?", expression)
    ]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_an_expression_asks_for_what_there_is(
    title: str, expression: str, labels_of: dict[str, set[str]]
) -> None:
    names = names_in(expression)
    grouped = {
        label.strip()
        for labels in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in labels.split(",")
    }
    assert names or expression.startswith("up{"), title
    known = set[str]()
    for name, selecting in names:
        assert name in labels_of, f"{title}: a server has no {name}"
        assert selecting <= labels_of[name] | OF_PROMETHEUS, (title, name)
        known |= labels_of[name]
    assert grouped <= known | OF_PROMETHEUS, title
    assert expression.count("(") == expression.count(")"), title


def test_the_check_finds_a_name_and_labels() -> None:
    assert names_in('rate(moe_x_total{job=~"$job",status!="200"}[5m]) / moe_y') == [
        ("moe_x_total", {"job", "status"}),
        ("moe_y", set()),
    ]


def test_panels_have_titles_units_and_places_of_their_own() -> None:
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"]) == len({p["id"] for p in DASHBOARD["panels"]})
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    text = json.dumps(DASHBOARD)
    assert not re.search(r"https?://", text)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == variables


def test_alerts_say_how_bad_and_what() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in rule["annotations"]["summary"]
