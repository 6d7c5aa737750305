"""Expected speed of a model that does not fit: bytes over bandwidths, and what routing is known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from examples.models.random_store import write_random_store
from kernels.cpu import choose_kernel
from moe import MoE
from moe.calibration.trace import Trace
from moe.cli import main
from moe.commands.plan import speeds
from moe.commands.plan.decode_speed import (
    Bandwidths,
    DecodeSizes,
    UniformRouting,
    estimate_decode,
    layer_with_reads,
)
from moe.commands.plan.traced_routing import TracedRouting
from moe.errors import ProfileError
from moe.loading.memory_plan import GIB
from offload.policies import LRU
from offload.replay import calls_of
from offload.replay import hit_ratio as replay_hits
from offload.transfer import Read

SIZES = DecodeSizes(
    layers=48, experts=128, top_k=8, expert_bytes=2_500_000, trunk_bytes=600_000_000, slots=1536
)
SPEEDS = Bandwidths(memory=20e9, disk=1.25e9)


def test_uniform_routing_visits_as_many_experts_as_drawing_shows() -> None:
    torch.manual_seed(0)
    uniform = UniformRouting(SIZES)
    for batch in (1, 4, 16, 64):
        drawn = [torch.rand(batch, 128).argsort(1)[:, :8].unique().numel() for _ in range(400)]
        assert uniform.distinct(batch) == pytest.approx(sum(drawn) / 400, rel=0.02)


def test_a_quarter_of_the_experts_hits_a_quarter_and_the_rest_comes_from_disk() -> None:
    one = estimate_decode(SIZES, SPEEDS, UniformRouting(SIZES), 1)
    assert one.hit_ratio == 0.25
    assert one.disk_bytes_per_token == pytest.approx(48 * 8 * 0.75 * 2_500_000)
    assert one.bound == "disk"
    memory = (600_000_000 + 48 * 8 * 2_500_000) / 20e9
    disk = 48 * 8 * 0.75 * 2_500_000 / 1.25e9
    assert 1 / (memory + disk) < one.tokens_per_second < one.best_tokens_per_second
    assert one.best_tokens_per_second == pytest.approx(1 / disk)


@given(
    batch=st.integers(1, 64),
    slots=st.integers(0, SIZES.total),
    memory=st.floats(1e9, 1e12),
    disk=st.floats(1e8, 1e11),
    read_s=st.floats(0, 1e-2),
)
def test_what_takes_most_of_a_step_bounds_it(
    batch: int, slots: int, memory: float, disk: float, read_s: float
) -> None:
    """Paths that overlap take no less than the longest and no more than all, waits included."""
    sizes = replace(SIZES, slots=slots)
    speeds = Bandwidths(memory, disk, read_s=read_s)
    one = estimate_decode(sizes, speeds, UniformRouting(sizes), batch)
    longest = one.seconds[one.bound]
    assert longest * (1 - 1e-6) <= one.step_s <= sum(one.seconds.values()) * (1 + 1e-6)
    assert one.best_tokens_per_second == one.tokens / longest


def test_a_step_that_waits_for_each_layers_first_byte_is_bound_by_the_disk() -> None:
    sizes = replace(SIZES, slots=round(0.9 * SIZES.total))
    fast = Bandwidths(memory=20e9, disk=20e9)
    assert estimate_decode(sizes, fast, UniformRouting(sizes), 1).bound == "memory"
    late = estimate_decode(sizes, replace(fast, read_s=5e-3), UniformRouting(sizes), 1)
    assert late.bound == "disk"
    waits = 48 * (1 - 0.9**8) * 5e-3
    assert late.seconds["disk"] == pytest.approx(waits + 0.1 * 48 * 8 * 2_500_000 / 20e9, rel=1e-3)


@pytest.mark.parametrize("read_s", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("hits", [0.0, 0.4, 0.9, 1.0])
def test_a_layers_experts_run_in_order_while_others_are_read(read_s: float, hits: float) -> None:
    draw, distinct, begin_s = random.Random(0), 8, 0.7

    def layer() -> float:
        there, now, read = 0.0, 0.0, 0
        missing = [draw.random() >= hits for _ in range(distinct)]
        for own in missing:
            if own:
                read += 1
                there = begin_s + read * read_s
            now = max(now, there if own else 0.0) + 1.0
        return now

    played = sum(layer() for _ in range(4000)) / 4000
    expected = layer_with_reads(distinct, hits, 1.0, read_s, begin_s)
    assert expected == pytest.approx(played, rel=0.08)
    assert layer_with_reads(distinct, 1.0, 1.0, read_s, begin_s) == distinct


def test_a_layer_may_need_a_broken_number_of_experts() -> None:
    """Between 8 and 9; all are read one after the other."""
    assert layer_with_reads(8.4, 0.0, 0.0, 2.0, 0.0) == pytest.approx(16, abs=1)
    assert layer_with_reads(8.4, 0.5, 0.0, 2.0, 0.0) == pytest.approx(8.4)
    assert layer_with_reads(8.4, 1.0, 1.0, 2.0, 0.0) == pytest.approx(8.4)


@pytest.mark.parametrize("hits", [0.0, 0.5, 1.0])
def test_a_layer_may_need_thousands_of_experts(hits: float) -> None:
    assert layer_with_reads(4096, hits, 0.0, 2.0, 0.0) == pytest.approx(8192 * (1 - hits))


def test_a_gpu_takes_its_paths_one_after_the_other() -> None:
    one = estimate_decode(SIZES, replace(SPEEDS, to_device=25e9), UniformRouting(SIZES), 1)
    assert one.step_s == pytest.approx(sum(one.seconds.values()))


def test_disk_speed_is_that_of_reads_one_and_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a reader that takes 2 ms, and 1 ms for each read."""

    class Slow:
        name, end = "slow", 0.0

        def submit(self, reads: list[Read], *, urgent: bool) -> Slow:
            now = clock[0]
            self.end = max(self.end, now + 2e-3) + 1e-3
            return self

        def wait(self) -> None:
            clock[0] = max(clock[0], self.end)

        def close(self) -> None: ...

    clock = [0.0]
    monkeypatch.setattr(speeds, "choose_reader", lambda *_: Slow())
    monkeypatch.setattr(speeds.time, "perf_counter", lambda: clock[0])
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    found = speeds.disk_speed(file, 64 << 10)
    assert found == (pytest.approx((64 << 10) / 1e-3), pytest.approx(2e-3), "slow")


