"""Recorded decode steps of whole models, on the CPU: a tape stands in for CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from examples.models import tiny as architectures
from kernels import PlaneMatrix, QuantizedExperts
from kernels.triton import draw
from kernels.triton import experts as triton_experts
from kernels.triton.language import INTERPRETED
from moe import MoE, SamplingParams, loader
from moe.decode import cuda_graph, enable, recorded
from moe.decode import recorded as shadow
from moe.decode.enable import enable_fused
from moe.decode.recorded import Shadow, recorded_step
from moe.describe.decoder import describe
from moe.describe.description import NotDescribed
from moe.describe.observe import observe_random
from moe.describe.probe import enable_packing
from moe.kv.blocks import BlockPool
from moe.kv.device_blocks import DeviceBlocks
from moe.kv.layout import KVFormat
from moe.loading.meta_model import build_meta_model
from moe.loading.takeover import arrange_linears, chosen_linears, quantize_linear
from moe.memory import planning
from moe.memory.footprint import StorageCounter, measure_footprint
from moe.memory.planning import PlannedModel
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.network.seam import attach, take_experts
from moe.sampling import batch, host
from moe.sampling.batch import Proposal
from moe.settings.profile import load_profile
from moe.speculate.draft import NEVER, Draft, Mode, Stop
from moe.speculate.elastic import ElasticDrafts
from routing import Routing, parse_policies
from tests.launches import Launches
from tests.moe.decode.tape import Tape
from tests.moe.decode.test_graphs import Once, as_on_a_device, on_meta
from tests.moe.loading.test_quantized import quantised
from tests.readbacks import readbacks

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU"),
    pytest.mark.usefixtures("small_models"),
]

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [1, 2]]


def new_pool(planned: PlannedModel) -> BlockPool:
    return BlockPool(DeviceBlocks(CPU, planned.network.dtype, 40))


def parts_of(architecture: str, dtype: torch.dtype = torch.float32) -> tuple[Backbone, MoELayers]:
    model: Any = architectures.tiny_model(architecture)
    model.to(dtype)
    experts = MoELayers(take_experts(model))
    attach(model, experts.layers, experts.run)
    backbone = Backbone(model)
    backbone.blocks = BlockPool(DeviceBlocks(CPU, dtype, 40))
    assert enable_packing(backbone).enabled
    return backbone, experts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    architectures.tiny_model("mixtral").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param("qwen2_moe", torch.bfloat16, marks=pytest.mark.deep),
        pytest.param("gpt_oss", torch.float32, marks=pytest.mark.deep),
        pytest.param("deepseek_v3", torch.bfloat16, marks=pytest.mark.deep),
    ],
)
def test_it_is_as_near_to_float32_as_transformers(architecture: str, dtype: torch.dtype) -> None:
    backbone, experts = parts_of(architecture, dtype)
    _, reason = recorded_step(backbone, experts, Tape)
    assert reason.startswith("as near to float32 as transformers' forward (")
    assert reason.endswith("; experts outside: their kernel needs Python")


@pytest.mark.deep
def test_no_weight_is_held_twice_where_projections_are_joined() -> None:
    backbone, experts = parts_of("mixtral")
    before = sum(parameter.nbytes for parameter in backbone.model.parameters())
    recorded_step(backbone, experts, Tape)
    storages = {p.untyped_storage().data_ptr(): p for p in backbone.model.parameters()}
    assert sum(p.untyped_storage().nbytes() for p in storages.values()) == before
    count = len(list(backbone.model.parameters()))
    assert len(storages) == count - 2 * 2  # k and v of two layers lie behind q


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v3"])
@torch.inference_mode()
def test_recordings_take_no_more_than_planned(architecture: str) -> None:
    """Of all numbers of rows, with experts inside, and halting at layers: measured on the meta
    device, where each keeps what a graph would."""
    backbone, experts = parts_of(architecture)
    copy = Shadow.of(backbone)
    description = on_meta(copy.cast(describe(copy.backbone.model, observe_random(copy.backbone))))
    network = build_meta_model(backbone.model.config)
    profile = load_profile({"engine.max_batch_size": 80, "prefill.wave_tokens": 128})
    footprint = measure_footprint(network, 128, 128, on_cuda=True, form=KVFormat.of_bits(32))
    planned = planning._recordings_bytes(network, profile.profile, footprint)

    def inside(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        own: Any = experts.layers[layer]
        return triton_experts.experts_forward(rows, routing.expert_ids, routing.weights, own)

    with pytest.MonkeyPatch.context() as patch, StorageCounter() as counter:
        patch.setattr(InterpretedFunction, "run", lambda *_a, **_k: None)
        patch.setattr("kernels.triton.experts.route", as_on_a_device)
        memory = DeviceBlocks(torch.device("meta"), torch.float32, 4)
        step = cuda_graph.GraphStep(description, memory, inside, Once)
        before = counter.alive()
        for name, routed in (("", None), ("experts", inside)):
            for count in range(80, 0, -1):
                rows = cuda_graph.rows_for(count, halts=routed is None)
                step._idle.append(step._pool_with(rows, name, routed))
    assert len(step._idle[0].recordings) == 8 + 8
    own = step._idle[0].recordings.values()
    staged = 2 * sum(recording.inputs._memory.nbytes for recording in own)  # in main memory
    taken = counter.peak - before - staged
    assert taken <= planned < 2 * taken


def test_a_step_that_is_wrong_on_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, experts = parts_of("mixtral")
    cast = Shadow.cast

    def wrong(self: Shadow, description: Any) -> Any:
        right = cast(self, description)
        last = right.layers[-1]
        broken = replace(last, attention_scale=0.99)
        return replace(right, layers=(*right.layers[:-1], broken))

    monkeypatch.setattr(Shadow, "cast", wrong)
    monkeypatch.setattr(recorded, "TRIES", 1)
    with pytest.raises(NotDescribed, match="differ by"):
        recorded_step(backbone, experts, Tape)


@pytest.mark.deep
def test_tokens_and_statistics_are_those_of_transformers(on_tape: None, checkpoint: Path) -> None:
    """Experts run inside the recording while only decoding goes on, and outside otherwise."""
    found = []
    for engine in ({"fused": "auto"}, {"fused": "off"}):
        model = MoE.from_pretrained(checkpoint, engine={**engine, "max_batch_size": 2})
        if engine["fused"] == "auto":
            assert model.status()["fused"]["why"].endswith("; experts inside")
            asked = count_calls(model)
        tokens = [completion.token_ids for completion in model.generate(PROMPTS, PARAMS)]
        found.append((tokens, model.stats()["layers"]))
        if engine["fused"] == "auto":
            (only,) = read_back_in_a_step(model)
            assert only.startswith("numpy at moe/sampling/batch.py:")
            check_steps_ahead(model)
            times = len(asked)
            check_launches(model)
    assert found[0] == found[1]
    # Two prompts are read together, the third while others decode; else nobody is asked.
    steps = found[0][1][0]["steps"]
    assert 2 <= times < steps


def read_back_in_a_step(model: MoE) -> list[str]:
    """What waits for the device in a decode step, scheduling and sampling included."""
    engine = model.loop()
    drawn = replace(PARAMS, temperature=1.0, seed=1, top_k=2, logprobs=1)
    for prompt, params in zip(PROMPTS, (PARAMS, drawn), strict=False):
        engine.submit(model.request(prompt, params))
    while len(engine.step()) < 2:  # prompts
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "on_host", lambda _: False)  # as on a device
        return readbacks(engine.step)


def check_steps_ahead(model: MoE) -> None:
    """A step is replayed before the tokens of the one before are read. One sequence ends by a
    token, where its next row has begun a block: blocks and tokens are those of the other order."""
    assert model.backbone.blocks is not None
    memory = cast(DeviceBlocks, model.backbone.blocks.memory)
    free, prompts = len(memory._free), [[5] * 60, [7] * 63]
    drawn = replace(PARAMS, max_new_tokens=6, temperature=1.0, seed=1)
    stop, found = -1, []
    for ahead in (False, True):
        order: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "on_host", lambda _: False)
            if not ahead:
                patch.setattr(model.backbone, "_runs_ahead", lambda: False)
            for owner, name in ((cuda_graph.Recording, "play"), (batch._Sent, "read")):
                patch.setattr(owner, name, noted(order, name, getattr(owner, name)))
            engine = model.loop()
            groups = [model.request(prompt, drawn) for prompt in prompts]
            for group in groups:
                engine.submit(group)
            if ahead:
                groups[1].sequences[0]._stop_token_ids = frozenset([stop])
            while not engine.idle:
                engine.step()
        found.append([group.sequences[0].token_ids for group in groups])
        stop = found[0][1][1]
        assert len(memory._free) == free
        # A prompt's token, and five more.
        apart = ["read", *["play", "read"] * 5]
        assert order == (["read", "play", *["play", "read"] * 4, "read"] if ahead else apart)
    whole, cut = found
    assert cut == [whole[0], whole[1][: whole[1].index(stop) + 1]]


def check_launches(model: MoE) -> None:
    """What a greedy step asks of a device: its inputs in one copy, the tokens of the step before,
    the replay, routings for statistics, the largest logits, and these to the host. The tokens are
    those of steps one after the other."""
    params = replace(PARAMS, max_new_tokens=6)
    plain = [completion.token_ids for completion in model.generate(PROMPTS[:2], params)]
    launches, play, sent = Launches(), cuda_graph.Recording.play, batch._Sent.__init__

    def played(*given: Any) -> Any:
        launches.names.append("replay")
        with _disable_current_modes():
            return play(*given)

    def to_host(*given: Any) -> None:
        launches.names.append("to_host")
        sent(*given)

    def launch(*given: Any, **how: Any) -> Any:
        launches.names.append("kernel")
        with _disable_current_modes():
            return run(*given, **how)

    engine, run = model.loop(), InterpretedFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "on_host", lambda _: False)
        patch.setattr(batch, "_kernels_for", lambda _: draw)
        patch.setattr(cuda_graph.Recording, "play", played)
        patch.setattr(batch._Sent, "__init__", to_host)
        groups = [model.request(prompt, params) for prompt in PROMPTS[:2]]
        for group in groups:
            engine.submit(group)
        while not all(len(group.sequences[0].token_ids) > 2 for group in groups):
            engine.step()
        patch.setattr(InterpretedFunction, "run", launch)
        launches.names.clear()
        with launches:
            engine.step()
        found = [name for name in launches.names if name != "index_select"]  # in main memory
        while not engine.idle:
            engine.step()
    assert found == ["copy_", "cat", "replay", "clone", "kernel", "to_host"]
    assert [group.sequences[0].token_ids for group in groups] == plain


def noted(order: list[str], name: str, true: Any) -> Any:
    def method(*given: Any) -> Any:
        order.append(name)
        return true(*given)

    return method


@pytest.mark.deep
def test_tokens_of_a_draft_stay_on_the_device(
    on_tape: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its passes are recordings with the draft's experts inside, and end with one readback. Tokens,
    what they are drawn from, and bytes are those of a draft that asks the host at each layer and
    token."""
    speculation = {"mode": "elastic", "experts": 1, "max_depth": 1}
    model = MoE.from_pretrained(checkpoint, engine={"max_batch_size": 4}, speculation=speculation)
    speculator = model._loaded.speculation.speculator
    assert speculator is not None
    chain = cast(ElasticDrafts, speculator._passes["elastic"])
    plain = ElasticDrafts(model._loaded.backbone, chain.layers)
    mode = Mode("elastic", experts=1)
    monkeypatch.setattr("moe.speculate.elastic._all", lambda _: False)  # as on a device
    engine = model.loop()
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 5, "min_p": 0.01},
        {"temperature": 1.2, "seed": 7, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9},
    ]
    groups = [
        model.request(prompt, replace(PARAMS, max_new_tokens=8, **way))
        for prompt, way in zip([*PROMPTS, [4, 3, 2]], ways, strict=True)
    ]
    for group in groups:
        engine.submit(group)
    while not all(group.sequences[0].token_ids for group in groups):
        engine.step()
    own = [group.sequences[0] for group in groups]

    @torch.inference_mode()
    def drafts(of: ElasticDrafts, depths: list[int], until: Stop = NEVER) -> list[Draft]:
        random.seed(5)  # drafts of chance take numbers of their own
        return of.draft(mode, own[: len(depths)], depths, until)

    read, ends = {}, AfterTwo((1.0,), 0.0)
    for depths, until in (([2], NEVER), ([3, 3], ends), ([0, 1, 1, 2], NEVER)):
        found = {}
        for name, of in {"chain": chain, "plain": plain}.items():
            before = of.bytes_read
            found[name] = drafts(of, depths, until)
            read[name] = of.bytes_read - before
        for one, other in zip(found["chain"], found["plain"], strict=True):
            assert one.tokens == other.tokens
            assert one.confidence == pytest.approx(other.confidence, rel=1e-4)
            for offered, alike in zip(one.proposals, other.proposals, strict=True):
                assert_same_chances(offered, alike)
        if until is NEVER:
            assert [len(draft.tokens) for draft in found["chain"]] == depths
            assert read["chain"] == read["plain"] > 0
            assert chain.rows == plain.rows
    assert [any(draft.proposals) for draft in found["chain"]] == [False, True, False, True]
    assert chain._recorded is not None
    with monkeypatch.context() as patch:
        patch.setattr(host, "on_host", lambda _: False)
        for depths in ([2], [1, 2, 1, 2]):
            (only,) = readbacks(partial(drafts, chain, depths))
            assert only.startswith("to at moe/speculate/elastic.py:")
        # And one more for all that verification draws.
        patch.setattr("moe.sampling.sampler._reading_waits", lambda _: True)
        engine.step()  # records
        places = [place.split(":")[0] for place in readbacks(engine.step)]
        assert places == ["to at moe/speculate/elastic.py", "numpy at moe/sampling/batch.py"]
    lengths = [sequence.cache.length for sequence in own if sequence.cache is not None]
    monkeypatch.setattr(chain.layers, "_forward", lambda rows, *_: rows * float("nan"))
    chain._recorded = None  # as where there is no memory for more
    assert [draft.tokens for draft in drafts(chain, [2, 2])] == [(), ()]
    assert lengths == [sequence.cache.length for sequence in own if sequence.cache is not None]


