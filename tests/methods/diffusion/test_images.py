"""Images in prompts of models that write canvases, compared with transformers' generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.memory.planning import planning
from moe.methods.diffusion import driver
from moe.network.packed_pass import Work
from moe.sequence import RunningSequence
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from moe.text.tokenizer import ImagePrompt
from tests.methods.diffusion.test_writer import (
    SIZES,
    Pair,
    make_model,
    take_the_likeliest,
    written,
)
from tests.moe.image_models import picture, write_texts
from tests.moe.test_images import SMALL, Messages, asking, inputs_of

ASKED = [asking(picture(1, 96, 64), picture(2, 50, 90)), asking(picture(3, 64, 64))]
OTHER = asking(picture(4, 64, 64))
"""Has the token ids of the last one."""
TEXT = [5, 9, 2, 30, 31]


def make_seeing(path: Path, attention: str | None) -> Path:
    """A model that reads images.

    Args:
        attention: ``vision``: tokens of an image see each other; None: none sees a later one.
    """
    path.mkdir()
    texts = write_texts("gemma4", path)
    marks = {name: getattr(texts, f"{name}_token_id") for name in ("image", "boi", "eoi")}
    ids = {f"{name}_token_id": mark for name, mark in marks.items()}
    return make_model(path, **SIZES[1], vocabulary=128, attention=attention, **ids)


def pair_of(attention: str | None, folder: Path) -> Pair:
    return Pair(make_seeing(folder / "model", attention), SMALL)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of("vision", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(None, tmp_path_factory.mktemp("causal"))


@pytest.fixture(params=["seeing", "causal"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


def expected(pair: Pair, messages: Messages, seed: int) -> list[int]:
    """By transformers, of pixels."""
    inputs = inputs_of(pair.model, messages)
    prompt = inputs.pop("input_ids")[0].tolist()
    return pair.expected(prompt, seed, **inputs)


def run(
    model: MoE, pair: Pair, asked: Sequence[Messages]
) -> tuple[list[list[int]], list[RunningSequence]]:
    """Tokens of all at once, each with its own number as seed; and the sequences."""
    engine = model.loop()
    groups = [
        model.request(model.codec.encode(messages), pair.params(seed), chat=True)
        for seed, messages in enumerate(asked)
    ]
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
    assert not any(engine.occupancy().values())
    sequences = [group.sequences[0] for group in groups]
    return [sequence.token_ids for sequence in sequences], sequences


def test_tokens_are_transformers_own_alone_and_in_a_batch(pair: Pair) -> None:
    assert pair.model.status()["images"]["enabled"]
    prompt = pair.model.codec.encode(ASKED[0])
    assert isinstance(prompt, ImagePrompt)
    config = pair.reference.config.text_config
    assert prompt.rows.whole == (config.use_bidirectional_attention == "vision")
    first, second = (expected(pair, messages, seed) for seed, messages in enumerate(ASKED))
    text = pair.expected(TEXT, 2)
    params = [pair.params(seed) for seed in range(3)]
    assert written(pair.model, [*ASKED, TEXT], params) == [first, second, text]
    assert written(pair.model, ASKED[:1], params[:1]) == [first]
    other = expected(pair, OTHER, 1)
    assert written(pair.model, [OTHER], params[1:2]) == [other]
    assert other != second


def test_temperature_0_takes_the_likeliest(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    got = written(pair.model, [ASKED[1]], [pair.params(5, temperature=0)])
    take_the_likeliest(monkeypatch)
    assert got == [expected(pair, ASKED[1], 5)]


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["layered", "whole"])
def test_how_prompts_are_read_changes_no_token(pair: Pair, mode: str) -> None:
    changes = {"prefill": {"mode": mode, "group_tokens": 8, "wave_tokens": 64}}
    with MoE.from_pretrained(pair.path, SMALL | changes) as model:
        assert run(model, pair, ASKED)[0] == [expected(pair, m, s) for s, m in enumerate(ASKED)]


def test_prompts_are_cut_and_known_by_content_where_no_token_sees_a_later_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    own = driver.CanvasDriver._read_prompt

    def counted(self: Any, work: Work) -> list[Tensor]:
        reads.append(len(work.token_ids))
        return own(self, work)

    monkeypatch.setattr(driver.CanvasDriver, "_read_prompt", counted)
    prompt = pair.model.codec.encode(ASKED[1])
    assert isinstance(prompt, ImagePrompt)
    size, whole = len(prompt), prompt.rows.whole
    with MoE.from_pretrained(pair.path, SMALL) as model:
        reads.clear()
        first, _ = run(model, pair, [ASKED[1]])
        assert (max(reads) == size) is whole
        again, (known,) = run(model, pair, [ASKED[1]])
        other, (unknown,) = run(model, pair, [OTHER])
    assert first == again == [expected(pair, ASKED[1], 0)]
    assert other == [expected(pair, OTHER, 0)]
    assert known.num_cached_tokens == (0 if whole else (size - 1) // 16 * 16)
    assert unknown.num_cached_tokens == 0


def test_a_preempted_sequence_reads_its_images_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = 0
    release = RunningSequence.release

    def released(self: RunningSequence) -> None:
        nonlocal preempted
        preempted += self.cache is not None and self.finish_reason is None
        release(self)

    monkeypatch.setattr(RunningSequence, "release", released)
    asked = [ASKED[1], OTHER, ASKED[1]]
    changes = {
        "memory": {"kv_tokens": 165, "prefix_tokens": 0, "reserve_gib": 0.0},
        "prefill": {"mode": "whole", "wave_tokens": 64},  # so that two write at a time
    }
    with MoE.from_pretrained(pair.path, SMALL | changes) as model:
        tokens, _ = run(model, pair, asked)
    assert tokens == [expected(pair, messages, seed) for seed, messages in enumerate(asked)]
    assert preempted > 0


def test_a_store_with_a_quarter_of_the_experts_in_memory_reads_images(
    seeing: Pair, tmp_path: Path
) -> None:
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(seeing.path, tmp_path / "store", whole)
    with MoE.from_pretrained(store, SMALL) as model:
        plan, experts = model.memory_plan, model.stats()["expert_bytes"]
    assert any(line.name == "image towers" for line in plan.lines)
    gib = (plan.needed_bytes - 3 * experts // 4 + 4096) / GIB
    memory = SMALL["memory"] | {"device_gib": gib}
    with MoE.from_pretrained(store, SMALL | {"memory": memory}) as model:
        held, count = model.memory_plan.expert_slots, model.experts.statistics.num_experts
        assert held is not None
        assert held <= sum(count) // 3
        assert run(model, seeing, ASKED)[0] == [
            expected(seeing, messages, seed) for seed, messages in enumerate(ASKED)
        ]


def test_several_ranks_say_that_they_read_no_images(seeing: Pair) -> None:
    profile = load_profile(SMALL, environ={}).profile
    with planning(seeing.path, profile, torch.device("cpu"), lambda _: None, ranks=2) as planned:
        assert isinstance(planned.towers, str)
        assert "start without the launcher" in planned.towers


def test_rows_that_are_read_otherwise_are_refused(
    seeing: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = driver._rows_of

    def without_masks(work: Work) -> dict[str, Any] | None:
        rows = own(work)
        return None if rows is None else {k: v for k, v in rows.items() if k != "attention_mask"}

    monkeypatch.setattr(driver, "_rows_of", without_masks)
    with MoE.from_pretrained(seeing.path, SMALL) as model:
        assert "rows of images give other keys and values" in model.status()["images"]["why"]
        assert written(model, [TEXT], [seeing.params(2)]) == [seeing.expected(TEXT, 2)]
