"""From a checkpoint to a store: the same model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from examples.models.tiny import tiny_model
from experts.linear import QuantizedLinear
from experts.manifest import MANIFEST_NAME
from moe import MoE
from moe.cli import main
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading import takeover
from moe.loading.takeover import Takeover
from moe.settings import ModelSettings
from tests.amounts import deep_except
from tests.moe.convert.stores import SETTINGS, content

DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
IDS = list(range(3, 23))
ARCHITECTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def logits(path: Path, **model: Any) -> Tensor:
    return MoE.from_pretrained(path, model=model).logits(IDS)


@pytest.mark.parametrize("architecture", deep_except(["deepseek_v3"], ARCHITECTURES))
def test_a_store_is_the_model_quantized_while_loading(
    architecture: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint(architecture)
    store = convert(model, tmp_path / "store", SETTINGS)
    direct: dict[str, Any] = {"head_bits": 8, "group_size": 32}
    for expert_bits, trunk_bits in ((3, 4), (2, 4), (8, 8)):
        bits = {"expert_bits": expert_bits, "trunk_bits": trunk_bits}
        expected = logits(model, **bits, **direct)
        assert torch.equal(logits(store, **bits), expected)
    assert torch.equal(logits(store), expected)


@pytest.mark.parametrize("architecture", deep_except(["deepseek_v3"], ARCHITECTURES))
def test_whole_weights_stay_what_they_are(
    architecture: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint(architecture)
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(model, tmp_path / "store", whole)
    assert torch.equal(logits(store), logits(model))
    bits: dict[str, Any] = {"expert_bits": 4, "trunk_bits": 8, "head_bits": 8}
    assert torch.equal(logits(store, **bits), logits(model, **bits))


def dense_routing(architecture: str, folder: Path) -> Path:
    """Every token to every expert, so that no near tie in a router turns the comparison over."""
    model = tiny_model(architecture)
    for name in ("num_experts_per_tok", "n_group", "topk_group"):
        if hasattr(model.config, name):
            setattr(model.config, name, 8 if name == "num_experts_per_tok" else 1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", deep_except(["deepseek_v3"], ARCHITECTURES))
def test_eight_bits_are_close_to_whole_weights(architecture: str, tmp_path: Path) -> None:
    """Within 5 % of the logits' own size, root mean square, where routing cannot flip."""
    model = dense_routing(architecture, tmp_path / "model")
    store = convert(model, tmp_path / "store", SETTINGS)
    whole, at8, at4 = logits(model), logits(store), logits(store, expert_bits=4)
    size = whole.square().mean().sqrt()
    error8, error4 = ((got - whole).square().mean().sqrt() / size for got in (at8, at4))
    assert error8 < 0.05
    assert error8 < error4 < 0.6


def test_what_is_refused_before_anything_is_written(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already; remove it or choose another"):
        convert(path, tmp_path, SETTINGS)
    store = convert(path, tmp_path / "store", SETTINGS)
    with pytest.raises(CheckpointError, match="is a store already"):
        convert(store, tmp_path / "again", SETTINGS)


def test_a_disk_that_is_too_small(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("moe.commands.convert.convert.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.\d\d MiB more, and .* has 0\.00 MiB free"):
        convert(path, tmp_path / "store", SETTINGS)


def test_dense_models_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        vocab_size=8,
        intermediate_size=8,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no experts that dispatch"):
        convert(tmp_path, tmp_path / "store", SETTINGS)


def test_weights_that_are_not_finite_are_named(path: Path, tmp_path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(path / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts cannot be quantized"):
        convert(tmp_path, tmp_path / "store", SETTINGS)


def test_one_layer_is_in_memory_at_a_time_however_the_files_are_cut(
    path: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of every layer in one file, the other half in another."""
    tensors = load_file(path / "model.safetensors")
    first = {n: t for n, t in tensors.items() if "down_proj" in n}
    save_file(first, tmp_path / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in first}, tmp_path / "b.safetensors")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(path / name, tmp_path)
    take, most = Takeover.__call__, 0

    def spy(self: Takeover, name: str) -> None:
        nonlocal most
        modules = [module for _, module in takeover.experts_modules(self.network)]
        there = [m for m in modules if any(not p.is_meta for p in m._parameters.values())]
        most = max(most, len(there))
        take(self, name)

    monkeypatch.setattr(Takeover, "__call__", spy)
    store = content(convert(tmp_path, tmp_path / "store", SETTINGS))
    assert most == 1
    store.pop(MANIFEST_NAME)  # names the source
    assert store.items() <= finished.items()


def test_routers_and_embeddings_stay_whole(path: Path, tmp_path: Path) -> None:
    moe = MoE.from_pretrained(convert(path, tmp_path / "store", SETTINGS))
    model = moe.backbone.model
    planes = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert {name.rpartition(".")[2] for name in planes} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "lm_head",
    }  # fmt: skip
    assert len(planes) == 4 * 4 + 1
    assert "17 linear layers of the trunk run at 8 bits" in moe.notices
    assert "experts run at 8 bits" in moe.notices


def test_a_store_has_all_chat_templates(path: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(path, tmp_path / "model"))
    for file in (*DEMO.glob("tokenizer*"), DEMO / "chat_template.jinja"):
        shutil.copy(file, model)
    named = model / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("{{ tools }}")
    (named / "rag.jinja").write_text("{{ documents }}")
    templates = AutoTokenizer.from_pretrained(model).chat_template
    assert templates.keys() == {"default", "rag", "tool_use"}
    store = convert(model, tmp_path / "store", SETTINGS)
    assert AutoTokenizer.from_pretrained(store).chat_template == templates


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Path) -> None:
    out = str(tmp_path / "store")
    assert main(["convert", str(path), out, "--bits", "3", "--group-size", "32"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert torch.equal(
        logits(Path(out)),
        logits(path, expert_bits=3, trunk_bits=8, head_bits=8, group_size=32),
    )
    assert main(["convert", str(path), out]) == 2
    assert "exists already" in capsys.readouterr().err