def assert_same_chances(one: Proposal | None, other: Proposal | None) -> None:
    """Candidates come in any order, and some may have no chance."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.token_id == other.token_id
        spread = torch.zeros(2, 1000, dtype=torch.float64)
        for row, own in zip(spread, (one, other), strict=True):
            row[own.ids_C] = own.chances_C
        torch.testing.assert_close(spread[0], spread[1], rtol=1e-4, atol=1e-6)


class AfterTwo(Stop):
    def goes_on(self, confidence: Any) -> bool:
        return len(confidence) < 2


def count_calls(model: MoE) -> list[int]:
    """Grows when the first MoE layer is asked for its rows."""
    experts, asked = model.experts, list[int]()
    gather = experts.gather

    def noted(layer: int, calls: Any) -> Any:
        if layer == 0:
            asked.append(len(calls))
        return gather(layer, calls)

    experts.gather = noted  # type: ignore[method-assign]
    return asked


@pytest.mark.deep
def test_experts_of_an_fp8_checkpoint_run_inside_with_their_own_codes(
    on_tape: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokens are those of the decoded model, from prompts on."""
    small, whole = quantised(tmp_path, "fp8")
    monkeypatch.setattr("moe.loading.own_planes._format_on", lambda _, own: own)
    monkeypatch.setattr("kernels.planes.arrangement_for", lambda *_: "cuda")
    found = []
    for path, fused in ((small, "auto"), (whole, "off")):
        own = {"trunk_bits": 16, "head_bits": 16} if path == small else {}
        model = MoE.from_pretrained(path, engine={"fused": fused, "max_batch_size": 2}, model=own)
        found.append([completion.token_ids for completion in model.generate(PROMPTS, PARAMS)])
        if path == small:
            assert model.status()["fused"]["why"].endswith("; experts inside")
            layer = model._loaded.experts.layers[0]
            assert isinstance(layer, QuantizedExperts)
            assert layer.first.scales == "fp8"
    assert found[0] == found[1]


