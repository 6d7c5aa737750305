"""Passes over canvases that leave rows out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.errors import ProfileError
from moe.kv.cache import KVCache
from moe.loading.memory_plan import GIB
from moe.methods.diffusion import denoise
from moe.methods.diffusion.denoise import Acceptance, Denoiser
from moe.methods.diffusion.driver import write
from moe.methods.diffusion.evaluate import driver_of
from moe.methods.diffusion.kept_rows import KeptRows, Refresh, Said
from moe.network.lanes import ExpertCall, Lane, run_lanes
from moe.sampling.batch import Token
from moe.sequence import RunningSequence
from moe.settings import ModelSettings, Profile
from offload.errors import OffloadError
from tests.methods.diffusion.test_writer import PROMPTS, SIZES, STEPS, Pair, make_model

CANVAS = SIZES[1]["canvas"]
ELASTIC = {"lossless": False, "methods.diffusion.refresh": "elastic:0.6:3"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = make_model(tmp_path_factory.mktemp("rows") / "model", **SIZES[1])
    return Pair(path, ELASTIC)


def written(model: MoE, prompts: Sequence[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    num_new = 2 * CANVAS
    params = [
        SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=seed, **more)
        for seed in range(len(prompts))
    ]
    return [done.token_ids for done in model.generate(list(prompts), params)]


def rows_of(model: MoE) -> float:
    """Rows of canvases that went through the layers."""
    layers = model.stats()["layers"]
    return sum(layer["tokens_by"]["decode"] for layer in layers) / len(layers)


@pytest.mark.parametrize("text", ["elastic", "elastic:2:3", "elastic:0.5", "elastic:0.5:0", "some"])
def test_what_is_no_rule_is_refused(pair: Pair, text: str) -> None:
    with pytest.raises(ProfileError, match=r"must be all, or elastic:S:N with a similarity S in"):
        MoE.from_pretrained(pair.path, {"lossless": False, "methods.diffusion.refresh": text})


def test_leaving_rows_out_is_not_lossless(pair: Pair) -> None:
    with pytest.raises(
        ProfileError, match=r"methods.diffusion.refresh: elastic:0.6:3 changes .* lossless"
    ):
        MoE.from_pretrained(pair.path, {"methods.diffusion.refresh": "elastic:0.6:3"})


def test_a_model_whose_steps_are_not_known_leaves_none_out(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise, "_ARGUMENTS", frozenset({"something_else"}))
    with pytest.raises(
        ProfileError, match=r"is elastic:0.6:3, and .*set methods.diffusion.refresh: all"
    ):
        MoE.from_pretrained(pair.path, ELASTIC)


def test_rows_that_moved_are_computed_and_all_of_them_now_and_then() -> None:
    kept = KeptRows(Refresh(0.9, 3))
    base = torch.eye(4)[None]

    def said(rows: Tensor, value: int) -> tuple[Said, list[Token]]:
        whole = torch.full((1, len(rows)), value)
        scores = [Token(value, -1.0) for _ in rows]
        return Said(whole, whole, whole.float(), whole[..., None].float()), scores

    def a_pass(inputs: Tensor, value: int, first: bool = False) -> tuple[list[int], list[int]]:
        rows = kept.choose(inputs, first=first)
        assert kept.choose(inputs, first=first).tolist() == rows.tolist()  # it may be tried again
        new = torch.full((1, 2, len(rows), 3), float(value))
        keys, values = kept.join(7, new, 2 * new)
        assert torch.equal(2 * keys, values)
        found, scores = kept.merge(*said(rows, value))
        assert scores is not None
        tokens = found.likeliest[0].tolist()
        assert tokens == keys[0, 1, :, 2].tolist() == [one.id for one in scores]
        assert tokens == found.probabilities[0, :, 0].tolist() == found.entropy[0].tolist()
        return rows.tolist(), tokens

    assert a_pass(base, 1, first=True) == ([0, 1, 2, 3], [1, 1, 1, 1])
    moved = base.clone()
    moved[0, 2] = torch.ones(4)
    moved[0, 0, 1] = 0.1  # similar enough
    assert a_pass(moved, 2) == ([2], [1, 1, 2, 1])
    assert a_pass(moved, 3) == ([0], [3, 1, 2, 1])  # none has moved: the least similar
    assert a_pass(moved, 4) == ([0, 1, 2, 3], [4, 4, 4, 4])
    assert a_pass(moved, 5)[0] == [0]
    assert a_pass(base, 6, first=True) == ([0, 1, 2, 3], [6, 6, 6, 6])  # a new canvas


def test_rows_see_the_kept_keys_of_the_others(pair: Pair) -> None:
    """On the same input, rows computed beside kept ones are those of a whole pass."""
    driver = driver_of(pair.model)
    denoiser = driver.denoiser
    assert denoiser is not None
    said: list[Tensor] = []

    class Watched(Denoiser):
        def _decide(self, call: Any, raw_1RV: Tensor) -> Any:
            said.append(raw_1RV)
            return super()._decide(call, raw_1RV)

    whole, part = Refresh(0.6, 1), Refresh(0.0, 99)
    with torch.inference_mode():
        prompt = PROMPTS[0]
        own = Acceptance(refresh=whole)
        lane = driver.lane(prompt, 9, 0, acceptance=own, rows=KVCache(len(prompt) + 2 * CANVAS))
        for _ in range(3):
            driver.step([lane], pair.model.experts.run)
        call = lane.asked
        assert call is not None
        assert call.kept is not None
        call.given["diffusion_stopping_criteria"] = None
        for refresh in (whole, part):
            call.kept._refresh = refresh
            run = Lane(partial(Watched.run, _as(denoiser, Watched), [call]), "decode")
            run_lanes([run], pair.model.experts.run)
            run.result()
        rows = call.kept._rows
    assert [raw.shape[1] for raw in said] == [CANVAS, 1]
    assert torch.allclose(said[0][:, rows], said[1], atol=1e-5)
    with torch.inference_mode():
        call.kept._keys[1][0].zero_()
        run = Lane(partial(Watched.run, _as(denoiser, Watched), [call]), "decode")
        run_lanes([run], pair.model.experts.run)
    assert not torch.allclose(said[1], said[2], atol=1e-5)  # they were read


def test_with_all_rows_in_each_pass_tokens_are_transformers_own(pair: Pair) -> None:
    how = {"lossless": False, "methods.diffusion.refresh": "elastic:0.6:1"}
    with MoE.from_pretrained(pair.path, how) as model:
        assert written(model) == [pair.expected(prompt, at) for at, prompt in enumerate(PROMPTS)]
        assert rows_of(model) == len(PROMPTS) * 2 * STEPS * CANVAS


def test_tokens_are_the_same_alone_together_from_disk_and_with_scores(
    pair: Pair, tmp_path: Path
) -> None:
    pair.model.reset_stats()
    together = written(pair.model)
    every = len(PROMPTS) * 2 * STEPS * CANVAS
    assert every / 3 < rows_of(pair.model) < every
    assert together != [pair.expected(prompt, at) for at, prompt in enumerate(PROMPTS)]
    assert written(pair.model, PROMPTS[:1]) == together[:1]
    assert written(pair.model, logprobs=1) == together
    store = convert(
        pair.path, tmp_path / "s", ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    )
    limited = {"memory.kv_tokens": 200, "memory.reserve_gib": 0.0, "prefill.wave_tokens": 256}
    with MoE.from_pretrained(store, ELASTIC | limited) as model:
        plan, experts = model.memory_plan, model.stats()["expert_bytes"]
    (line,) = [one for one in plan.lines if one.name == "canvases"]
    # Soft embeddings and inputs, and keys and values of three layers.
    row = 2 * 32 + 2 * (2 * 8 + 2 * 8 + 1 * 16)
    assert line.bytes == Profile().engine.max_batch_size * CANVAS * row * 4
    limited["memory.device_gib"] = (plan.needed_bytes - 3 * experts // 4 + 4096) / GIB
    with MoE.from_pretrained(store, ELASTIC | limited) as model:
        assert written(model) == together
        assert model.stats()["offload"]["bytes_read"] > 0


def test_a_preempted_canvas_keeps_its_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(7 * at) % 90 + 3 for at in range(begin, begin + 20)] for begin in (0, 5, 9)]
    expected, release, preempted = written(pair.model, prompts), RunningSequence.release, 0

    def released(self: RunningSequence) -> None:
        nonlocal preempted
        preempted += self.cache is not None and self.finish_reason is None
        release(self)

    changes = ELASTIC | {"memory.kv_tokens": 50, "memory.prefix_tokens": 0}
    with MoE.from_pretrained(pair.path, changes) as model:
        monkeypatch.setattr(RunningSequence, "release", released)
        assert written(model, prompts) == expected
    assert preempted > 0


def test_a_pass_that_lacks_experts_is_run_again(pair: Pair) -> None:
    driver, size = driver_of(pair.model), 2 * CANVAS
    own, steps = Acceptance(refresh=Refresh(0.6, 3)), 0

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        nonlocal steps
        if layer == 1 and any(call.phase == "decode" for call in calls):
            steps += 1
            if steps == 3:  # a part of each canvas, in one pass
                raise OffloadError("the disk was away")
        return pair.model.experts.run(layer, calls)

    with torch.inference_mode():
        lanes = [
            driver.lane(prompt, size, at, acceptance=own, rows=KVCache(len(prompt) + size))
            for at, prompt in enumerate(PROMPTS)
        ]
        finals = write(driver, lanes, run)
    assert steps > 3
    assert [[token.id for token in final] for final in finals] == written(pair.model)


def _as(denoiser: Denoiser, kind: type[Denoiser]) -> Denoiser:
    other = object.__new__(kind)
    other.__dict__ = denoiser.__dict__
    return other
