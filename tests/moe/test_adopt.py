"""Experts that do not dispatch through transformers' registry: found, proven, loaded, offloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from examples.models.tiny import tiny_config, tiny_model
from experts.manifest import read_manifest
from kernels import backend_status
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.memory_plan import GIB
from moe.loading.meta_model import build_meta_model
from moe.network.adopt import adopt_experts, check_experts
from moe.network.moe_layer import MoELayers
from moe.network.seam import attach, experts_modules, take_experts
from moe.settings import ModelSettings
from offload.capacity import slot_bytes
from tests.amounts import deep_except

ARCHITECTURES = ("llama4_text", "longcat_flash", "jetmoe", "dbrx")
PROMPTS = [list(range(3, 40)), [5, 9, 2]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    """By whole passes of transformers' own forward, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loaded_models_give_transformers_logits_and_tokens(
    architecture: str, tiny_moe: Callable[[str], MoE]
) -> None:
    reference: Any = tiny_model(architecture)
    model = tiny_moe(architecture)
    for prompt, ours in zip(PROMPTS, model.batch_logits(PROMPTS), strict=True):
        with torch.no_grad():
            theirs = reference(torch.tensor([prompt]), use_cache=False).logits[0]
        assert float((ours - theirs).abs().max()) <= 1e-4
    said = [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]
    assert said == [greedy(reference, prompt, 12) for prompt in PROMPTS]
    assert model.status()["packing"]["enabled"]


