"""Which dtype a parameter ends up in: the caller's choice, unless the architecture fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples.models.tiny import tiny_model
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config
from moe.loading.load import DtypeFor, LoadReport, load_weights, plan_weights
from moe.loading.meta_model import build_meta_model


def load(path: Path, dtype: torch.dtype, dtype_for: DtypeFor) -> tuple[PreTrainedModel, LoadReport]:
    model = build_meta_model(read_config(path), dtype=dtype)
    with Checkpoint.open(path) as checkpoint:
        weights = plan_weights(model, checkpoint, dtype_for)
        return model, load_weights(model, checkpoint, weights, device="cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_moe")
    tiny_model("qwen3_moe").save_pretrained(directory)
    return directory


def test_each_parameter_has_the_dtype_asked_for(saved: Path) -> None:
    asked: dict[str, torch.dtype] = {}

    def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
        asked[name] = stored
        return torch.bfloat16 if ".experts." in name else torch.float32

    model, _ = load(saved, torch.float32, dtype_for)
    experts = {p.dtype for name, p in model.named_parameters() if ".experts." in name}
    others = {p.dtype for name, p in model.named_parameters() if ".experts." not in name}
    assert (experts, others) == ({torch.bfloat16}, {torch.float32})
    assert set(asked.values()) == {torch.float32}


def test_modules_that_transformers_keeps_in_float32(saved: Path) -> None:
    model = build_meta_model(read_config(saved), dtype=torch.bfloat16)
    model._keep_in_fp32_modules_strict = {"q_norm"}
    with Checkpoint.open(saved) as checkpoint:
        weights = plan_weights(model, checkpoint, lambda *_: torch.bfloat16)
        load_weights(model, checkpoint, weights, device="cpu")
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["model.layers.0.self_attn.q_norm.weight"] == torch.float32
    assert dtypes["model.layers.0.self_attn.k_norm.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),  # by a class attribute
        ("lfm2_moe", "model.layers.1.feed_forward.expert_bias"),  # by its own constructor
    ],
)
def test_an_architecture_can_fix_a_dtype(architecture: str, name: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    model, _ = load(tmp_path, torch.bfloat16, lambda name, stored: torch.bfloat16)
    assert model.state_dict()[name].dtype == torch.float32
    assert model.dtype == torch.bfloat16
