"""What a model says about sampling: read, checked, and never a reason not to run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe import MoE
from moe.errors import CheckpointError
from moe.notices import card_notices
from moe.requests import Defaults
from moe.sampling.params import SamplingParams
from moe.settings import GenerationSettings
from moe.text.generation_config import GENERATION_CONFIG, ModelSampling

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"temperature": 0.3, "repetition_penalty": 1.1}, None),
        ({"top_k": None, "max_new_tokens": 7}, {"max_new_tokens": 7}),
    ],
)
def test_what_it_names_counts(config: dict[str, Any], values: dict[str, Any] | None) -> None:
    own = ModelSampling.of(config)
    assert own.values == (config if values is None else values)
    assert own.notices == []


@pytest.mark.parametrize(
    ("config", "notice"),
    [
        ({"temperature": "hot"}, "temperature must be a finite number >= 0, got 'hot'"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": -1}, r"top_p must be a finite number in \[0, 1\], got -1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"repetition_penalty": -1}, "repetition_penalty must be"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
    ],
)
def test_what_is_not_valid_is_a_notice(config: dict[str, Any], notice: str) -> None:
    own = ModelSampling.of(config | {"min_p": 0.2})
    assert own.values == {"min_p": 0.2}
    (said,) = own.notices
    with pytest.raises(AssertionError, match=notice):
        raise AssertionError(said)
    assert said.endswith("the value is not used")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from((*NAMES, "do_sample", "other")), json_values))
def test_any_object_gives_parameters_that_are_valid(config: dict[str, Any]) -> None:
    own = ModelSampling.of(config)
    SamplingParams(**own.values)
    assert set(own.values) <= set(NAMES)


@pytest.mark.parametrize("content", ["[]", "{", "3", '"x"', "[" * 100_000])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / GENERATION_CONFIG).write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json must be a JSON object"):
        ModelSampling.from_directory(tmp_path)


def test_it_is_refused_before_weights_are_read(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model")
    phases: list[str] = []
    with suppress(CheckpointError):
        (model / GENERATION_CONFIG).write_text('{"eos_token_id": "</s>"}')
        MoE.from_pretrained(model, progress=lambda now: phases.append(now.phase))
    assert set(phases) == {"planning"}


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG).mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is not a regular"):
        ModelSampling.from_directory(tmp_path)


def test_the_file_may_be_absent(tmp_path: Path) -> None:
    assert ModelSampling.from_directory(tmp_path) == ModelSampling()
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(QWEN3))
    assert ModelSampling.from_directory(tmp_path).values["top_k"] == 20


def test_how_long_answers_are_is_the_models_say_under_auto() -> None:
    own = ModelSampling.of({"max_new_tokens": 9})
    defaults = Defaults(GenerationSettings(), own)
    for chat in (True, False):
        assert defaults.params(chat=chat, room=100).max_new_tokens == 9
        assert defaults.params(chat=chat, room=5).max_new_tokens == 5
        assert defaults.params(chat=chat, room=100, max_new_tokens=50).max_new_tokens == 50
    for settings in (GenerationSettings(max_new_tokens=None), GenerationSettings(config="off")):
        assert Defaults(settings, own).params(chat=True, room=100).max_new_tokens == 100
    (notice,) = ModelSampling.of({"max_new_tokens": "9"}).notices
    assert "the value is not used" in notice


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nnotice: made\n  for tests\n---\n# Card", "made for tests"),
        ("---\nnotice: a\x1b[31mb\n---\n", None),  # YAML has no control characters
        ('---\nnotice: "a\\e[31mb"\n---\n', "a[31mb"),
        (f"---\nnotice: {'x' * 999}\n---\n", "x" * 200),
        ("---\nlicense: mit\n---\n", None),
        ("---\nnotice: [1]\n---\n", None),
        ("---\nnotice: !!python/object/apply:os.system ['true']\n---\n", None),
        ("---\n" + "[" * 9999 + "\n---\n", None),
        (f"---\nnotice: x\n{'#' * 20_000}\n---\n", None),
        ("# Card", None),
        ("---\nnotice: x", None),
        ("", None),
    ],
)
def test_a_card_may_have_a_notice(tmp_path: Path, card: str, said: str | None) -> None:
    (tmp_path / "README.md").write_text(card)
    assert card_notices(tmp_path) == ([f"the model's card says: {said}"] if said else [])
    assert card_notices(tmp_path / "nowhere") == []
