"""Text models inside multimodal checkpoints: their text part loads, under its own names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.models.tiny import composite_architectures, tiny_config, tiny_model
from moe import MoE, SamplingParams
from moe.cli import main
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.memory_plan import GIB
from moe.loading.meta_model import build_meta_model
from moe.settings import ModelSettings
from moe.text.tokenizer import load_tokenizer
from tests.amounts import deep_except

PROMPTS = [list(range(3, 24)), [5, 9, 2]]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 512, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 64, "mode": "whole"},
    "engine": {"max_batch_size": 4},
    "offload": {"hot_set": False},
}
BLOCK_DIFFUSION = "diffusion_gemma"  # tests/methods/diffusion/test_writer.py
LARGE = "dots3_note"  # of 76 M parameters at its smallest
NAMES = [name for name in composite_architectures() if name not in (BLOCK_DIFFUSION, LARGE)]


@torch.no_grad()
def logits(reference: Any, ids: list[int]) -> torch.Tensor:
    # transformers 5.24.0's Llama4ForConditionalGeneration fails on text, the causal LM in it works.
    inner = getattr(reference, "language_model", None)
    reader: Any = inner if hasattr(inner, "lm_head") else reference
    rows: torch.Tensor = reader(torch.tensor([ids]), use_cache=False).logits[0]
    return rows


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(logits(reference, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_all_that_the_field_runs_are_among_them() -> None:
    assert set(NAMES) >= {
        "aria", "ernie4_5_vl_moe", "gemma4", "glm4v_moe", "glm5_next", "hy_v4_vl", "inkling2",
        "kimi_k25", "llama4", "minimax_m3_vl", "mistral_large4", "qwen3_5_moe",
        "qwen3_vl_moe", "step3p7",
    }  # fmt: skip


@pytest.mark.parametrize("name", deep_except(["aria", "glm4v_moe"], NAMES))
def test_logits_and_tokens_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    model = MoE.from_pretrained(tmp_path, SMALL)
    for prompt, ours in zip(PROMPTS, model.batch_logits(PROMPTS), strict=True):
        assert float((ours - logits(reference, prompt)).abs().max()) <= 1e-4
    said = [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]
    assert said == [greedy(reference, prompt) for prompt in PROMPTS]


def test_images_and_sounds_are_not_read(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """NaN in the vision tower is not noticed; one in the text part is."""
    whole = tiny_checkpoint("qwen3_vl_moe")
    shutil.copy(whole / "config.json", tmp_path)
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in tensors.items():
        if "visual" in name:
            tensor.fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    checked = SMALL | {"model": {"check_finite": True}}
    model = MoE.from_pretrained(tmp_path, checked)
    assert torch.equal(
        model.logits(PROMPTS[0]), MoE.from_pretrained(whole, SMALL).logits(PROMPTS[0])
    )
    count = sum("visual" in name for name in tensors)
    assert any(f"{count} tensors in the checkpoint are not used" in n for n in model.notices)
    assert not any("visual" in name for name, _ in model.backbone.model.named_modules())
    next(t for n, t in tensors.items() if n.endswith("q_proj.weight")).view(-1)[0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight .*NaN"):
        MoE.from_pretrained(tmp_path, checked)


def test_a_missing_weight_of_the_text_is_named_as_in_the_checkpoint(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = tiny_checkpoint("qwen3_vl_moe")
    shutil.copy(whole / "config.json", tmp_path)
    tensors = load_file(whole / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.language_model\.norm\.weight"):
        MoE.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", deep_except(["qwen3_vl_moe"], ["llama4", "qwen3_vl_moe"]))
def test_stores_plans_and_commands_take_them(
    name: str,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ModelSettings.model_validate({"expert_bits": 8, "group_size": 32})
    store = convert(tiny_checkpoint(name), tmp_path / "store", settings)
    resident = MoE.from_pretrained(store, SMALL)
    experts = next(line.bytes for line in resident.memory_plan.lines if line.name == "experts")
    room = (resident.memory_plan.needed_bytes - experts // 4) / GIB
    model = MoE.from_pretrained(store, SMALL | {"memory": SMALL["memory"] | {"device_gib": room}})
    offload = model.status()["offload"]
    assert 0 < offload["slots"] < offload["experts"]
    assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))
    assert [c.token_ids for c in model.generate(PROMPTS, GREEDY)] == [
        c.token_ids for c in resident.generate(PROMPTS, GREEDY)
    ]
    for path in (tiny_checkpoint(name), store):
        assert main(["plan", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_the_part_of_a_speaking_model_that_writes_text(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """No class generates text from the whole configuration: its thinker does, below a prefix."""
    thinker = tiny_checkpoint("qwen3_omni_moe_thinker")
    config = json.loads((thinker / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(thinker / "model.safetensors")
    tensors = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"talker.model.norm.weight": torch.ones(8), "code2wav.x": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(
        MoE.from_pretrained(tmp_path, SMALL).logits(PROMPTS[0]),
        MoE.from_pretrained(thinker, SMALL).logits(PROMPTS[0]),
    )


def test_the_chat_template_of_a_processor_is_used(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path)
    tokenizer, _ = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert not tokenizer.chat_template
    for template, expected in (({"chat_template": "{{ messages[0].content }}!"}, "hi!"), ([], "")):
        (tmp_path / "chat_template.json").write_text(json.dumps(template))
        tokenizer, _ = load_tokenizer(tmp_path)
        assert tokenizer is not None
        if expected:
            messages = [{"role": "user", "content": "hi"}]
            assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
        else:
            assert not tokenizer.chat_template


def test_what_generates_no_text_is_refused() -> None:
    message = "has no class in transformers .* that generates text"
    with pytest.raises(UnsupportedModelError, match=message):
        build_meta_model(tiny_config("clip"))
