"""Quantised checkpoints that stay as they are: their own numbers, in about their own bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from examples.models.gguf_files import blocks
from experts.embedding import QuantizedEmbedding
from experts.linear import QuantizedLinear
from experts.weights import dequantize_experts
from kernels import ExpertWeights, PlaneMatrix, QuantizedExperts, matrix_rows, reference
from kernels.planes import PlaneLayout, dequantize
from moe import MoE
from moe.errors import CheckpointError
from moe.loading import own_planes
from moe.loading.gguf.planes import TYPES
from moe.loading.own_planes import find_own
from tests.amounts import deep_except
from tests.moe.loading.test_gguf import IDS, PLAIN, broad, parameters_of
from tests.moe.loading.test_gguf import write as write  # a fixture
from tests.moe.loading.test_quantized import (
    FLOAT8_ROWS,
    METHODS,
    NVFP4,
    float8_rows,
    gpt_oss,
    integers,
    quantised,
    words,
)

Write = Callable[..., Path]
WAYS = {"compressed-tensors": (float8_rows, FLOAT8_ROWS)}


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: some matrices are finer."""
    finer = ("attn_v", "ffn_down_exps", "output.weight", "token_embd")
    return "Q6_K" if any(part in name for part in finer) else "Q4_K"


def oracle(model: PreTrainedModel, file: Path) -> Tensor:
    """Logits in float64 of what the file's weights stand for."""
    model = type(model)(model.config).double().eval()
    model.set_experts_implementation("eager")
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "norm_topk_prob")]
    for router in routers:  # as llama.cpp routes
        router.norm_topk_prob = True
    state = {name: own.double() for name, own in parameters_of(file).items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def away(got: Tensor, expected: Tensor) -> float:
    """The largest error, of the largest number. Half of it comes from 8-bit activations."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


def steady(**changes: Any) -> PreTrainedModel:
    """A broad Qwen3-MoE whose tokens use all experts: no rounding decides between two."""
    own = broad("qwen3_moe").config
    stated = own.to_dict() | {"num_experts_per_tok": own.num_experts} | changes
    torch.manual_seed(0)
    made: PreTrainedModel = type(broad("qwen3_moe"))(type(own).from_dict(stated))
    return made.eval()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_planes_hold_what_the_package_decodes(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    drawn = np.random.default_rng(0).normal(size=(40, 768)).astype(np.float32)
    raw = np.asarray(blocks(drawn, kind)).view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind)).view(40, 768)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    codes, scales = TYPES[name].read(torch.from_numpy(raw).view(40, 768 // weights, size))
    layout = PlaneLayout(40, 768, *TYPES[name].format)
    matrix = PlaneMatrix.of_file(codes, scales, layout)
    assert torch.equal(dequantize(matrix.planes, matrix.scales, layout), expected)
    ids = torch.tensor([39, 0, 17, 17])
    assert torch.equal(reference.matrix_rows(ids, matrix), expected[ids])
    torch.testing.assert_close(matrix_rows(ids, matrix), expected[ids], rtol=1e-6, atol=1e-7)
    assert layout.nbytes(8) <= raw[:1].size * 48 * (2 if name.startswith("IQ4") else 1.05)


def test_rows_out_of_range_are_refused() -> None:
    codes, scales = TYPES["Q8_0"].read(torch.zeros(16, 1, 34, dtype=torch.uint8))
    matrix = PlaneMatrix.of_file(codes, scales, PlaneLayout(16, 32, *TYPES["Q8_0"].format))
    assert matrix_rows(torch.tensor([], dtype=torch.int64), matrix).shape == (0, 32)
    with pytest.raises(IndexError, match=r"rows must be in \[0, 16\), got \[16\]"):
        matrix_rows(torch.tensor([16]), matrix)


@pytest.mark.parametrize("fused", ["off", "auto"])
def test_a_mixed_file_decodes_as_it_is(fused: str, write: Write) -> None:
    model = steady()
    file = write(model, mixed)
    loaded = MoE.from_pretrained(file, engine={"fused": fused})
    assert away(loaded.logits(IDS), oracle(model, file)) < 1e-2
    status = loaded.status()
    (notice,) = [own for own in status["notices"] if "GGUF (F32, Q4_K, Q6_K)" in own]
    assert "experts of 1 layers and 6 other matrices keep their codes" in notice
    assert "experts run at 6 bits" in status["notices"]
    assert loaded._loaded.weight_bytes <= 1.05 * file.stat().st_size


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main memory in the place of a GPU's: planes lie as they would there."""
    device = torch.device("cuda")
    monkeypatch.setattr(
        "moe.loading.sources.find_own", lambda *own, **_: find_own(*own, device=device)
    )
    monkeypatch.setattr(own_planes, "_format_on", lambda _, own: own)
    monkeypatch.setattr("kernels.planes.arrangement_for", lambda *_: "cuda")


def test_on_a_gpu_all_but_the_embedding_stays(gpu: None, write: Write) -> None:
    model = steady()
    file = write(model, mixed)
    loaded = MoE.from_pretrained(file, engine={"fused": "off"})
    network = loaded._loaded.backbone.model
    assert isinstance(network.get_input_embeddings(), torch.nn.Embedding)
    layouts = [own.layout for own in network.modules() if isinstance(own, QuantizedLinear)]
    assert len(layouts) == 5
    assert {own.arrangement for own in layouts} == {"cuda"}
    assert away(loaded.logits(IDS), oracle(model, file)) < 1e-2


@pytest.mark.parametrize(
    ("method", "kind", "bits"),
    [("fp8", "fp8", 8), ("compressed-tensors", "fp8", 8), ("mxfp4", "mxfp4", 4)],
)
def test_on_a_gpu_small_floats_stay(
    gpu: None, method: str, kind: str, bits: int, tmp_path: Path
) -> None:
    """Experts and linear layers, to the last bit; joined and transposed in the third."""
    if method == "mxfp4":
        small, whole = gpt_oss(tmp_path)
    else:
        small, whole = quantised(tmp_path, method, way=WAYS.get(method))
    loaded, theirs = (MoE.from_pretrained(path, engine=PLAIN) for path in (small, whole))
    network = loaded._loaded.backbone.model
    linears = [own for own in network.modules() if isinstance(own, QuantizedLinear)]
    assert len(linears) == (0 if method == "mxfp4" else 16)
    for mine, exact in zip(
        loaded._loaded.experts.layers, theirs._loaded.experts.layers, strict=True
    ):
        assert isinstance(mine, QuantizedExperts)
        assert isinstance(exact, ExpertWeights)
        formats = {(own.scales, own.bits, own.arrangement) for own in mine.layouts}
        assert formats == {(kind, bits, "cuda")}
        back = dequantize_experts(mine.for_device(torch.device("cpu")))
        assert torch.equal(back.gate_up_EGH, exact.gate_up_EGH)
        assert torch.equal(back.down_EHF, exact.down_EHF)
    for own in linears:
        assert own.layout.scales == kind


def test_on_a_gpu_a_files_mxfp4_stays(gpu: None, write: Write) -> None:
    file = write(broad("gpt_oss"), lambda name: "MXFP4" if "exps.weight" in name else "Q8_0")
    loaded = MoE.from_pretrained(file, engine=PLAIN)
    layer = loaded._loaded.experts.layers[0]
    assert isinstance(layer, QuantizedExperts)
    assert {own.scales for own in layer.layouts} == {"mxfp4"}
    expected = parameters_of(file)
    found = dequantize_experts(layer.for_device(torch.device("cpu")))
    prefix = next(name for name in expected if name.endswith("experts.down_proj"))
    assert torch.equal(found.down_EHF, expected[prefix].mT)
    both = expected[prefix.replace("down_proj", "gate_up_proj")]
    assert torch.equal(found.gate_up_EGH, both.mT)


def test_on_a_cpu_mxfp4_becomes_whole_numbers_of_halves(tmp_path: Path) -> None:
    """To the last bit; FP8 is decoded there."""
    small, whole = gpt_oss(tmp_path / "a")
    loaded, theirs = (MoE.from_pretrained(path, engine=PLAIN) for path in (small, whole))
    for mine, exact in zip(
        loaded._loaded.experts.layers, theirs._loaded.experts.layers, strict=True
    ):
        assert isinstance(mine, QuantizedExperts)
        assert isinstance(exact, ExpertWeights)
        assert {(own.scales, own.bits) for own in mine.layouts} == {("centred", 5)}
        assert torch.equal(dequantize_experts(mine).gate_up_EGH, exact.gate_up_EGH)
        assert torch.equal(dequantize_experts(mine).down_EHF, exact.down_EHF)
    tensors = load_file(small / "model.safetensors")
    next(own for name, own in tensors.items() if name.endswith("_scales"))[0, 0, 0] = 144
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"in .* has scales above 65536, whose halves"):
        MoE.from_pretrained(small, engine=PLAIN)
    small, _ = quantised(tmp_path / "b", "fp8")
    loaded = MoE.from_pretrained(small, engine=PLAIN)
    assert not any(isinstance(layer, QuantizedExperts) for layer in loaded._loaded.experts.layers)


