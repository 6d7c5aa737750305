"""config.json and the empty model: what is refused, and that no code is ever run."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig, T5Config

from experts.manifest import StoreError, read_manifest
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading import config_file
from moe.loading.config_file import check_dense
from moe.loading.hub import read_config
from moe.loading.meta_model import build_meta_model
from moe.text.generation_config import read_generation_config
from moe.text.tokenizer import load_tokenizer

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(SMALL | changes))
    return directory


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no config\.json in .*Hugging Face format"),
        (b"{", r"config\.json is not a valid JSON"),
        (b"\xff", r"config\.json is not a valid JSON"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32 levels deep"),
        (b"[" * 100_000, r"config\.json is not a valid JSON"),
        (b"[]", r"config\.json holds a JSON list, not an object"),
        (b"{}", r"config\.json has no model_type"),
        (b'{"model_type": 3}', r"config\.json has no model_type"),
    ],
)
def test_unreadable_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "endless", "large"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "moe-store.json"])
def test_only_plain_files_of_a_fair_size_are_read(tmp_path: Path, name: str, kind: str) -> None:
    """Not waited for, and not read for ever."""
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "endless":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)  # sparse
    read = {"config.json": read_config, "moe-store.json": read_manifest}
    why = {"fifo": "is not a regular file", "endless": "regular file|link out", "large": "has more"}
    with pytest.raises((CheckpointError, StoreError), match=why[kind]):
        read.get(name, read_generation_config)(tmp_path)


def test_a_tokenizer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    tokenizer, why = load_tokenizer(tmp_path)
    assert tokenizer is None
    assert "tokenizer.json is not a regular file" in why


def test_labels_of_classifiers_are_not_made(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, num_labels=30_000_000, id2label={"0": "a"}))
    assert config.num_labels == 2


def test_unknown_architecture_is_named_with_the_version(tmp_path: Path) -> None:
    write(tmp_path, model_type="moe_of_tomorrow")
    message = rf"'moe_of_tomorrow' is not in the installed transformers {transformers.__version__}"
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5 must lie between 1 and .* = 4",
        ),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 must lie between 1 and"),
        ({"hidden_size": -16}, "hidden_size must be an integer from 1 to 2147483648, given -16"),
        (
            {"hidden_size": 16.5},
            r"hidden_size must be an integer .* given 16\.5",
        ),
        ({"vocab_size": "64"}, r"vocab_size must be an integer .* given '64'"),
        (
            {"num_hidden_layers": True},
            "num_hidden_layers must be an integer from 1 to 512",
        ),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer from 1 to 512"),
        ({"sliding_window": -1}, "sliding_window must be an integer from 0 to"),
        ({"x": {"head_dim": 0}}, r"x\.head_dim must be an integer .* given 0"),
        ({"rope_parameters": 7}, "is not a valid qwen3_moe configuration"),
    ],
)
def test_senseless_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write(tmp_path, **changes))


def test_layers_without_weights_are_not_made(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path]
) -> None:
    (weights,) = tiny_checkpoint("qwen3_moe").glob("*.safetensors")
    shutil.copy(weights, write(tmp_path, num_hidden_layers=512))
    with pytest.raises(CheckpointError, match="= 512, and the weights beside it are of 4 layers"):
        read_config(tmp_path)


def test_no_code_of_the_model_directory_is_run(tmp_path: Path) -> None:
    """A canary: every way a configuration can name code, and a module that must not be imported."""
    (tmp_path / "canary.py").write_text("import sys; sys.moe_canary = True")
    nested = {"auto_map": {"AutoConfig": "canary.X"}, "_attn_implementation_internal": "evil/x"}
    config = read_config(
        write(
            tmp_path,
            auto_map={"AutoConfig": "canary.C", "AutoModelForCausalLM": "canary.M"},
            _attn_implementation_internal="evil/kernel",
            _attn_implementation="evil/kernel",
            attn_implementation="evil/kernel",
            experts_implementation="evil/kernel",
            extra=nested,
            many=[nested],
        )
    )
    model = build_meta_model(config)
    assert not hasattr(sys, "moe_canary")
    assert "evil" not in repr(vars(config))
    assert "auto_map" not in repr(vars(config))
    assert "evil" not in str(model.config._attn_implementation)


def test_infinite_values_survive(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, custom=[0.0, {"__float__": "Infinity"}]))
    assert config.custom == [0.0, math.inf]


def test_meta_model_has_the_class_and_no_memory(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, dtype="bfloat16"))
    model = build_meta_model(config)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert not model.training
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert build_meta_model(config, dtype=torch.float32).dtype == torch.float32
    assert config.dtype == torch.bfloat16  # the caller's is left alone


def test_no_causal_language_model() -> None:
    message = r"t5 \(T5Config\) has no class in transformers"
    with pytest.raises(UnsupportedModelError, match=message):
        build_meta_model(T5Config())


def test_sizes_that_the_architecture_itself_refuses() -> None:
    config = Qwen3MoeConfig(**{k: v for k, v in SMALL.items() if k != "model_type"})
    config.hidden_act = "no-such-activation"
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM cannot be built from"):
        build_meta_model(config)


def test_a_model_is_called_dense_where_that_is_certain(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'llama' is a dense model: it has no experts"):
        check_dense({"model_type": "llama"}, tmp_path)
    check_dense({"model_type": "llava"}, tmp_path)  # made of others, which are not named
    for path in ("./llama", "../models/llama", "/etc", ""):
        check_dense({"model_type": path}, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_file, "find_spec", lambda _: None)
        check_dense({"model_type": "llama"}, tmp_path)


@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_to_a_config_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("damaged"))
    content = bytearray((path / "config.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (path / "config.json").write_bytes(content)
    try:
        config = read_config(path)
    except (CheckpointError, UnsupportedModelError):
        return
    assert config.hidden_size > 0
    assert config.num_experts_per_tok >= 0