@pytest.mark.deep
def test_policies_and_others_at_the_layers_keep_the_host_in(on_tape: None) -> None:
    backbone, experts = parts_of("mixtral")
    experts.forward = triton_experts.experts_forward
    forward, _ = recorded_step(backbone, experts, Tape)
    backbone.decode_by(forward)
    cache = backbone.new_cache(20)
    (lane,) = backbone.lanes([Work([1, 2, 3], cache)])
    run_lanes([lane], experts.run)
    asked = []

    def run(layer: int, visits: Any) -> Any:
        asked.append(layer)
        return experts.run(layer, visits)

    layers = list(range(len(experts.layers)))

    def decode(runner: Any) -> list[int]:
        asked.clear()
        run_lanes(backbone.lanes([Work([4], cache)], "decode"), runner)
        return list(asked)

    before = experts.statistics.steps[0]
    assert decode(experts.run) == []
    assert experts.statistics.steps[0] == before + 1
    assert decode(run) == layers  # a draft, or whoever else serves the lane
    experts.policies = parse_policies(["top_k:1"], lossless=False)
    before = experts.statistics.expert_loads_by(0)["decode"]
    decode(experts.run)
    assert experts.statistics.expert_loads_by(0)["decode"] == before + 1


@pytest.mark.deep
def test_without_a_recording_transformers_goes_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Tape):
        left = 3  # the recording of the probe: a segment a layer and one more

        def __call__(self, function: Any) -> Any:
            if not Breaks.left:
                raise RuntimeError("out of graphs")
            Breaks.left -= 1
            return super().__call__(function)

    monkeypatch.setattr(loader, "_blocks_on_device", lambda planned, _: new_pool(planned))
    monkeypatch.setattr(enable, "_compiled", partial(recorded_step, capture=Breaks))
    model = MoE.from_pretrained(checkpoint)
    plain = MoE.from_pretrained(checkpoint, engine={"fused": "off"})
    assert model.status()["fused"]["enabled"]
    tokens = [[c.token_ids for c in m.generate(PROMPTS[:1], PARAMS)] for m in (model, plain)]
    assert tokens[0] == tokens[1]
    why = "recording 1 rows raised RuntimeError: out of graphs"
    assert model.status()["fused"] == {"enabled": False, "why": why}


