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
from moe.kv.cache import KVCache
from moe.methods.diffusion import denoise
from moe.methods.diffusion import driver as driving
from moe.methods.diffusion.denoise import OWN, Denoiser, draw
from moe.methods.diffusion.driver import CanvasDriver
from moe.methods.diffusion.evaluate import driver_of
from moe.methods.diffusion.lane import CanvasLane
from moe.network.lanes import ExpertCall
from offload.errors import OffloadError
from tests.methods.diffusion.test_writer import PROMPTS, SIZES, STEPS, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MoE:
    return MoE.from_pretrained(make_model(tmp_path_factory.mktemp("b") / "model", **SIZES[1]))


@pytest.fixture
def driver(model: MoE) -> CanvasDriver:
    found = driver_of(model)
    assert found.denoiser is not None, found.no_policies
    return found


def write(
    driver: CanvasDriver, run: Any, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[CanvasLane], list[list[int]]]:
    """Write two canvases after each prompt, all together."""
    with torch.inference_mode():
        num_new = 2 * driver.canvas_length
        lanes = [
            driver.lane(prompt, num_new, seed, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(prompts)
        ]
        finals = driving.write(driver, lanes, run)
    return lanes, [[token.id for token in final] for final in finals]


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
    model: MoE, driver: CanvasDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        if layer == 0:
            rows.extend(len(call.hidden_states) for call in calls if call.phase == "decode")
        return model.experts.run(layer, calls)

    lanes, together = write(driver, run)
    size = driver.canvas_length
    assert set(rows) == {len(PROMPTS) * size}
    assert [lane.passes for lane in lanes] == [{"prefill": 2, "decode": 2 * STEPS}] * 3
    rows.clear()
    monkeypatch.setattr(driver.denoiser, "_most", 2)  # as if logits were large
    assert write(driver, run)[1] == together
    assert set(rows) == {2 * size, size}
    monkeypatch.setattr(driver, "denoiser", None)  # each lane by the model's own code
    assert write(driver, run)[1] == together


def test_a_failing_pass_ends_only_the_canvas_that_it_concerns(
    model: MoE, driver: CanvasDriver
) -> None:
    _, whole = write(driver, model.experts.run)
    size, steps = driver.canvas_length, 0

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        nonlocal steps
        if layer == 1 and any(call.phase == "decode" for call in calls):
            steps += 1
            if steps == 3:  # several canvases share it
                raise OffloadError("the disk is gone")
            if steps in range(4, 7):  # one by one
                return [
                    OffloadError("the disk is gone") if at == 1 else rows
                    for at, rows in enumerate(model.experts.run(layer, calls))
                ]
        return model.experts.run(layer, calls)

    lanes, finals = write(driver, run)
    with pytest.raises(OffloadError, match="the disk is gone"):
        lanes[1].result()
    assert finals[1] == []
    assert [finals[0], finals[2]] == [whole[0], whole[2]]
    assert size == len(whole[1]) // 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_rows_that_another_rank_lost_end_their_own_sequence(
    model: MoE, driver: CanvasDriver, phase: str
) -> None:
    """There, a pass goes on with zeros, and says which rows they are."""
    _, whole = write(driver, model.experts.run)
    size, reads = driver.canvas_length, 0

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        nonlocal reads
        found = model.experts.run(layer, calls)
        own = [call for call in calls if call.phase == phase]
        reads += layer == 1 and bool(own)
        if layer == 1 and own and reads == 2:  # of a prefill: the finals, behind the prompts
            hit, row = (own[0], size + 2) if phase == "decode" else (own[1], 3)
            hit.lost[row] = Failure("the disk of rank 1 is gone", unreadable=True)
        return found

    lanes, finals = write(driver, run)
    with pytest.raises(OffloadError, match="the disk of rank 1 is gone"):
        lanes[1].result()
    assert finals[1] == whole[1][: 0 if phase == "decode" else size]
    assert [finals[0], finals[2]] == [whole[0], whole[2]]


def test_logits_that_are_no_numbers_end_the_sequence(model: MoE, driver: CanvasDriver) -> None:
    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        rows = model.experts.run(layer, calls)
        canvas = calls[0].phase == "decode"
        return [own * float("nan") if canvas else own for own in rows if isinstance(own, Tensor)]

    lanes, _ = write(driver, run, PROMPTS[:1])
    with pytest.raises(RuntimeError, match="not finite numbers"):
        lanes[0].result()


def test_models_whose_steps_are_not_known_write_by_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "model", **SIZES[0])
    monkeypatch.setattr(denoise, "_ARGUMENTS", frozenset({"something_else"}))
    model = MoE.from_pretrained(path)
    finals = driver_of(model)
    assert finals.denoiser is None
    assert "no _denoising_step that is known" in finals.no_policies
    assert model.status()["writer"]["policies"] == finals.no_policies
    assert Denoiser.why_not(finals.model) == finals.no_policies
    monkeypatch.undo()
    other = MoE.from_pretrained(path)
    assert driver_of(other).denoiser is not None
    assert write(finals, model.experts.run)[1] == write(driver_of(other), other.experts.run)[1]


def test_logits_of_a_canvas_are_those_of_a_first_pass(model: MoE, driver: CanvasDriver) -> None:
    canvas = list(range(10, 10 + driver.canvas_length))
    found = driver.logits(PROMPTS[0], canvas, model.experts.run)
    assert found.shape == (driver.canvas_length, 97)


def test_a_canvas_keeps_soft_embeddings_and_its_first_pass_shares_one_with_others(
    model: MoE, driver: CanvasDriver
) -> None:
    _, expected = write(driver, model.experts.run)
    rows: list[int] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        if layer == 0:
            rows.extend(len(call.hidden_states) for call in calls if call.phase == "decode")
        return model.experts.run(layer, calls)

    num_new = 2 * driver.canvas_length
    with torch.inference_mode():
        lanes = [
            driver.lane(prompt, num_new, seed, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(PROMPTS)
        ]
        for _ in range(3):  # the prompt and two passes
            driver.step(lanes[:1], run)
        asked = lanes[0].asked
        assert asked is not None
        kept = asked.given["self_conditioning_logits"]
        assert kept.shape == (1, driver.canvas_length, 32)  # hidden size; words are 97
        rows.clear()
        driver.step(lanes, run)
        driver.step(lanes, run)
        assert rows == [driver.canvas_length, 3 * driver.canvas_length]
        rest = driving.write(driver, lanes, run)
    assert [[token.id for token in final] for final in rest] == expected