def test_a_number_that_is_none_stays_one_where_it_is_asked_for(gpu: None, tmp_path: Path) -> None:
    small, _ = quantised(tmp_path / "a", "fp8")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors = load_file(small / "model.safetensors")
    tensors[name].view(torch.uint8)[3, 7] = 127
    save_file(tensors, small / "model.safetensors")
    layer = MoE.from_pretrained(small, engine=PLAIN)._loaded.experts.layers[1]
    assert isinstance(layer, QuantizedExperts)
    weights = dequantize_experts(layer.for_device(torch.device("cpu"))).gate_up_EGH
    assert weights[5, 24 + 3].isnan().any()
    assert int(weights.isnan().any(-1).sum()) == 1
    with pytest.raises(CheckpointError, match=f"{name} in .* holds NaN or infinity"):
        MoE.from_pretrained(small, engine=PLAIN, model={"check_finite": True})
    small, _ = gpt_oss(tmp_path / "b")
    tensors = load_file(small / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][0, 0, 0] = 255
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj: a scale is NaN \(255\)"):
        MoE.from_pretrained(small, engine=PLAIN)


@pytest.mark.parametrize(
    "kind",
    deep_except(["Q3_K", "Q4_1"], ["Q2_K", "Q3_K", "Q5_K", "Q4_1", "Q8_0", "IQ4_XS", "MXFP4"]),
)
def test_files_of_one_type(kind: str, write: Write) -> None:
    model = steady()
    file = write(model, lambda _: kind)
    assert away(MoE.from_pretrained(file, engine=PLAIN).logits(IDS), oracle(model, file)) < 2e-2


