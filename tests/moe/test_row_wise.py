"""With a trunk of bit planes nobody's company shows: the same bits however prompts are cut and
batched, and while decoding. Shipped model, 4-bit experts, 8-bit trunk, whole routers and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from kernels import backend_status, row_linear
from moe import MoE, SamplingParams
from moe.describe.row_wise import RowWise
from moe.engine.engine import Engine
from moe.kv.cache import SequenceCache
from moe.kv.prefix_cache import PrefixCache
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.network.seam import routing_modules
from moe.sampling.batch import Token
from moe.sequence import Delta, RunningSequence
from routing import Phase

ROOT = Path(__file__).parents[2]
LONGEST = 90
pytestmark = pytest.mark.skipif(
    backend_status()["name"] != "native", reason="torch's own products are not row-wise"
)


@pytest.fixture(scope="module", params=["auto", "off"])
def model(request: pytest.FixtureRequest) -> MoE:
    return MoE.from_pretrained(
        ROOT / "examples/demo-model",
        model={"expert_bits": 4, "trunk_bits": 8},
        engine={"fused": request.param},
    )


@pytest.fixture(scope="module")
def whole_trunk() -> Iterator[MoE]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe.loader.linears_are_faster", lambda _: True)
        yield MoE.from_pretrained(ROOT / "examples/demo-model", model={"expert_bits": 4})


@pytest.fixture(scope="module")
def token_ids(model: MoE) -> list[int]:
    return model.codec.encode((ROOT / "tests/data/heldout_python.txt").read_text()[:4000])


def _read(
    model: MoE, batch: Sequence[tuple[SequenceCache, list[int]]], phase: Phase = "prefill"
) -> list[Tensor]:
    """Logits behind each piece, all read in one pass."""
    with torch.inference_mode():
        lanes = model.backbone.lanes([Work(ids, cache) for cache, ids in batch], phase)
        run_lanes(lanes, model.experts.run)
    return [rows[-1] for lane in lanes for rows in lane.result()]


@settings(max_examples=16)
@given(data=st.data())
def test_a_prompt_reads_the_same_bits_in_any_pieces_and_company(
    data: st.DataObject, model: MoE, token_ids: list[int]
) -> None:
    check_pieces_and_company(data, model, token_ids)


@pytest.mark.deep
@settings(max_examples=8)
@given(data=st.data())
def test_so_does_a_whole_trunk_of_our_own_products(
    data: st.DataObject, whole_trunk: MoE, token_ids: list[int]
) -> None:
    check_pieces_and_company(data, whole_trunk, token_ids)


def check_pieces_and_company(data: st.DataObject, model: MoE, token_ids: list[int]) -> None:
    start = data.draw(st.integers(0, 500), label="start")
    ids = token_ids[start : start + data.draw(st.integers(1, LONGEST), label="tokens")]
    whole, cut = model.backbone.new_cache(len(ids) + 1), model.backbone.new_cache(len(ids) + 1)
    (expected,) = _read(model, [(whole, ids)])
    places = data.draw(st.sets(st.integers(1, max(len(ids) - 1, 1)), max_size=3), label="cuts")
    ends = sorted({end for end in places if end < len(ids)} | {len(ids)})
    for begin, end in zip([0, *ends], ends, strict=False):
        others = data.draw(st.lists(st.integers(1, LONGEST), max_size=2), label="company")
        company = [(model.backbone.new_cache(n), token_ids[-n:]) for n in others]
        got = _read(model, [*company, (cut, ids[begin:end])])[-1]
    assert torch.equal(got, expected)
    other = model.backbone.new_cache(9)
    _read(model, [(other, token_ids[:3])])
    (expected,) = _read(model, [(whole, ids[:1])], "decode")
    got = _read(model, [(other, token_ids[3:9]), (cut, ids[:1])], "decode")[-1]
    assert torch.equal(got, expected)


def test_log_probabilities_do_not_depend_on_known_prefixes_and_other_requests(
    model: MoE, token_ids: list[int]
) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [token_ids[:n] for n in (5, 35, 39, 64, 70)]
    alone = [model.generate(prompt, params)[0].tokens for prompt in prompts]
    together = model.generate([*prompts, *prompts], params)
    assert [completion.tokens for completion in together] == [*alone, *alone]


def _answers(engine: Engine, model: MoE, prompts: Sequence[list[int]]) -> list[list[Token]]:
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    tokens: dict[RunningSequence, list[Token]] = {group.sequences[0]: [] for group in groups}
    while not engine.idle:
        for sequence, event in engine.step():
            assert isinstance(event, Delta), event
            tokens[sequence].append(event.token)
    return list(tokens.values())


@pytest.mark.deep
def test_log_probabilities_do_not_depend_on_having_given_way(
    model: MoE, token_ids: list[int]
) -> None:
    """Memory is short, so sequences are preempted in their midst, and read again."""
    prompts = [token_ids[n : n + 20] for n in range(0, 60, 10)]
    alone = [_answers(model.engine(), model, [prompt])[0] for prompt in prompts]
    engine, gave_way = model.engine(), 0
    scheduler = engine.scheduler
    scheduler.kv_tokens, give_up = 100, scheduler._preempt

    def count() -> bool:
        nonlocal gave_way
        gave_way += 1
        return give_up()

    scheduler._preempt = count  # type: ignore[method-assign]
    assert _answers(engine, model, prompts) == alone
    assert gave_way > 2


def test_log_probabilities_do_not_depend_on_whether_an_answer_is_known(
    model: MoE, token_ids: list[int]
) -> None:
    """A conversation goes on: its beginning is a prompt that was read, and what came of it."""
    first, further = token_ids[:40], token_ids[50:60]
    engine = model.engine()
    engine.scheduler.prefixes = prefixes = PrefixCache(200)
    (answer,) = _answers(engine, model, [first])
    turn = [*first, *(token.id for token in answer), *further]
    assert _answers(engine, model, [turn]) == _answers(model.engine(), model, [turn])
    assert prefixes.hit_tokens == 32


@pytest.mark.deep
@pytest.mark.parametrize("model_type", ["afmoe", "qwen2_moe", "granitemoe_swa", "flint"])
@settings(max_examples=6)
@given(first=st.integers(1, 40), rest=st.integers(1, 40), other=st.integers(1, 40))
def test_widths_that_are_no_whole_vectors_and_steps_without_description(
    model_type: str, first: int, rest: int, other: int, tiny_checkpoint: Callable[[str], Path]
) -> None:
    """Rows of 24 columns, gates of one; steps read several tokens as they read one by one."""
    model = _planes(tiny_checkpoint(model_type))
    ids = [(7 * n) % 125 + 3 for n in range(first + rest)]
    whole, cut, company = (model.backbone.new_cache(99) for _ in range(3))
    (expected,) = _read(model, [(whole, ids)])
    _read(model, [(cut, ids[:first])])
    got = _read(model, [(company, ids[:other]), (cut, ids[first:])])[-1]
    assert torch.equal(got, expected)
    single = [_read(model, [(whole, [n])], "decode")[0] for n in (5, 6, 7)]
    several = _read(model, [(company, [9]), (cut, [5, 6, 7])], "decode")[-1]
    assert torch.equal(several, single[-1])


@cache
def _planes(path: Path) -> MoE:
    return MoE.from_pretrained(
        path, model={"expert_bits": 8, "trunk_bits": 8, "group_size": 32}, engine={"fused": "off"}
    )


@given(
    rows=st.integers(1, 60),
    kept=st.integers(1, 60),
    width=st.sampled_from([1, 24, 63, 256, 1408]),
    threads=st.sampled_from([1, 2, 3]),
    apart=st.sampled_from([1, 2]),
    curve=st.sampled_from(
        [silu, gelu, partial(gelu, approximate="tanh"), torch.sigmoid, torch.Tensor.tanh]
    ),
)
@example(rows=19, kept=1, width=1408, threads=3, apart=1, curve=partial(gelu, approximate="tanh"))
def test_a_curve_is_the_same_bits_wherever_a_row_stands(
    rows: int, kept: int, width: int, threads: int, apart: int, curve: Callable[[Tensor], Tensor]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, apart, generator=generator)[..., 0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with RowWise():
            whole, some = curve(x), curve(x[-kept:])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole[-kept:], some)
    torch.testing.assert_close(whole, curve(x))


def test_routers_and_head_of_the_model_are_row_wise(model: MoE) -> None:
    network = model.backbone.model
    routers, head = routing_modules(network), network.get_output_embeddings()
    assert len(routers) == len(model.experts.layers)
    assert isinstance(head, nn.Linear)
    x = torch.randn(40, head.in_features)
    for module in (*(router for _, router in routers), head):
        whole = module(x)
        first = whole[0] if isinstance(whole, tuple) else whole
        alone = module(x[:1])
        assert torch.equal((alone[0] if isinstance(alone, tuple) else alone), first[:1])


@given(
    rows=st.integers(0, 200),
    columns=st.integers(1, 300),
    width=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    weight_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_row_linear_is_linear_and_row_wise(
    rows: int,
    columns: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    w = (torch.randn(width, columns, generator=generator) / columns**0.5).to(weight_dtype)
    b = torch.randn(width, generator=generator) if bias else None
    got = row_linear(x, w, b)
    assert got.dtype == dtype
    exact = linear(x.double(), w.double(), None if b is None else b.double())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), exact, rtol=limit, atol=limit)
    if rows:
        at = seed * rows // 10
        assert torch.equal(row_linear(x[at : at + 1], w, b)[0], got[at])


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_a_layer_without_rows_or_columns_is_torchs(shape: tuple[int, int]) -> None:
    """Shared experts of a configuration with none of them: the kernel would divide by zero."""
    x, weight, bias = torch.randn(3, shape[1]), torch.empty(shape), torch.randn(shape[0])
    with torch.inference_mode():
        assert torch.equal(row_linear(x, weight, bias), linear(x, weight, bias))


def test_choices_of_routers_take_the_lower_of_equal_ids_and_others_are_torchs() -> None:
    rows = torch.rand(5, 7, 64).round(decimals=1)  # many are equal
    with RowWise(products=True):
        chosen = torch.topk(rows, 4, dim=2, sorted=False)
        others = rows.topk(3, dim=1), torch.topk(rows, 4, largest=False), rows.topk(k=4)
    order = rows.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(chosen.indices, order.indices[..., :4])
    assert torch.equal(chosen.values, order.values[..., :4])
    assert torch.equal(others[0].values, rows.topk(3, dim=1).values)
    assert torch.equal(others[1].values, torch.topk(rows, 4, largest=False).values)
    assert torch.equal(others[2].indices, chosen.indices)
