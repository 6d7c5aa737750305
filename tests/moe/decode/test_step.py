"""The compiled step against the plain one, on descriptions of every kind and awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kernels.cpu import choose_kernel
from kernels.cpu.build import load_library
from kernels.cpu.decode import NativeDecode
from moe.decode.compiled import DescribedStep
from moe.decode.reference import reference_step
from moe.decode.step import StepFunction
from moe.describe.description import Attention, Description, NotDescribed, Projection, View
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.network.answer_window import AnswerWindow
from moe.network.packed_pass import Work
from routing import Routing
from tests.kernels.kernel_cases import TARGET_PARAMS
from tests.moe.decode.description_cases import VOCABULARY, Maker, filled, routed

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")


def compiled(description: Description, target: str = "-march=native") -> DescribedStep:
    return DescribedStep(description, NativeDecode(load_library((target,))))


@pytest.mark.parametrize("target", TARGET_PARAMS)
@settings(max_examples=30)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_compiled_and_plain_steps_agree(target: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    maker = Maker(data, data.draw(st.sampled_from([8, 24, 64, 100])))
    description = maker.description(2)
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 17, 511, 1100]), min_size=1, max_size=9))
    plain = filled(description, lengths, 3)
    fast = [sequence.fork(sequence.capacity + 1, sequence.length) for sequence in plain]
    step = compiled(description, target)
    # Rounding to 8 bits may fall either way where the order of sums differs.
    tolerance = 1e-4 if maker.bits is None else 5e-2
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (len(lengths),)).tolist()
        expected, actual = (
            torch.cat(run([Work([t], c) for t, c in zip(tokens, caches, strict=True)], routed))
            for run, caches in ((partial(reference_step, description), plain), (step, fast))
        )
        scale = expected.abs().max().clamp_min(1.0)
        wrong = ((actual - expected).abs().amax(1) > tolerance * scale).float().mean()
        # A choice between nearly equal experts may fall either way too.
        assert wrong <= (0.0 if maker.bits is None else 0.3)
    assert [cache.length for cache in fast] == [cache.length for cache in plain]


class SeesAll(Maker):
    """Makes attention that policies on keys and values hold for."""

    def view(self, heads: int) -> View:
        return replace(super().view(heads), window=None, chunk=None)

    def latent(self, layer: int) -> Attention:  # type: ignore[override]
        return self.grouped(layer)


@settings(max_examples=25)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_steps_attend_to_the_prompt_and_a_window_of_the_answer(
    data: st.DataObject, seed: int
) -> None:
    """Rows of buffers, and, where all layers do so, of blocks of which some have been given up."""
    all_do = data.draw(st.booleans())
    maker = (SeesAll if all_do else Maker)(data, data.draw(st.sampled_from([24, 64])))
    description = maker.description(2)
    native, _ = choose_kernel()
    assert native is not None
    kept = AnswerWindow(data.draw(st.sampled_from([1, 2, 40, 64, 300])))
    pool = BlockPool(HostBlocks(native.kv, KVFormat.of_bits(32)), Windows(), kept)
    lengths = data.draw(st.lists(st.sampled_from([1, 17, 130, 600, 1100]), min_size=1, max_size=4))
    prompts = [data.draw(st.integers(1, length)) for length in lengths]
    sizes = [data.draw(st.integers(1, 3)) for _ in lengths]
    makers: list[Callable[[int], KVCache]] = [
        KVCache,
        KVCache,
        pool.new_cache if all_do else KVCache,
    ]
    fast = compiled(description)
    steps: list[StepFunction] = [partial(reference_step, description), fast, fast]
    found = list[Tensor]()
    for new, step in zip(makers, steps, strict=True):
        torch.manual_seed(seed)
        caches = filled(description, lengths, 200, new)
        for cache, length, prompt in zip(caches, lengths, prompts, strict=True):
            cache.policy, cache.length = kept, prompt
            cache.prompt_read()
            cache.length = length
        rows = list[Tensor]()
        for at in range(2):
            tokens = [[(at + i) % VOCABULARY for i in range(size)] for size in sizes]
            rows += step([Work(t, c, True) for t, c in zip(tokens, caches, strict=True)], routed)
        found.append(torch.cat(rows))
    assert torch.equal(found[1], found[2])
    tolerance = 1e-4 if maker.bits is None else 5e-2
    scale = found[0].abs().max().clamp_min(1.0)
    wrong = ((found[1] - found[0]).abs().amax(1) > tolerance * scale).float().mean()
    assert wrong <= (0.0 if maker.bits is None else 0.3)


@settings(max_examples=25)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    description = Maker(data, data.draw(st.sampled_from([24, 100, 256]))).description(2)
    lengths = data.draw(st.lists(st.integers(1, 1100), min_size=2, max_size=12))
    together = filled(description, lengths, 1)
    alone = [sequence.fork(sequence.capacity, sequence.length) for sequence in together]
    step, threads = compiled(description), torch.get_num_threads()
    work = [Work([index % VOCABULARY], cache) for index, cache in enumerate(together)]
    try:
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        rows = step(work, routed)
    finally:
        torch.set_num_threads(threads)
    for index, cache in enumerate(alone):
        (row,) = step([Work([index % VOCABULARY], cache)], routed)
        assert torch.equal(row, rows[index])


@settings(max_examples=20)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_prompts_give_what_steps_give(data: st.DataObject, seed: int) -> None:
    maker = Maker(data, data.draw(st.sampled_from([24, 100])))
    description = maker.description(2)
    native, _ = choose_kernel()
    assert native is not None
    pool = BlockPool(HostBlocks(native.kv, KVFormat.of_bits(32)), Windows())
    lengths = data.draw(st.lists(st.sampled_from([1, 17, 70, 300]), min_size=1, max_size=3))
    sizes = [data.draw(st.sampled_from([1, 2, 9, 33])) for _ in lengths]
    caches = list[list[KVCache]]()
    makers: list[Callable[[int], KVCache]] = [KVCache, pool.new_cache]
    for new in makers:
        torch.manual_seed(seed)
        caches.append(filled(description, lengths, 40, new))
    step, tokens = compiled(description), [[i % VOCABULARY for i in range(n)] for n in sizes]
    ways: list[StepFunction] = [step, step.prompts]
    expected, actual = (
        torch.cat(run([Work(t, c, True) for t, c in zip(tokens, own, strict=True)], routed))
        for run, own in zip(ways, caches, strict=True)
    )
    # Steps expand no latents, so they do not round these to 8 bits.
    tolerance = 1e-4 if maker.bits is None else 5e-2
    scale = expected.abs().max().clamp_min(1.0)
    wrong = ((actual - expected).abs().amax(1) > tolerance * scale).float().mean()
    assert wrong <= (0.0 if maker.bits is None else 0.3)


@settings(max_examples=15)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_several_tokens_of_a_sequence_are_those_read_one_by_one(
    data: st.DataObject, seed: int
) -> None:
    """Also those before one whose keys are no numbers, and beside another sequence's."""
    torch.manual_seed(seed)
    description = Maker(data, 24).description(2)
    assert isinstance(description.embedding, nn.Embedding)
    description.embedding.weight[4] = torch.nan
    lengths = data.draw(st.lists(st.sampled_from([1, 9, 510]), min_size=1, max_size=2))

    def through(_layer: int, rows: Tensor, _routing: Routing) -> Tensor:
        return rows

    caches, step = filled(description, lengths, 5), compiled(description)
    singles = [cache.fork(cache.capacity, cache.length) for cache in caches]
    found = step([Work([1, 2, 3, 4], cache, all_logits=True) for cache in caches], through)
    for rows, single in zip(found, singles, strict=True):
        expected = [step([Work([token], single)], through)[0] for token in (1, 2, 3)]
        assert torch.equal(rows[:3], torch.cat(expected))


@settings(max_examples=15)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_a_row_of_nan_visits_experts_as_others_do(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    description = Maker(data, 24).description(2)
    assert isinstance(description.embedding, nn.Embedding)
    description.embedding.weight[3] = torch.nan
    (plain,) = filled(description, [5], 1)
    fast = plain.fork(plain.capacity, plain.length)

    def choices(step: StepFunction, cache: KVCache) -> list[Tensor]:
        ids: list[Tensor] = []

        def note(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
            ids.append(routing.expert_ids)
            return rows

        step([Work([3], cache)], note)
        return ids

    expected = choices(partial(reference_step, description), plain)
    assert all(map(torch.equal, choices(compiled(description), fast), expected))


@settings(max_examples=3)
@given(st.data())
def test_what_the_compiled_step_does_not_take_is_refused(data: st.DataObject) -> None:
    description = Maker(data, 8).description(2)
    head = Projection(description.head.weight.double(), None, description.head.leaf)  # type: ignore[union-attr]
    with pytest.raises(NotDescribed, match=r"weights are torch\.float64"):
        compiled(replace(description, head=head))