@pytest.mark.parametrize(
    "model_type", deep_except(["gpt_oss"], ["gpt_oss", "mixtral", "qwen2_moe"])
)
def test_other_layouts_of_rows(model_type: str, write: Write) -> None:
    """Experts in turns and transposed, with biases; queries and keys in pairs; shared experts."""
    model = broad(model_type)
    file = write(model, lambda name: "F32" if name.endswith("bias") else "Q5_K")
    loaded = MoE.from_pretrained(file, engine=PLAIN)
    layer = loaded._loaded.experts.layers[0]
    assert isinstance(layer, QuantizedExperts)
    expected = parameters_of(file)
    experts = dequantize_experts(layer)
    prefix = next(name for name in expected if name.endswith("experts.down_proj"))
    down, both = expected[prefix], expected[prefix.replace("down_proj", "gate_up_proj")]
    turned = model_type == "gpt_oss"
    assert torch.equal(experts.down_EHF, down.mT if turned else down)
    assert torch.equal(experts.gate_up_EGH, both.mT if turned else both)
    if turned:
        bias = expected[prefix.replace("down_proj", "gate_up_proj_bias")]
        assert experts.gate_up_bias_EG is not None
        assert torch.equal(experts.gate_up_bias_EG.float(), bias)
    for name, module in loaded._loaded.backbone.model.named_modules():
        if isinstance(module, QuantizedLinear):
            matrix = module.matrix
            found = dequantize(matrix.planes, matrix.scales, matrix.layout)
            assert torch.equal(found, expected[f"{name}.weight"]), name


def test_a_tied_head_shares_the_table(write: Write) -> None:
    tied = steady(tie_word_embeddings=True)
    file = write(tied, lambda _: "Q6_K")
    loaded = MoE.from_pretrained(file, engine=PLAIN)
    network = loaded._loaded.backbone.model
    table, head = network.get_input_embeddings(), network.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding)
    assert isinstance(head, QuantizedLinear)
    assert head.plane0 is table.plane0
    assert away(loaded.logits(IDS), oracle(tied, file)) < 1e-2


def test_widths_that_are_asked_for_are_rounded_to_as_before(write: Write) -> None:
    file = write(broad("qwen3_moe"), mixed)
    wanted = {"expert_bits": 8, "trunk_bits": 16, "head_bits": 16}
    loaded = MoE.from_pretrained(file, engine=PLAIN, model=wanted)
    layer = loaded._loaded.experts.layers[0]
    assert isinstance(layer, QuantizedExperts)
    assert layer.first.scales == "symmetric"
    network = loaded._loaded.backbone.model
    assert not any(isinstance(m, QuantizedLinear | QuantizedEmbedding) for m in network.modules())


def test_experts_of_two_types_in_one_projection_are_decoded(write: Write) -> None:
    file = write(broad("qwen3_moe"), lambda name: "Q5_K" if "up_exps" in name else "Q4_K")
    loaded = MoE.from_pretrained(file, engine=PLAIN)
    assert not isinstance(loaded._loaded.experts.layers[0], QuantizedExperts)
    notices = " ".join(loaded.status()["notices"])
    assert "6 other matrices keep their codes" in notices
    assert "experts of" not in notices


