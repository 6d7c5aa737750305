"""A server of a model whose experts are on disk: its figures, a read that fails, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from experts.manifest import read_manifest
from moe import MoE
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings
from offload.capacity import slot_bytes
from offload.errors import OffloadError
from offload.hot_set import FILE_NAME

URL = "/v1/completions"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}
SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
}


@pytest.fixture
def store(text_checkpoint: Path, tmp_path: Path) -> Path:
    settings = ModelSettings(expert_bits=8, group_size=32)
    return convert(text_checkpoint, tmp_path / "store", settings)


@pytest.fixture
def offloaded(store: Path) -> MoE:
    resident = MoE.from_pretrained(store, SMALL)
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    room = 8 * slot_bytes(read_manifest(store), 8) + 16
    memory = SMALL["memory"] | {"device_gib": (rest + room) / GIB}
    return MoE.from_pretrained(store, SMALL | {"memory": memory})


def samples(server: Any) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            yield f"{sample.name}{''.join(sample.labels.values())}", sample.value


def test_what_the_cache_does_is_measured(serve: Any, offloaded: MoE) -> None:
    with serve(load=lambda: offloaded) as server:
        assert server.http.post(URL, json=BODY).status_code == 200
        status = server.http.get("/v1/status").json()
        found = dict(samples(server))
    assert status["model"]["offload"]["slots"] == 8
    assert [tier["name"] for tier in status["memory_plan"]["tiers"]] == ["memory", "disk"]
    stats = status["stats"]["offload"]
    assert found["moe_expert_cache_hits_total"] == stats["hits"] > 0
    assert found["moe_expert_cache_misses_total"] == stats["misses"] > 0
    assert found["moe_expert_cache_hit_ratio"] == stats["hit_ratio"]
    assert found["moe_offload_bytes_totaldemand"] == stats["demand_bytes"] > 0
    assert found["moe_offload_stall_seconds_total"] == stats["stall_seconds"] > 0
    assert found["moe_expert_cache_slots"] == found["moe_expert_tier_slotsmemory"] == 8
    assert found["moe_expert_tier_hits_totalmemory"] == stats["hits"]
    assert found["moe_expert_tier_bytes_totalmemory"] == stats["bytes_read"]


def test_a_resident_model_has_no_such_figures(server: Any) -> None:
    assert "moe_offload" not in server.http.get("/metrics").text


def test_a_failed_read_is_told_and_the_server_goes_on(
    serve: Any, offloaded: MoE, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = offloaded._loaded.offloaded
    assert parts is not None
    source: Any = parts.cache._manager._source

    def fail(*_: Any, **__: Any) -> None:
        raise OffloadError("cannot read /secret/place: Input/output error")

    with serve(load=lambda: offloaded) as server:
        with monkeypatch.context() as broken:
            broken.setattr(source._reader, "submit", fail)
            answer = server.http.post(URL, json=BODY)
            stream = server.http.post(URL, json=BODY | {"stream": True})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "weights_unreadable"
        assert "weights_unreadable" in stream.text
        assert "secret" not in answer.text + stream.text
        assert server.http.post(URL, json=BODY).status_code == 200
    assert "/secret/place: Input/output error" in caplog.text


def test_the_hot_set_is_saved_when_the_server_ends(serve: Any, offloaded: MoE, store: Path) -> None:
    with serve(load=lambda: offloaded) as server:
        assert server.http.post(URL, json=BODY).status_code == 200
        assert not (store / FILE_NAME).exists()
    assert (store / FILE_NAME).exists()