def test_a_recording_without_memory_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of as many rows go on by transformers meanwhile, and smaller ones stay fused."""
    monkeypatch.setattr(enable, "_REST_STEPS", 2)
    short = [True]

    class Model:
        fused: Any = "on"

        def forward_packed(self, work: Any, decoding: bool) -> list[str]:
            assert decoding
            return ["transformers"]

        def decode_by(self, forward: Any) -> None:
            self.fused = forward

    class Step:
        def takes(self, work: Any) -> bool:
            return True

        def __call__(self, work: Any) -> list[str]:
            if short[0] and len(work[0].token_ids) >= 2:
                raise NotDescribed("recording 2 rows") from torch.OutOfMemoryError("no memory")
            return ["fused"]

    backbone: Any = Model()
    state = enable.Fused(True, "as near")
    decode: Any = enable._FusedForward(cast(Any, Step()), backbone, state)

    def ran(rows: int) -> str:
        (logits,) = decode([Work([1] * rows, cast(Any, None))])
        return str(logits)

    assert ran(2) == "transformers"
    assert (state.enabled, state.reason) == (
        True,
        "as near; but recording 2 rows: tried again later",
    )
    assert [ran(1), ran(2), ran(3)] == ["fused", "transformers", "transformers"]
    assert ran(2) == "transformers"  # tried again, in vain
    short[0] = False
    assert [ran(rows) for rows in (2, 3, 2, 1)] == ["transformers"] * 2 + ["fused"] * 2
    assert (state.enabled, state.reason, backbone.fused) == (True, "as near", "on")


def test_nothing_is_recorded_where_probing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, experts = parts_of("mixtral", torch.bfloat16)

    def broken() -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(enable, "_compiled", partial(recorded_step, capture=broken))
    state = enable_fused(backbone, experts)
    assert (state.enabled, backbone.decode_forward) == (False, None)
    assert state.reason == "recording 4 rows raised RuntimeError: no driver"
    monkeypatch.setattr(recorded, "observe_random", lambda _backbone: broken())
    assert enable_fused(backbone, experts).reason == "probing raised RuntimeError: no driver"
    monkeypatch.setattr(shadow, "memory_available", lambda: 1000)
    assert "float32 copy of the trunk takes" in enable_fused(backbone, experts).reason


def test_a_copy_shares_nothing_with_the_model_but_who_serves_its_experts() -> None:
    backbone, experts = parts_of("granitemoeshared", torch.bfloat16)
    copy = Shadow.of(backbone)
    theirs = {p.data_ptr() for p in backbone.model.parameters()}
    assert not any(p.data_ptr() in theirs for p in copy.backbone.model.parameters())
    assert {p.dtype for p in copy.backbone.model.parameters()} == {torch.float32}
    seats = [m.expert_seat.run_experts for m in modules_with_seats(copy.backbone.model)]
    assert seats == [experts.run] * len(seats)


def test_a_copy_takes_no_memory_of_the_device() -> None:
    made = list[Tensor]()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and func is not torch.ops.aten.detach.default:
                made.append(result)
            return result

    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16, device="cuda"))
        with Noted():
            copy = shadow._copied(weight)
    assert (copy.device.type, copy.dtype) == ("cpu", torch.float32)
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_a_copy_of_planes_is_for_cpus_and_its_description_shares_those_of_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arranged for a GPU, a CPU would decode them by plain torch, seconds for each head."""
    backbone, _ = parts_of("qwen3_moe", torch.bfloat16)
    network: Any = backbone.model
    network.config.dtype = torch.bfloat16
    for name, bits in chosen_linears(network, 4, 4).items():
        quantize_linear(network, name, 64, bits)
    x = torch.randn(3, network.lm_head.in_features)
    expected = network.lm_head(x)
    arrange_linears(network, torch.device("cuda"))
    monkeypatch.setattr(shadow, "arrangement_for", lambda _: "cuda")
    copy = Shadow.of(backbone)
    for module in copy.backbone.model.modules():
        assert getattr(module, "layout", None) is None or module.layout.arrangement == "cpu"
    assert torch.equal(copy.backbone.model.lm_head(x), expected)
    head = describe(copy.backbone.model, observe_random(copy.backbone)).head.weight
    moved = shadow.moved(head, {}, copy.homes(), CPU)
    assert isinstance(moved, PlaneMatrix)
    assert (moved.layout, moved.planes[0].data_ptr()) == (
        network.lm_head.layout, network.lm_head.plane0.data_ptr(),
    )  # fmt: skip
    assert moved.scales.data_ptr() == network.lm_head.scales.data_ptr()


def modules_with_seats(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expert_seat")]