def test_scales_that_are_not_finite_are_refused_when_asked(write: Write) -> None:
    file = write(broad("qwen3_moe"), lambda _: "Q8_0")
    reader = gguf.GGUFReader(file, "r+")
    (tensor,) = [own for own in reader.tensors if own.name == "blk.0.ffn_down_exps.weight"]
    tensor.data.reshape(-1)[:2] = np.array([np.nan], np.float16).view(np.uint8)
    reader.data.flush()
    del reader, tensor
    MoE.from_pretrained(file, engine=PLAIN)
    with pytest.raises(CheckpointError, match=r"ffn_down_exps.weight\[0\] in .* holds NaN"):
        MoE.from_pretrained(file, engine=PLAIN, model={"check_finite": True})


def packed_with_zeros(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, exact = integers(weight, group)
    parts = {
        ".weight_packed": words(codes.T.contiguous()),
        ".weight_scale": scales.T.contiguous(),
        ".weight_zero_point": words(zeros).T.contiguous(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, exact


WITH_ZEROS = {"format": "pack-quantized", "config_groups": {"a": {"weights": {
    "num_bits": 4, "type": "int", "symmetric": False}}}}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    ["gptq", "awq", "compressed-tensors", "zero points", "modelopt", "compressed-tensors NVFP4"],
)
def test_codes_keep_their_numbers(method: str, tmp_path: Path) -> None:
    make, config = METHODS.get(method, (packed_with_zeros, WITH_ZEROS))
    own = {"zero points": "compressed-tensors"}.get(method, method.removesuffix(" NVFP4"))
    small_floats = method == "modelopt" or method.endswith("NVFP4")
    if small_floats:
        make, config = NVFP4[own]
    if method == "gptq":
        config = {**config, "desc_act": False}
    whole, small = tmp_path / "whole", tmp_path / "small"
    steady().save_pretrained(whole)
    exact = load_file(whole / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in exact.items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") and tensor.ndim == 2:
            parts, exact[name] = make(tensor, 64)
            tensors |= {stem + end: part.contiguous() for end, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(exact, whole / "model.safetensors", {"format": "pt"})
    small.mkdir()
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    stated = json.loads((whole / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": own, **config}
    (small / "config.json").write_text(json.dumps(stated))
    loaded = MoE.from_pretrained(small, engine=PLAIN)
    layer = loaded._loaded.experts.layers[0]
    assert isinstance(layer, QuantizedExperts)
    centred = small_floats or method == "compressed-tensors"
    assert layer.first.bits == 4 + small_floats
    assert layer.first.scales == ("centred" if centred else "offset")
    found, name = dequantize_experts(layer), "model.layers.0.mlp.experts.{}.{}_proj.weight"
    for expert in range(layer.num_experts):
        wanted = exact[name.format(expert, "down")].float()
        # Offsets are rounded to float16: 15 steps of .03 at most, to half of 2^-11 of that.
        torch.testing.assert_close(found.down_EHF[expert], wanted, rtol=0, atol=2e-4)
    expected = MoE.from_pretrained(whole, engine=PLAIN).logits(IDS)
    assert away(loaded.logits(IDS), expected.double()) < 2e-2


def test_codes_in_groups_by_their_activations_are_decoded(tmp_path: Path) -> None:
    whole, small = tmp_path / "whole", tmp_path / "small"
    broad("qwen3_moe").save_pretrained(whole)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(whole / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") and tensor.ndim == 2:
            parts, _ = METHODS["gptq"][0](tensor, 64)
            tensors |= {stem + end: part.contiguous() for end, part in parts.items()}
        else:
            tensors[name] = tensor
    first = "model.layers.0.self_attn.q_proj.g_idx"
    small.mkdir()
    stated = json.loads((whole / "config.json").read_text())
    for in_order in (True, False):
        stated["quantization_config"] = {"quant_method": "gptq", "bits": 4, "desc_act": in_order}
        (small / "config.json").write_text(json.dumps(stated))
        tensors[first] = tensors[first].flip(0).contiguous()
        save_file(tensors, small / "model.safetensors", {"format": "pt"})
        if in_order:
            loaded = MoE.from_pretrained(small, engine=PLAIN)
            assert not isinstance(loaded._loaded.experts.layers[0], QuantizedExperts)
            tensors[first] = tensors[first].flip(0).contiguous()
        else:
            with pytest.raises(CheckpointError, match="desc_act is false, and g_idx is not in"):
                MoE.from_pretrained(small, engine=PLAIN)
