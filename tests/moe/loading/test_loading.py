"""Loading equals transformers' own, bit by bit, in every dtype and with tied weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.models.tiny import tiny_model
from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config
from moe.loading.load import LoadReport, load_weights, plan_weights
from moe.loading.meta_model import build_meta_model
from moe.loading.progress import LoadProgress, reporting
from moe.network.stacked import stacked_origins
from tests.amounts import deep_except

ARCHITECTURES = [
    "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe", "phimoe", "jetmoe",
    "qwen3_next", "glm4_moe", "minimax", "aria_text", "jamba", "ernie4_5_moe", "nemotron_h",
    "llama4_text", "dbrx",
]  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    dtype_for: Callable[[str, torch.dtype], torch.dtype] | None = None,
    check_finite: bool = False,
) -> tuple[PreTrainedModel, LoadReport]:
    model = build_meta_model(read_config(path), dtype=dtype)
    with Checkpoint.open(path) as checkpoint:
        weights = plan_weights(model, checkpoint, dtype_for or (lambda name, stored: dtype))
        report = load_weights(model, checkpoint, weights, device="cpu", check_finite=check_finite)
    kept = (*model.parameters(), *model.buffers())
    assert sum(weights.nbytes.values()) == sum(tensor.nbytes for tensor in kept)
    return model, report


def everything(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, buffers, and the buffers that no checkpoint holds."""
    return dict(model.state_dict()) | dict(model.named_buffers())


def assert_same(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    mine, other = everything(ours), everything(theirs)
    for block, experts, name, origins in stacked_origins(ours):
        parts = [o.part(other.pop(block + o.name), experts.num_experts) for o in origins]
        other[name] = torch.cat(parts, 1)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("architecture", deep_except(["qwen3_moe", "deepseek_v3"], ARCHITECTURES))
def test_every_tensor_is_the_one_that_transformers_loads(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path, max_shard_size="60KB")
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        ours, report = load(tmp_path, dtype, check_finite=True)
        assert type(ours) is type(theirs)
        assert_same(ours, theirs)
        assert report.computed == ()
        assert not any(parameter.requires_grad for parameter in ours.parameters())
        if "model.rotary_emb.inv_freq" in everything(ours):
            assert everything(ours)["model.rotary_emb.inv_freq"].dtype == torch.float32


def test_expert_tensors_are_read_to_their_place_without_a_conversion(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("read into a copy"))
    load(saved)


def test_large_tensors_go_in_slices(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.loading.load.SLICE_BYTES", 300)
    for dtype in (torch.float32, torch.float16):
        ours, _ = load(saved, dtype)
        assert_same(ours, AutoModelForCausalLM.from_pretrained(saved, dtype=dtype))


def test_files_that_change_during_the_load(edited: Callable[..., Path]) -> None:
    path = edited({})

    def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
        os.utime(path / "model.safetensors", ns=(0, 0))
        return stored

    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was read"):
        load(path, dtype_for=dtype_for)


def test_old_rotary_buffers_are_ignored_and_reported(edited: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _, report = load(edited({name: torch.ones(8)}))
    assert report.ignored == (name,)


def tie(path: Path) -> None:
    config = path / "config.json"
    text = config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    config.write_text(text)
    assert '"tie_word_embeddings": true' in text


def test_tied_weights_share_memory_whichever_is_stored(edited: Callable[..., Path]) -> None:
    embedding = torch.randn(128, 32)
    for stored in (
        {"lm_head.weight": None, "model.embed_tokens.weight": embedding},
        {"lm_head.weight": embedding, "model.embed_tokens.weight": None},
        {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone()},
    ):
        path = edited(stored)
        tie(path)
        model, _ = load(path)
        head, tokens = model.get_output_embeddings(), model.get_input_embeddings()
        assert head.weight is tokens.weight
        assert torch.equal(model.state_dict()["lm_head.weight"], embedding)
        assert_same(model, AutoModelForCausalLM.from_pretrained(path))


def test_tied_by_configuration_but_stored_with_different_values(
    edited: Callable[..., Path],
) -> None:
    """As transformers does: both are kept."""
    path = edited({"lm_head.weight": torch.randn(128, 32)})
    tie(path)
    model, _ = load(path)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert_same(model, AutoModelForCausalLM.from_pretrained(path))


def test_nothing_is_initialised_at_random(saved: Path) -> None:
    state = torch.get_rng_state()
    load(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_bar_is_drawn_on_stderr_only(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_meta_model(read_config(saved))
    with Checkpoint.open(saved) as checkpoint, reporting(True) as report:
        weights = plan_weights(model, checkpoint, lambda _, dtype: dtype)
        load_weights(model, checkpoint, weights, device="cpu", report=report)
    assert capfd.readouterr().out == ""


def test_progress_counts_every_byte_once(saved: Path) -> None:
    model = build_meta_model(read_config(saved))
    seen: list[LoadProgress] = []
    with Checkpoint.open(saved) as checkpoint, reporting(seen.append) as report:
        weights = plan_weights(model, checkpoint, lambda _, dtype: dtype)
        load_weights(model, checkpoint, weights, device="cpu", report=report)
    done = [now.done_bytes for now in seen]
    assert done == sorted(done)
    assert (seen[0].fraction, seen[-1].fraction) == (0.0, 1.0)
    assert {now.total_bytes for now in seen} == {weights.bytes_to_read}
