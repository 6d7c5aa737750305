"""Steps of refinement of several canvases, against the model's own classes and by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    StableAndConfidentStoppingCriteria,
)

import kernels
from experts.dispatch import Failure
from moe import MoE
from moe.errors import RequestError
from moe.kv.cache import KVCache
from moe.network import block_diffusion, denoise
from moe.network.block_diffusion import BlockWriter
from moe.network.block_lane import BlockLane
from moe.network.denoise import OWN, Acceptance, Denoiser, draw
from moe.network.lanes import ExpertCall
from offload.errors import OffloadError
from tests.moe.test_block_diffusion import PROMPTS, SIZES, STEPS, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MoE:
    return MoE.from_pretrained(make_model(tmp_path_factory.mktemp("b") / "model", **SIZES[1]))


@pytest.fixture
def writer(model: MoE) -> BlockWriter:
    blocks = model._loaded.blocks
    assert blocks is not None
    assert blocks.denoiser is not None, blocks.no_policies
    return blocks


def write(
    writer: BlockWriter, run: Any, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[BlockLane], list[list[int]]]:
    """Write two blocks behind each prompt, all together."""
    with torch.inference_mode():
        num_new = 2 * writer.canvas_length
        lanes = [
            writer.lane(prompt, num_new, seed, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(prompts)
        ]
        blocks = block_diffusion.write(writer, lanes, run)
    return lanes, [[token.id for token in block] for block in blocks]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("at_once", [1 << 20, 200])
def test_draws_are_those_of_multinomial(
    at_once: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise, "_DRAWN_AT_ONCE", at_once)
    if not native:
        monkeypatch.setattr(kernels, "choose_kernel", lambda: (None, "not here"))
    probabilities = (torch.randn(40, 97) * torch.linspace(0.1, 9, 40)[:, None]).softmax(-1)
    probabilities[0] = torch.nn.functional.one_hot(torch.tensor(5), 97)
    torch.manual_seed(3)
    expected, after = torch.multinomial(probabilities, 1)[:, 0], torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(draw(probabilities), expected)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_entropies_are_those_of_the_distribution(scale: float) -> None:
    logits = torch.randn(1, 16, 97) * scale
    logits[0, 3, :50] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    found = denoise.entropies(logits, logits.softmax(-1), logits.argmax(-1))
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=3e-7)
    logits[0, 5, 7] = torch.nan
    found = denoise.entropies(logits, logits.softmax(-1), logits.argmax(-1))
    assert found.isnan()[0].tolist() == [at == 5 for at in range(16)]


@pytest.mark.parametrize("bound", [0.01, 0.5, 8.0])
def test_what_stays_is_what_the_models_sampler_keeps(bound: float) -> None:
    sampler: Any = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 16, 97, 48)
    for scale in (1.0, 4.0):
        logits = torch.randn(1, 16, 97) * scale
        sampler.accept_canvas(torch.zeros(1, 16).long(), torch.ones(1, 16).long(), logits, 1)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        kept = OWN.kept(entropy, logits.softmax(-1), bound)
        assert torch.equal(kept, sampler.accepted_token_mask)
    sure = Acceptance("confidence", 0.6).kept(entropy, logits.softmax(-1), bound)
    likely = logits.softmax(-1).amax(-1)
    assert torch.equal(sure, (likely >= 0.6) | (likely == likely.max()))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_final_is_what_the_models_rule_says(count: int) -> None:
    rules: list[Any] = [StableAndConfidentStoppingCriteria(count, 0.5) for _ in range(2)]
    own, ours = rules
    seen = []
    canvas = torch.randint(3, (1, 2))
    for step in range(40):
        logits = torch.randn(1, 2, 7) * (20 if step % 3 else 1)
        canvas = canvas if step % 4 else torch.randint(3, (1, 2))
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        seen.append(bool(own(canvas, logits)))
        assert bool(denoise._is_final(ours, canvas, entropy)) is seen[-1]
    assert set(seen) == {True, False}
    assert not denoise._is_final(None, canvas, entropy)


def test_canvases_of_a_step_share_a_pass_and_change_nothing(
    model: MoE, writer: BlockWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        if layer == 0:
            rows.extend(len(call.hidden_states) for call in calls if call.phase == "denoise")
        return model.experts.run(layer, calls)

    lanes, together = write(writer, run)
    size = writer.canvas_length
    assert set(rows) == {len(PROMPTS) * size}
    assert [lane.passes for lane in lanes] == [{"prefill": 2, "denoise": 2 * STEPS}] * 3
    rows.clear()
    monkeypatch.setattr(writer.denoiser, "_most", 2)  # as if logits were large
    assert write(writer, run)[1] == together
    assert set(rows) == {2 * size, size}
    monkeypatch.setattr(writer, "denoiser", None)  # each lane by the model's own code
    assert write(writer, run)[1] == together


def test_a_failing_pass_ends_only_the_canvas_that_it_concerns(
    model: MoE, writer: BlockWriter
) -> None:
    _, whole = write(writer, model.experts.run)
    size, steps = writer.canvas_length, 0

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        nonlocal steps
        if layer == 1 and any(call.phase == "denoise" for call in calls):
            steps += 1
            if steps == 3:  # several canvases share it
                raise OffloadError("the disk is gone")
            if steps in range(4, 7):  # one by one
                return [
                    OffloadError("the disk is gone") if at == 1 else rows
                    for at, rows in enumerate(model.experts.run(layer, calls))
                ]
        return model.experts.run(layer, calls)

    lanes, blocks = write(writer, run)
    with pytest.raises(OffloadError, match="the disk is gone"):
        lanes[1].result()
    assert blocks[1] == []
    assert [blocks[0], blocks[2]] == [whole[0], whole[2]]
    assert size == len(whole[1]) // 2


@pytest.mark.parametrize("phase", ["denoise", "prefill"])
def test_rows_that_another_rank_lost_end_their_own_sequence(
    model: MoE, writer: BlockWriter, phase: str
) -> None:
    """There, a pass goes on with zeros, and says which rows they are."""
    _, whole = write(writer, model.experts.run)
    size, reads = writer.canvas_length, 0

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        nonlocal reads
        found = model.experts.run(layer, calls)
        own = [call for call in calls if call.phase == phase]
        reads += layer == 1 and bool(own)
        if layer == 1 and own and reads == 2:  # of a prefill: the blocks, behind the prompts
            hit, row = (own[0], size + 2) if phase == "denoise" else (own[1], 3)
            hit.lost[row] = Failure("the disk of rank 1 is gone", unreadable=True)
        return found

    lanes, blocks = write(writer, run)
    with pytest.raises(OffloadError, match="the disk of rank 1 is gone"):
        lanes[1].result()
    assert blocks[1] == whole[1][: 0 if phase == "denoise" else size]
    assert [blocks[0], blocks[2]] == [whole[0], whole[2]]


def test_logits_that_are_no_numbers_end_the_sequence(model: MoE, writer: BlockWriter) -> None:
    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        rows = model.experts.run(layer, calls)
        canvas = calls[0].phase == "denoise"
        return [own * float("nan") if canvas else own for own in rows if isinstance(own, Tensor)]

    lanes, _ = write(writer, run, PROMPTS[:1])
    with pytest.raises(RuntimeError, match="not finite numbers"):
        lanes[0].result()


def test_models_whose_steps_are_not_known_write_by_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "model", **SIZES[0])
    monkeypatch.setattr(denoise, "_ARGUMENTS", frozenset({"something_else"}))
    model = MoE.from_pretrained(path)
    blocks = _writer(model)
    assert blocks.denoiser is None
    assert "no _denoising_step that is known" in blocks.no_policies
    assert model.status()["blocks"]["policies"] == blocks.no_policies
    assert Denoiser.why_not(blocks.model) == blocks.no_policies
    monkeypatch.undo()
    other = MoE.from_pretrained(path)
    assert _writer(other).denoiser is not None
    assert write(blocks, model.experts.run)[1] == write(_writer(other), other.experts.run)[1]


def _writer(model: MoE) -> BlockWriter:
    blocks = model._loaded.blocks
    assert blocks is not None
    return blocks


def test_logits_of_a_canvas_are_those_of_a_first_pass(model: MoE, writer: BlockWriter) -> None:
    canvas = list(range(10, 10 + writer.canvas_length))
    found = model.canvas_logits(PROMPTS[0], canvas)
    assert found.shape == (writer.canvas_length, 97)
    with pytest.raises(RequestError, match=r"blocks of 8 tokens, and a canvas of 3 .* behind 5"):
        model.canvas_logits(PROMPTS[0], canvas[:3])


def test_a_canvas_keeps_soft_embeddings_and_its_first_pass_shares_one_with_others(
    model: MoE, writer: BlockWriter
) -> None:
    _, expected = write(writer, model.experts.run)
    rows: list[int] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        if layer == 0:
            rows.extend(len(call.hidden_states) for call in calls if call.phase == "denoise")
        return model.experts.run(layer, calls)

    num_new = 2 * writer.canvas_length
    with torch.inference_mode():
        lanes = [
            writer.lane(prompt, num_new, seed, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(PROMPTS)
        ]
        for _ in range(3):  # the prompt and two passes
            writer.step(lanes[:1], run)
        asked = lanes[0].asked
        assert asked is not None
        kept = asked.given["self_conditioning_logits"]
        assert kept.shape == (1, writer.canvas_length, 32)  # hidden size; words are 97
        rows.clear()
        writer.step(lanes, run)
        writer.step(lanes, run)
        assert rows == [writer.canvas_length, 3 * writer.canvas_length]
        rest = block_diffusion.write(writer, lanes, run)
    assert [[token.id for token in block] for block in rest] == expected
