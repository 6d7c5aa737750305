"""Names that are no model's, and directories without one: the error says what was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.local import check_model


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("8000", "a port is given by --port 8000"),
        ("qwen3:30b", "Ollama's names mean nothing here: write the organisation, too"),
        ("llama3", "Ollama's names mean nothing here: write the organisation, too"),
        ("https://huggingface.co/org/name", "write org/name"),
        ("hf.co/org/name:Q4_K_M", "write org/name:Q4_K_M"),
        ("/no/such/place", "check the path"),
        ("model.gguf", "check the path"),
    ],
)
def test_a_name_that_is_none_says_what_was_meant(name: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        check_model(name)
    assert str(refused.value).startswith(f"no model directory {name!r} (looked in ")
    assert str(refused.value).partition("; ")[2].startswith(hint)


@pytest.mark.parametrize(
    ("adapter", "base"),
    [
        ({"base_model_name_or_path": "org/base", "peft_type": "LORA"}, "'org/base'"),
        ({"base_model_name_or_path": "x" * 300}, "its base model"),
        ({"base_model_name_or_path": 3}, "its base model"),
        ({}, "its base model"),
    ],
)
def test_an_adapter_is_named_with_its_base(tmp_path: Path, adapter: object, base: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    message = rf"is an adapter \(LoRA\) for {base}, not a model: merge it into that model"
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(tmp_path)


def test_a_merged_model_may_keep_the_adapters_file(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    check_model(tmp_path)