def test_several_scaled_inputs_of_a_token(tmp_path: Path) -> None:
    """Llama 4 scales an expert's input, and the published models have one expert a token."""
    config = tiny_config("llama4_text")
    config.num_experts_per_tok = 3
    reference: Any = type(tiny_model("llama4_text"))(config).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    reference.save_pretrained(tmp_path)
    model = MoE.from_pretrained(tmp_path)
    with torch.no_grad():
        theirs = reference(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    assert float((model.logits(PROMPTS[0]) - theirs).abs().max()) <= 1e-4
    said = [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]
    assert said == [greedy(reference, prompt, 12) for prompt in PROMPTS]


@pytest.mark.skipif(backend_status()["name"] != "native", reason="no compiled kernels")
@pytest.mark.parametrize("architecture", ["llama4_text", "longcat_flash"])
def test_their_decode_steps_are_compiled(architecture: str, tiny_moe: Callable[[str], MoE]) -> None:
    """Rotary tables of complex numbers, attention within chunks; identity experts."""
    fused = tiny_moe(architecture).status()["fused"]
    assert fused["enabled"], fused["why"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bits", deep_except([8], [8, 16]))
def test_their_stores_keep_experts_on_disk(
    architecture: str, bits: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ModelSettings.model_validate({"expert_bits": bits, "group_size": 32})
    store = convert(tiny_checkpoint(architecture), tmp_path / "store", settings)
    small: dict[str, Any] = {
        "memory": {"kv_tokens": 512, "reserve_gib": 0.0},
        "prefill": {"wave_tokens": 128, "mode": "whole"},
        "engine": {"max_batch_size": 4},
        "offload": {"hot_set": False},
    }
    resident = MoE.from_pretrained(store, small)
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    manifest = read_manifest(store)
    slots = sum(layer.experts for layer in manifest.layers) // 2
    room = slots * slot_bytes(manifest, manifest.bits) + 16
    small["memory"] |= {"device_gib": (rest + room) / GIB}
    model = MoE.from_pretrained(store, small)
    assert model.status()["offload"]["slots"] == slots
    assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))
    assert model.generate(PROMPTS, GREEDY)[0].token_ids == (
        resident.generate(PROMPTS, GREEDY)[0].token_ids
    )


def test_experts_without_a_down_projection_need_not_be_there(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Identity experts have no weights; transformers saves rows that no token can reach."""
    tensors = load_file(tiny_checkpoint("longcat_flash") / "model.safetensors")
    spare = [name for name in tensors if any(f".experts.{n}.gate" in name for n in range(8, 13))]
    assert spare
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name or (
        int(name.split(".experts.")[1].split(".")[0]) < 8)}  # fmt: skip
    save_file(kept, tmp_path / "model.safetensors")
    tiny_config("longcat_flash").save_pretrained(tmp_path)
    whole = MoE.from_pretrained(tiny_checkpoint("longcat_flash"))
    assert torch.equal(MoE.from_pretrained(tmp_path).logits(PROMPTS[0]), whole.logits(PROMPTS[0]))
    kept.pop("model.layers.0.mlp.experts.3.down_proj.weight")
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.3\.down_proj"):
        MoE.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("doge", "rows of down_embed and up_embed"), ("llama", "dense models are not supported")],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    architecture: str, message: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        MoE.from_pretrained(tiny_checkpoint(architecture))


def test_transformers_reads_prompts_of_doge_otherwise_than_its_own_decoding_does() -> None:
    """Why it stays refused: what a token is routed to depends on later tokens. If this fails,
    transformers has mended it."""
    reference, ids = tiny_model("doge"), torch.arange(5, 11)[None]
    with torch.no_grad():
        whole = reference(ids, use_cache=False).logits[0, 0]
        alone = reference(ids[:, :1], use_cache=False).logits[0, 0]
    assert (whole - alone).abs().max() > 0.05 * alone.abs().max()


def test_what_transformers_cannot_build_says_so() -> None:
    config = tiny_config("dbrx")
    del config.attn_config.rope_theta
    with pytest.raises(UnsupportedModelError, match=r"cannot be built .*rope_theta"):
        build_meta_model(config)


class _Config(PreTrainedConfig):
    model_type = "synthetic"
    hidden_size = 48


class _Experts(nn.Module):
    """Stacked experts in any layout, called with rows, ids and weights in any order."""

    def __init__(self, options: dict[str, Any], count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.options, self.curve, self.limit = options, options["curve"], options["limit"]
        shape = (count, hidden, 2 * width) if options["swapped"] else (count, 2 * width, hidden)
        self.one = nn.Parameter(torch.empty(shape))
        self.two = nn.Parameter(torch.empty(count, hidden, width))
        self.bias = nn.Parameter(torch.empty(count, hidden)) if options["bias"] else None

    def gate(self, both: Tensor) -> Tensor:
        a, b = both.chunk(2, -1)
        return a.sigmoid().clamp(max=self.options["limit"]) * b.clamp(max=self.options["limit"])

    def forward(self, ids: Tensor, rows: Tensor, *, gates: Tensor) -> Tensor:
        first = self.one.transpose(1, 2) if self.options["swapped"] else self.one
        out = torch.zeros_like(rows)
        for token in range(len(rows)):
            for slot, expert in enumerate(ids[token].tolist()):
                row, gate = rows[token], gates[token, slot]
                both = first[expert] @ (row * gate if self.options["scales_input"] else row)
                a, b = (both[::2], both[1::2]) if self.options["turns"] else both.chunk(2)
                a, b = (a, b) if self.options["gate_first"] else (b, a)
                inner = self.curve(a) * b
                if self.options["limit"]:
                    inner = self.gate(both)
                made = self.two[expert] @ inner
                if self.bias is not None:
                    made = made + self.bias[expert]
                out[token] += made if self.options["scales_input"] else gate * made
        return out


def test_blocks_alike_but_for_a_number_are_proven_apart() -> None:
    """The first block's activation has a limit, and the second one's none."""
    options = dict.fromkeys(("swapped", "turns", "gate_first", "scales_input", "bias"), False)
    each: list[dict[str, Any]] = [
        options | {"count": 3, "curve": torch.tanh, "limit": limit} for limit in (0.3, 0.0)
    ]
    check_equal(_Model(_Config(), each))


class _Block(nn.Module):
    def __init__(self, options: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, options["count"], bias=False)
        self.own = _Experts(options, options["count"], hidden, 24)
        self.shared = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        gates, ids = self.router(rows).sigmoid().topk(2)
        return (self.own(ids, rows, gates=gates) + self.shared(rows)).view(hidden.shape)


class _Model(PreTrainedModel):
    config_class = _Config

    def __init__(self, config: Any, options: list[dict[str, Any]]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_Block(one, config.hidden_size) for one in options)


def check_equal(model: _Model) -> None:
    """Adopted experts give what the model gives by itself."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    rows = torch.randn(1, 9, 48)
    expected = [layer(rows) for layer in model.layers]
    assert adopt_experts(model) == []
    experts = MoELayers(take_experts(model))
    attach(model, experts.layers, experts.run)
    for layer, theirs in zip(model.layers, expected, strict=True):
        assert torch.allclose(layer(rows), theirs, atol=1e-4)


@given(
    st.fixed_dictionaries(
        {
            "count": st.sampled_from([3, 8]),
            "limit": st.sampled_from([0.0, 0.3]),
            "curve": st.sampled_from([nn.functional.silu, nn.functional.gelu, torch.tanh]),
            **{
                name: st.booleans()
                for name in ("swapped", "turns", "gate_first", "scales_input", "bias")
            },
        }
    )
)
def test_any_layout_is_found_and_equal_or_left_alone(options: dict[str, Any]) -> None:
    """Stacked biases have no rule here: such blocks stay as they are."""
    model = _Model(_Config(), [options, options])
    if not options["bias"]:
        check_equal(model)
        return
    assert adopt_experts(model)
    assert not experts_modules(model)
    with pytest.raises(UnsupportedModelError, match=r"_Block: .*own.one, own.two, own.bias"):
        check_experts(model)
