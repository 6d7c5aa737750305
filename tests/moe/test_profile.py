"""Profiles: the keys and their defaults, precedence and origins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import configs
from moe.errors import ProfileError
from moe.settings import Profile
from moe.settings.profile import (
    KEYS,
    load_profile,
    parse_assignments,
    print_settings,
    section_of,
    value_of,
)

DEFAULT_YAML = Path(str(configs.__file__)).parent / "default.yaml"

NO_ENVIRONMENT: dict[str, str] = {}


def write(folder: Path, text: str) -> Path:
    file = folder / "x.yaml"
    file.write_text(text)
    return file


def test_the_keys_are_these() -> None:
    """A ratchet: a new, renamed or removed key must be visible in review.

    Keys of methods are pinned by tests/data/public_surface.json, method by method."""
    assert tuple(key for key in KEYS.leaves if not key.startswith("methods.")) == (
        "device",
        "threads",
        "lossless",
        "model.dtype",
        "model.proof_cache",
        "model.expert_dtype",
        "model.context_length",
        "model.expert_bits",
        "model.trunk_bits",
        "model.head_bits",
        "model.group_size",
        "model.images",
        "model.image_pixels",
        "model.check_finite",
        "model.verify",
        "kernels.backend",
        "routing.policies",
        "generation.config",
        "generation.max_new_tokens",
        "generation.temperature",
        "generation.top_p",
        "generation.top_k",
        "generation.min_p",
        "generation.repetition_penalty",
        "generation.seed",
        "engine.max_batch_size",
        "engine.priority_steps",
        "engine.fused",
        "engine.pin_threads",
        "prefill.mode",
        "prefill.wave_tokens",
        "prefill.chunk_tokens",
        "prefill.group_tokens",
        "memory.kv_tokens",
        "memory.kv_gib",
        "memory.kv_bits",
        "memory.kv_policy",
        "memory.reserve_gib",
        "memory.device_gib",
        "memory.host_gib",
        "memory.pinned_gib",
        "memory.keep_freed",
        "memory.prefix_tokens",
        "memory.reuse_answers",
        "memory.prefix_dir",
        "memory.prefix_dir_gib",
        "offload.policy",
        "offload.predictor",
        "offload.prefetch",
        "offload.late",
        "offload.reader",
        "offload.borrow",
        "offload.hot_set",
        "speculation.mode",
        "speculation.max_depth",
        "speculation.bits",
        "speculation.experts",
        "parallel.enabled",
        "parallel.timeout_s",
        "parallel.start_timeout_s",
        "parallel.on_rank_loss",
        "parallel.placement",
        "parallel.replicas",
        "parallel.rebalance",
        "parallel.rebalance_horizon_s",
        "parallel.combine",
        "parallel.payload",
        "parallel.buffer_rows",
        "server.max_waiting",
        "server.max_body_bytes",
        "server.read_timeout_s",
        "server.send_timeout_s",
        "server.request_timeout_s",
        "server.drain_timeout_s",
        "server.page",
        "server.traces",
        "server.unknown_fields",
        "server.any_model",
        "server.allow_image_urls",
        "server.trusted_proxies",
        "server.allowed_origins",
    )


def test_default_yaml_states_every_default() -> None:
    loaded = load_profile("default", environ=NO_ENVIRONMENT)
    assert loaded.profile == Profile()
    assert set(loaded.origins.values()) == {"configs/default.yaml"}


def test_default_yaml_comments_every_key() -> None:
    names = {key.split(".")[-1] for key in KEYS.leaves}
    for line in DEFAULT_YAML.read_text().splitlines():
        if found := re.match(r" *(\w+):", line):
            names.discard(found[1]) if "  # " in line else None
    assert not names, "keys without a comment"


def test_every_key_is_described() -> None:
    def undescribed(tree: type[BaseModel]) -> list[str]:
        below = [
            name
            for field in tree.model_fields.values()
            if (section := section_of(field))
            for name in undescribed(section)
        ]
        return below + [name for name, field in tree.model_fields.items() if not field.description]

    assert undescribed(Profile) == []


def test_profiles_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Profile().lossless = False
    with pytest.raises(ValidationError, match="frozen"):
        Profile().model.dtype = "float16"
    assert hash(Profile()) == hash(Profile())


def test_precedence_and_origins(tmp_path: Path) -> None:
    file = write(tmp_path, "generation: {top_k: 1, temperature: 0.5, seed: 1}\n")
    environ = {"MOE_GENERATION__TEMPERATURE": "0.6", "MOE_GENERATION__SEED": "2", "HOME": "/"}
    loaded = load_profile(file, {"generation.seed": 3}, environ)
    generation = loaded.profile.generation
    assert (generation.top_k, generation.temperature, generation.seed) == (1, 0.6, 3)
    assert loaded.origins["generation.top_k"] == str(file)
    assert loaded.origins["generation.temperature"] == "environment MOE_GENERATION__TEMPERATURE"
    assert loaded.origins["generation.seed"] == "command line"
    assert loaded.origins["generation.top_p"] == "default"


@pytest.mark.parametrize(
    "overrides",
    [
        {"routing.policies": ["top_k:2"], "engine.max_batch_size": 8},
        {"routing": {"policies": ["top_k:2"]}, "engine": {"max_batch_size": 8}},
        {"routing": {"policies": ("top_k:2",)}, "engine.max_batch_size": 8},
    ],
)
def test_overrides_may_be_dotted_or_nested(overrides: dict[str, Any]) -> None:
    profile = load_profile(None, overrides, NO_ENVIRONMENT).profile
    assert profile.routing.policies == ("top_k:2",)
    assert profile.engine.max_batch_size == 8


def test_sources_other_than_files() -> None:
    mapping = load_profile({"lossless": False}, environ=NO_ENVIRONMENT)
    profile = load_profile(Profile(lossless=False), environ=NO_ENVIRONMENT)
    assert mapping.profile == profile.profile == Profile(lossless=False)
    assert (mapping.origins["lossless"], profile.origins["lossless"]) == ("mapping", "Profile")
    assert profile.origins["device"] == "default"


def test_a_loaded_profile_keeps_its_origins_and_ignores_the_environment() -> None:
    first = load_profile({"threads": 3}, {"lossless": False}, NO_ENVIRONMENT)
    second = load_profile(first, {"device": "cpu"}, {"MOE_THREADS": "7"}, "keyword")
    assert second.profile == Profile(threads=3, lossless=False, device="cpu")
    assert second.origins == {**first.origins, "device": "keyword"}


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ROUTING__POLICIES", "[top_k:2, top_k:1]")
    assert load_profile().profile.routing.policies == ("top_k:2", "top_k:1")


def test_switches_that_are_no_profile_keys_are_left_alone() -> None:
    assert load_profile(environ={"MOE_CPU_KERNEL": "reference"}).profile == Profile()


LEAF_VALUES = {
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    "threads": st.none() | st.integers(1, 99),
    "lossless": st.booleans(),
    "model.dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    "generation.temperature": st.floats(0, 1e30),
    "generation.top_p": st.floats(0, 1),
    "routing.policies": st.lists(st.text("abn:_0123-#'\" ", min_size=1)).map(tuple),
}


@given(st.fixed_dictionaries({}, optional=LEAF_VALUES))
def test_settings_that_are_shown_can_be_set_again(overrides: dict[str, Any]) -> None:
    loaded = load_profile(None, overrides, NO_ENVIRONMENT)
    assert {key: value_of(loaded.profile, key) for key in overrides} == overrides
    lines = yaml.safe_load(
        "\n".join(  # the comment is YAML's own
            line.replace(" = ", ": ", 1) for line in print_settings(loaded).splitlines()
        )
    )
    assert set(lines) == set(KEYS.leaves)
    shown = [
        line.rpartition("  # ")[0].replace(" = ", "=", 1)
        for line in print_settings(loaded).splitlines()
        if line and not line.startswith("# ")
    ]
    again = load_profile(None, parse_assignments(shown), NO_ENVIRONMENT)
    assert again.profile == loaded.profile


def test_rounded_rows_between_ranks_are_not_lossless() -> None:
    rounded = {"parallel.payload": "int8"}
    with pytest.raises(ProfileError, match=r"parallel.payload: int8 .* set lossless: false"):
        load_profile(None, rounded, NO_ENVIRONMENT)
    profile = load_profile(None, {**rounded, "lossless": False}, NO_ENVIRONMENT).profile
    assert profile.parallel.payload == "int8"


def test_experts_on_rounded_rows_are_not_lossless() -> None:
    way = "host_int8"
    late = {"offload.late": way}
    with pytest.raises(ProfileError, match=rf"offload.late: {way} .* set lossless: false"):
        load_profile(None, late, NO_ENVIRONMENT)
    profile = load_profile(None, {**late, "lossless": False}, NO_ENVIRONMENT).profile
    assert profile.offload.late == way
