"""What rank 0 plans and other ranks do, with all of them in this process; orders are JSON."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams, Structure
from moe.describe.probe import find_visits
from moe.engine.runner import ModelRunner
from moe.errors import RankLostError, RequestError
from moe.kv.cache import KVCache
from moe.kv.visibility import VISIBILITIES
from moe.parallel.engine import ParallelEngine, _visits_of
from moe.parallel.remote import EngineMirror, RemoteCache
from moe.parallel.watchdog import Heartbeat
from moe.parallel.worker import RankWorker
from moe.sampling.batch import LogitsError, Row
from moe.sampling.sampler import Sampler
from moe.settings import ParallelSettings
from tests.amounts import deep_except
from tests.parallel.generation import PROMPTS

KV_TOKENS = 400


class Loopback:
    """Stands for `Coordinator`: every rank is a worker of this process, with all experts."""

    def __init__(self, model: MoE, ranks: int) -> None:
        def new_mirror() -> EngineMirror:
            loaded = model._loaded
            runner = ModelRunner(loaded.backbone, loaded.experts)
            if loaded.writer is not None:
                runner = loaded.writer.runner(loaded.backbone, loaded.experts)
            return EngineMirror(runner, loaded.logits_size, loaded.structures)

        def new_worker(rank: int) -> RankWorker:
            settings = ParallelSettings()
            return RankWorker(rank, None, model.experts, new_mirror, settings, Heartbeat())

        self.links = SimpleNamespace(ranks=list(range(ranks)))
        self.workers = {rank: new_worker(rank) for rank in range(ranks)}
        self.worker = self.workers[0]
        self.kv_tokens = dict.fromkeys(range(ranks), KV_TOKENS)
        self.ended_engines: deque[int] = deque()
        self.epoch = self._engines = self.steps = self.most_waiting = 0
        self.lost_at: dict[int, int] = {}
        self.worked: Counter[int] = Counter()

    def new_engine(self) -> int:
        self._engines += 1
        return self._engines

    def step(self, message: Any, orders: Mapping[int, Any], planned: Any) -> dict[int, Any]:
        waiting = sum(len(behind) for _, behind in planned)
        self.most_waiting = max(self.most_waiting, waiting)
        self.steps += 1
        if self.steps in self.lost_at:
            raise RankLostError("somebody is lost")
        self.worked.update(r for r, order in orders.items() if order["decode"] or order["prefill"])
        still: dict[str, Any] = {
            "ended_engines": [],
            "moves": None,
            "reset": False,
        }
        message = still | message
        replies = {}
        for rank in self.links.ranks:
            order = json.loads(json.dumps(message | {"order": orders[rank]}))
            replies[rank] = json.loads(json.dumps(self.workers[rank].step(order)))
        return replies

    def release(self, rank: int, message: Any) -> None:
        self.workers[rank].release(json.loads(json.dumps(message)))

    def regroup(self) -> None:
        self.links.ranks.remove(self.lost_at[self.steps])
        self.epoch += 1
        for rank in self.links.ranks:
            self.workers[rank].join(None, [])


def parallel(model: MoE, ranks: int = 2, **how: Any) -> tuple[ParallelEngine, Loopback]:
    loopback = Loopback(model, ranks)
    new_engine = how.pop("new_engine", model._planning_engine)
    engine = ParallelEngine(
        loopback,  # type: ignore[arg-type]
        new_engine,
        continue_on_loss=True,
    )
    return engine, loopback


def tokens_of(engine: Any, model: MoE, params: list[SamplingParams]) -> list[Any]:
    """Token ids of the prompts, or what ended each."""
    groups = [model.request(p, s) for p, s in zip(PROMPTS, params, strict=True)]
    ended: dict[Any, Any] = {}
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        for sequence, event in engine.step():
            if isinstance(event, Exception):
                ended[sequence] = type(event).__name__
    return [ended.get(s, s.token_ids) for group in groups for s in group.sequences]


PARAMS = [
    SamplingParams(temperature=1.0, seed=n, n=1 + n % 2, max_new_tokens=5 + n, ignore_eos=True)
    for n in range(len(PROMPTS))
]


@pytest.mark.parametrize("architecture", deep_except(["qwen3_moe"], ["qwen3_moe", "qwen3_next"]))
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_say_what_one_engine_says(
    tiny_moe: Callable[[str], MoE], architecture: str, ranks: int
) -> None:
    model = tiny_moe(architecture)
    engine, loopback = parallel(model, ranks)
    assert tokens_of(engine, model, PARAMS) == tokens_of(model.engine(), model, PARAMS)
    assert loopback.worked.keys() == set(range(ranks))
    for rank, worker in loopback.workers.items():
        scheduler = engine._schedulers[rank]
        prefixes, orders = scheduler.engine.scheduler.prefixes, list(scheduler.orders.caches)
        assert prefixes is not None
        kept = {cast(RemoteCache, entry.kv).id for entry in prefixes._entries.values()}
        for mirror in worker._mirrors.values():
            assert not any((mirror._sequences, mirror._groups, mirror._numbers)), "left behind"
            held = mirror._caches.keys() | {own for what, own, *_ in orders if what == "copy"}
            assert held - {own for what, own, *_ in orders if what == "free"} == kept


def test_a_rank_goes_on_from_the_states_of_a_known_prompt(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    settings = {"memory.prefix_tokens": 512, "prefill.wave_tokens": 128}
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_next"), settings)
    engine, _ = parallel(model, 2)
    prompt = [(i * 37) % 125 + 3 for i in range(50)]
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    for tail in ([], [7, 8, 9], [7, 8, 9], [4]):
        group = model.request([*prompt, *tail], params)
        engine.submit(group)
        while not engine.idle:
            engine.step()
        alone = model.generate([[*prompt, *tail]], params)[0]
        assert group.sequences[0].token_ids == alone.token_ids
    prefixes = engine.status()["prefixes"]
    assert prefixes["hit_tokens"] >= len(prompt), prefixes


def test_a_rank_holds_a_common_prompt_once(tiny_checkpoint: Callable[[str], Path]) -> None:
    """There is room for 3 of the 12 prompts, if each had memory of its own."""
    shared, own, new = 3 * BLOCK, 20, 4
    memory = {"prefix_tokens": 1000, "kv_bits": 16}
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory)
    pool = model.backbone.blocks
    assert pool is not None
    engine, _ = parallel(model, 1)
    planner = engine._schedulers[0].engine
    planner.scheduler.kv_tokens = shared + BLOCK + 12 * (own + new)
    common = [7 + at % 90 for at in range(shared)]
    prompts = [[*common, *range(10 + number, 10 + number + own)] for number in range(10)]
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
    groups = [model.request(prompt, params) for prompt in prompts]
    groups.append(model.request(prompts[0], replace(params, temperature=1.0, seed=1, n=2)))
    for group in groups:
        engine.submit(group)
    most_running = 0
    while not engine.idle:
        engine.step()
        most_running = max(most_running, len(planner.scheduler.running))
        assert planner.scheduler.num_used_tokens() <= planner.kv_tokens
    assert most_running == 12
    assert planner.scheduler.prefixes is not None
    entries = planner.scheduler.prefixes._entries.values()
    caches = [cast(RemoteCache, entry.kv) for entry in entries]
    listed = {id(block) for cache in caches for block in cache.blocks}
    assert pool.held_tokens == BLOCK * len(listed), "the rank holds other blocks"
    assert planner.scheduler.prefixes.num_tokens <= BLOCK * len(listed)
    for group, prompt in zip(groups[:-1], prompts, strict=True):
        assert group.sequences[0].token_ids == model.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize(
    ("model_type", "spec", "longest", "new"),
    [
        ("qwen3_moe", "window:256", 600, 90),
        ("unlimited_ocr", None, 100, 430),
        ("gpt_oss", None, 600, 130),
    ],
)
def test_rank_0_knows_what_ranks_give_up(
    tmp_path: Path, model_type: str, spec: str | None, longest: int, new: int
) -> None:
    """Tokens are those of one rank; each rank holds what rank 0 counts. What is given up follows
    from a policy of the profile, or of the model, or from layers with windows."""
    config = tiny_config(model_type)
    config.get_text_config(decoder=True).max_position_embeddings = 2048
    tiny_model(model_type, config=config).save_pretrained(tmp_path)
    settings = {"lossless": False, "memory.kv_policy": spec, "memory.kv_tokens": 4096}
    if spec is not None and spec.partition(":")[0] not in VISIBILITIES.names():
        pytest.skip("the method is not there")
    model = MoE.from_pretrained(tmp_path, settings)
    assert model.status()["keys_and_values"]["policy"] == spec
    pool = model.backbone.pool
    assert pool is not None
    assert pool.policy is not None or pool.windows.of_layer
    engine, loopback = parallel(model, 2)
    for scheduler in engine._schedulers.values():
        scheduler.engine.scheduler.kv_tokens = 1200
    lengths = [longest - longest * 3 * n // 20 for n in range(4)]
    prompts = [[(7 * i * i + n) % 90 + 3 for i in range(own)] for n, own in enumerate(lengths)]
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
    groups = [model.request(prompt, params) for prompt in [*prompts, prompts[0]]]
    for group in groups:
        engine.submit(group)
    most_dropped = 0
    while not engine.idle:
        engine.step()
        for rank, scheduler in engine._schedulers.items():
            planner = scheduler.engine.scheduler
            assert planner.num_used_tokens() <= planner.kv_tokens
            (mirror,) = loopback.workers[rank]._mirrors.values()
            for sequence in planner.running:
                cache = cast(RemoteCache, sequence.cache)
                own = cast(KVCache, mirror._caches[cache.id])
                assert (cache.dropped_tokens, cache.whole) == (own.dropped_tokens, own.whole)
                assert cache.longest_fork(64) == own.longest_fork(64)
                most_dropped = max(most_dropped, own.dropped_tokens)
    assert most_dropped >= 4 * BLOCK
    for group, prompt in zip(groups, [*prompts, prompts[0]], strict=True):
        assert group.sequences[0].token_ids == model.generate([prompt], params)[0].token_ids


def test_ranks_make_the_visits_of_looped_layers_together() -> None:
    """A step of the layers up to 3, and from 3 on, where 2 and 3 run three times."""
    visits = [0, 1, 2, 3, 2, 3, 2, 3, 4]

    def step(decode: bool, *layers: int) -> Any:
        prefill = SimpleNamespace(layers=lambda _: range(*layers)) if layers else None
        return SimpleNamespace(decode=[1] if decode else [], prefill=prefill)

    assert _visits_of([step(False, 0, 3), step(False)], visits) == (0, 3)
    assert _visits_of([step(False, 3, 4)], visits) == (3, 8)
    assert _visits_of([step(False, 4, 5), step(False, 3, 5)], visits) == (3, 9)
    assert _visits_of([step(False, 3, 4), step(True)], visits) == (0, 9)
    assert _visits_of([step(False)], visits) == (0, 0)
    assert _visits_of([step(False, 1, 3)], range(5)) == (1, 3)


@pytest.mark.deep
def test_visits_are_those_of_a_pass(tiny_moe: Callable[[str], MoE]) -> None:
    looped, plain = (tiny_moe(kind) for kind in ("inkling2_loop_text", "qwen3_moe"))
    assert list(find_visits(looped.backbone, 5)) == [0, 1, 2, 3, 2, 3, 2, 3, 4]
    assert find_visits(plain.backbone, len(plain.experts.layers)) == plain.experts.visits


def test_lost_sequences_are_read_again_by_the_others(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    engine, loopback = parallel(model, 3)
    loopback.lost_at = {2: 1, 6: 2}
    assert tokens_of(engine, model, PARAMS) == tokens_of(model.engine(), model, PARAMS)
    assert loopback.links.ranks == [0]


def test_structures_are_followed_on_ranks_and_by_those_that_take_over() -> None:
    model = MoE.from_pretrained("examples/demo-model")
    structures = [Structure.json_object(), Structure.regex("[ab]{3,20}c"), None]
    params = [
        SamplingParams(
            temperature=1.0, seed=n, n=1 + n % 2, max_new_tokens=12, structure=structures[n % 3]
        )
        for n in range(len(PROMPTS))
    ]
    engine, loopback = parallel(model, 3)
    loopback.lost_at = {4: 1}
    assert tokens_of(engine, model, params) == tokens_of(model.engine(), model, params)
    assert loopback.links.ranks == [0, 2]


def test_what_fails_on_a_rank_ends_its_own_sequence_only(
    tiny_moe: Callable[[str], MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row = tiny_moe("qwen3_moe"), Sampler.row
    expected = tokens_of(model.engine(), model, PARAMS)

    def failing(sampler: Sampler, place: int = 0) -> Row:
        if sampler.params.seed == 2:
            raise LogitsError("on purpose")
        return row(sampler, place)

    monkeypatch.setattr(Sampler, "row", failing)
    found = tokens_of(parallel(model)[0], model, PARAMS)
    failed = [place for place, tokens in enumerate(found) if tokens == "RankError"]
    assert failed == [3]
    del found[3], expected[3]
    assert found == expected


def test_rows_that_are_no_numbers_end_their_own_sequence(tiny_moe: Callable[[str], MoE]) -> None:
    """Their scores at the routers are NaN: they visit experts beside others, which are as alone."""
    model = tiny_moe("qwen3_moe")
    expected = tokens_of(model.engine(), model, PARAMS)
    others = chain(*expected, *(prompt for prompt in PROMPTS if prompt is not PROMPTS[2]))
    token = min(set(PROMPTS[2]) - set(others))
    table = model.backbone.model.get_input_embeddings().weight.data
    row = table[token].clone()

    def put(values: Tensor | float) -> None:
        with torch.inference_mode():  # as it may have been loaded, if a test before wanted it
            table[token] = values

    put(torch.nan)
    try:
        found = tokens_of(parallel(model)[0], model, PARAMS)
    finally:
        put(row)
    assert found.pop(3) == "RankError"
    del expected[3]
    assert found == expected


def test_prompts_go_where_least_is_to_be_done(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    engine, _ = parallel(model, 2)
    params = SamplingParams(max_new_tokens=5)
    groups = [model.request([5] * size, params) for size in (50, 10, 10, 30, 10)]
    for group in groups:
        engine.submit(group)
    assert [engine._homes[group.sequences[0]] for group in groups] == [0, 1, 1, 1, 0]
    occupancy = engine.occupancy()
    assert occupancy["waiting_prompts"] == 5
    assert engine.kv_tokens == 2 * KV_TOKENS


def test_prompts_that_wait_are_told_of(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    _, loopback = parallel(model, 1)
    loopback.kv_tokens = {0: 150}
    engine = ParallelEngine(loopback, model._planning_engine, continue_on_loss=True)  # type: ignore[arg-type]
    assert all(tokens_of(engine, model, PARAMS))
    assert loopback.most_waiting > 0


def test_what_no_rank_has_room_for_is_refused(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    engine, loopback = parallel(model, 2)
    loopback.kv_tokens = {0: 20, 1: 60}
    engine, _ = ParallelEngine(loopback, model._planning_engine, continue_on_loss=True), None  # type: ignore[arg-type]
    group = model.request([5] * 40, SamplingParams(max_new_tokens=5))
    engine.submit(group)
    assert engine._homes[group.sequences[0]] == 1
    with pytest.raises(RequestError, match=r"room for (20|60) "):
        engine.submit(model.request([5] * 80, SamplingParams(max_new_tokens=5)))