def test_a_resident_model_is_bound_by_memory_and_needs_no_disk() -> None:
    sizes = replace(SIZES, slots=SIZES.total)
    one = estimate_decode(sizes, Bandwidths(memory=20e9), UniformRouting(sizes), 1)
    assert (one.bound, one.disk_bytes_per_token, set(one.seconds)) == ("memory", 0.0, {"memory"})
    assert one.tokens_per_second == one.best_tokens_per_second


def test_what_a_layer_takes_beside_its_weights_is_added() -> None:
    sizes = replace(SIZES, slots=SIZES.total)
    plain = Bandwidths(memory=20e9)
    own = replace(plain, layer_s=30e-6, row_s=20e-6)
    for batch in (1, 16):
        alone, beside = (
            estimate_decode(sizes, rates, UniformRouting(sizes), batch).seconds["memory"]
            for rates in (plain, own)
        )
        assert beside - alone == pytest.approx(48 * (30e-6 + batch * 20e-6))


@pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")
@pytest.mark.parametrize("bits", [2, 4.25, 8.25, 16])
def test_the_speed_of_weights_is_that_of_products_with_them(
    bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(speeds, "memory_speed", lambda _: 1e9)
    found = speeds.MachineSpeeds(torch.device("cpu"), keep=False).steps(bits)
    assert (found.memory == 1e9) == (bits == 16)
    assert 1e7 < found.memory < 1e13
    assert (found.layer_s, found.row_s) == (speeds.LAYER_S, speeds.ROW_S)


def test_host_memory_stands_between_the_device_and_the_disk() -> None:
    sizes = replace(SIZES, host_slots=SIZES.total // 2)
    one = estimate_decode(sizes, replace(SPEEDS, to_device=25e9), UniformRouting(sizes), 1)
    wanted = 48 * 8 * 2_500_000
    assert one.hit_ratio == 0.25
    assert one.seconds["disk"] == pytest.approx(0.5 * wanted / 1.25e9)
    assert one.seconds["to_device"] == pytest.approx(0.75 * wanted / 25e9)


@given(st.integers(1, 256), st.integers(0, SIZES.total))
def test_more_slots_are_never_slower(batch: int, slots: int) -> None:
    def rate(count: int) -> float:
        sizes = replace(SIZES, slots=count)
        return estimate_decode(sizes, SPEEDS, UniformRouting(sizes), batch).tokens_per_second

    assert rate(slots) <= rate(SIZES.total) * (1 + 1e-9)
    assert rate(0) <= rate(slots) * (1 + 1e-9)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, dtype=torch.bfloat16,
    )  # fmt: skip
    return write_random_store(config, tmp_path_factory.mktemp("plan") / "store")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main(["plan", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_model_that_fits_needs_no_disk(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = planned(capsys, store, "--json")
    plan = json.loads(out)
    assert (code, plan["misfit"], plan["speeds"]["disk"]) == (0, "", None)
    assert plan["sizes"]["slots"] == 48
    assert [one["batch"] for one in plan["expected"]] == [1, 4, 16]
    assert plan["expected"][0]["bound"] == "memory"
    assert plan["expected"][0]["tokens_per_second"] == plan["resident"]["tokens_per_second"]


def test_what_does_not_fit_stays_on_disk_and_the_plan_says_how_fast_that_is(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few: tuple[str, ...] = ("--set", "memory.kv_tokens=64", "--set", "prefill.wave_tokens=64")
    few += ("--set", "memory.reserve_gib=0.0")
    _, out = planned(capsys, store, *few, "--json")
    lines = {line["name"]: line["bytes"] for line in json.loads(out)["memory"]["lines"]}
    half = (sum(lines.values()) - lines["experts"] / 2) / GIB
    limit = ("--set", f"memory.device_gib={half}")
    code, out = planned(capsys, store, *few, *limit, "--json")
    plan = json.loads(out)
    slots = plan["sizes"]["slots"]
    assert code == 0
    assert 0 < slots < 48
    assert plan["expected"][0]["hit_ratio"] == pytest.approx(slots / 48)
    assert plan["expected"][0]["seconds"]["disk"] > 0
    contexts = {one["kv_tokens"]: one for one in plan["contexts"]}
    assert contexts[64]["experts"] == slots
    assert 2048 not in contexts, "so many tokens do not fit beside the fewest experts"
    code, out = planned(capsys, store, *few, *limit)
    assert code == 0
    assert "on disk" in out
    assert "every expert taken as equally likely" in out
    assert "counted whole" not in out
    late = ("--set", "lossless=false", "--set", "offload.late=prefix")
    assert "counted whole" in planned(capsys, store, *few, *limit, *late)[1]
    code, out = planned(capsys, store, *few, "--set", "memory.device_gib=0.0001")
    assert code == 1
    assert "It does not fit. What would help:\n  - " in out


@pytest.mark.parametrize(
    "setting",
    [
        'routing.policies=["top_k:2"]',  # lossy
        'routing.policies=["nonsense"]',
        "kernels.backend=triton",
    ],
)
def test_what_loading_refuses_is_refused(
    setting: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _, value = setting.partition("=")
    settings = {"device": "cpu", key: json.loads(value) if value.startswith("[") else value}
    with pytest.raises(ProfileError, match=key) as loading:
        MoE.from_pretrained(store, settings)
    for ranks in ([], ["--ranks", "2"]):
        said = ["--set", "device=cpu", "--set", setting, *ranks]
        assert main(["plan", str(store), *said]) == 2
        assert capsys.readouterr() == ("", f"moe: {loading.value}\n")


def trace_of(rows: torch.Tensor, layers: int, experts: int) -> TracedRouting:
    ids = [rows.sort(1).values.to(torch.int16) for _ in range(layers)]
    weights = [torch.ones(rows.shape, dtype=torch.float16) for _ in range(layers)]
    tokens = torch.zeros(len(rows), dtype=torch.int32)
    return TracedRouting(Trace(tokens, [len(rows)], [experts] * layers, ids, weights), "lru")


def test_a_trace_that_never_changes_always_hits() -> None:
    routing = trace_of(torch.tensor([[1, 5]]).repeat(50, 1), layers=3, experts=8)
    assert (routing.distinct(1), routing.distinct(4)) == (2.0, 2.0)
    assert routing.hit_ratio(1, 6) == 1.0
    assert routing.hit_ratio(4, 6) == 1.0


def test_who_holds_all_experts_needs_no_disk_for_one_that_comes_up_late() -> None:
    routing = trace_of(torch.tensor([[1, 5]] * 40 + [[2, 5]] * 10), layers=3, experts=8)
    assert routing.hit_ratio(1, 24) < 1
    sizes = replace(SIZES, layers=3, experts=8, slots=24)
    one = estimate_decode(sizes, Bandwidths(memory=20e9), routing, 1)
    assert (one.hit_ratio, set(one.seconds)) == (1.0, {"memory"})


def test_hits_of_a_trace_are_those_of_replaying_all_of_it() -> None:
    torch.manual_seed(0)
    rows = torch.stack([torch.randperm(16)[:3] for _ in range(2000)])
    routing = trace_of(rows, layers=2, experts=16)
    experts = torch.stack([ids.long() for ids in routing.trace.expert_ids], 1).numpy()
    expected = replay_hits(calls_of(experts, 16), 12, LRU(2, 16), 16)
    assert routing.hit_ratio(1, 12) == pytest.approx(expected, abs=0.01)
    assert routing.distinct(1) == 3.0
