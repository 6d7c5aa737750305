"""Checkpoints that are quantised already: what is read is what transformers would decode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from examples.models.tiny import tiny_config, tiny_model
from experts.weights import dequantize_experts
from kernels import ExpertWeights, QuantizedExperts
from moe import MoE
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.hub import read_config
from moe.loading.quantized import decoding_notices
from moe.loading.schemes import decode_fp8, decode_mxfp4, float8_planes
from moe.settings import ModelSettings

IDS = list(range(3, 23))
BLOCK = (16, 32)

Parts = dict[str, Tensor]


def fp8(weight: Tensor, _: int) -> tuple[Parts, Tensor]:
    """As DeepSeek: one float32 scale for each block."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scale = torch.rand(rows, columns) * 0.01 + 0.001
    spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.float() * spread


def words(fields: Tensor, bits: int = 4) -> Tensor:
    """int32 words of the fields in the last dimension, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    fields = fields.long().unflatten(-1, (-1, 32 // bits))
    packed = (fields << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def integers(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(K, N) codes, (D, N) zero points and float16 scales, and the (N, K) weight they stand for."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (columns, rows), generator=generator)
    zeros = torch.randint(1, 16, (columns // group, rows), generator=generator)
    scales = (torch.rand(columns // group, rows, generator=generator) * 0.02 + 0.01).half()
    spread = [part.repeat_interleave(group, 0) for part in (zeros, scales.float())]
    return codes, zeros, scales, ((codes - spread[0]) * spread[1]).T.contiguous()


def gptq(weight: Tensor, group: int) -> tuple[Parts, Tensor]:
    codes, zeros, scales, exact = integers(weight, group)
    parts = {
        ".qweight": words(codes.T.contiguous()).T.contiguous(),
        ".qzeros": words(zeros - 1),
        ".scales": scales,
        ".g_idx": torch.arange(len(codes)).div(group, rounding_mode="floor").int(),
    }
    return parts, exact


def awq(weight: Tensor, group: int) -> tuple[Parts, Tensor]:
    codes, zeros, scales, exact = integers(weight, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # column in each field

    def scrambled(fields: Tensor) -> Tensor:
        return words(fields.unflatten(-1, (-1, 8))[..., order].flatten(-2))

    return {".qweight": scrambled(codes), ".qzeros": scrambled(zeros), ".scales": scales}, exact


def packed(weight: Tensor, group: int) -> tuple[Parts, Tensor]:
    codes, _, scales, _ = integers(weight, group)
    exact = (codes.T - 8) * scales.float().repeat_interleave(group, 0).T
    parts = {
        ".weight_packed": words(codes.T.contiguous()),
        ".weight_scale": scales.T.contiguous(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, exact.contiguous()


def nvfp4(weight: Tensor, _: int, *, divided: bool) -> tuple[Parts, Tensor]:
    """Numbers and scales for each 16 columns are drawn; NVIDIA's table of the numbers."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    scale = torch.rand(rows, columns // 16, generator=generator) * 200 + 20
    scale = scale.to(torch.float8_e4m3fn)
    whole = torch.tensor(3e-5)
    exact = table[codes] * (scale.float() * whole).repeat_interleave(16, 1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if divided:
        whole = whole.reciprocal()[None]
        parts = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole}
        return parts | {".input_global_scale": torch.ones(1)}, exact
    parts = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole}
    return parts | {".input_scale": torch.ones(())}, exact


def float8_rows(weight: Tensor, _: int) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 400
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale.bfloat16()}, codes.float() * scale.bfloat16()


METHODS: dict[str, tuple[Callable[[Tensor, int], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "fp8": (fp8, {"weight_block_size": list(BLOCK)}),
    "gptq": (gptq, {"bits": 4}),
    "awq": (awq, {"bits": 4, "version": "gemm"}),
    "compressed-tensors": (
        packed,
        {
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "symmetric": True}}},
        },
    ),
}
FLOAT8_ROWS = {"format": "float-quantized", "config_groups": {"a": {"weights": {
    "num_bits": 8, "type": "float", "symmetric": True}}}}  # fmt: skip
NVFP4: dict[str, tuple[Callable[[Tensor, int], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "modelopt": (partial(nvfp4, divided=False), {"quant_algo": "NVFP4"}),
    "compressed-tensors": (
        partial(nvfp4, divided=True),
        {
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "a": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}},
            },
        },
    ),
}


def quantised(
    folder: Path, method: str, group: int | None = 8, way: Any = None
) -> tuple[Path, Path]:
    """A checkpoint with quantised linear layers and experts, and one with what they stand for.

    Scales for each `group` columns; None: for all. `way` takes the place of that of METHODS.
    """
    make, config = way or METHODS[method]
    whole, small = folder / "whole", folder / "small"
    tiny_model("qwen3_moe").save_pretrained(whole)
    tensors: dict[str, Tensor] = {}
    exact = load_file(whole / "model.safetensors")
    for name, tensor in list(exact.items()):
        if "_proj.weight" in name:
            parts, exact[name] = make(tensor, group or tensor.shape[1])
            tensors |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(exact, whole / "model.safetensors", {"format": "pt"})
    write(small, whole, tensors, {"quant_method": method, **config})
    return small, whole


def write(small: Path, whole: Path, tensors: Mapping[str, Tensor], config: Any) -> None:
    small.mkdir(exist_ok=True)
    content = json.loads((whole / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    save_file(dict(tensors), small / "model.safetensors")


def assert_same_weights(small: Path, whole: Path, bits: int = 8) -> None:
    """Planes of the experts of one are the floats of the other, to the last bit."""
    quantized = MoE.from_pretrained(small, model={"expert_bits": bits, "group_size": 32})
    for mine, theirs in zip(
        quantized.experts.layers, MoE.from_pretrained(whole).experts.layers, strict=True
    ):
        assert isinstance(mine, QuantizedExperts)
        assert isinstance(theirs, ExpertWeights)
        exact = dequantize_experts(mine)
        assert torch.equal(exact.gate_up_EGH, theirs.gate_up_EGH)
        assert torch.equal(exact.down_EHF, theirs.down_EHF)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_decoded_model(method: str, tmp_path: Path) -> None:
    small, whole = quantised(tmp_path, method)
    theirs = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    got = MoE.from_pretrained(small).logits(IDS)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


CACHE_SCALES = {
    "fp8": METHODS["fp8"],
    "compressed-tensors": METHODS["compressed-tensors"],
    "compressed-tensors of FP8": (float8_rows, FLOAT8_ROWS),
}


@pytest.mark.parametrize("method", CACHE_SCALES)
def test_scales_of_keys_and_values_are_left_out(method: str, tmp_path: Path) -> None:
    """They are of caches in 8 bits, which others keep."""
    small, _ = quantised(tmp_path, method.split(" ")[0], way=CACHE_SCALES[method])
    expected = MoE.from_pretrained(small).logits(IDS)
    tensors = load_file(small / "model.safetensors")
    ends = ("q_scale", "k_scale", "v_scale", "k_proj.output_scale", "prob_output_scale")
    for layer in range(4):
        tensors |= {f"model.layers.{layer}.self_attn.{end}": torch.ones(1) for end in ends}
    save_file(tensors, small / "model.safetensors")
    assert torch.equal(MoE.from_pretrained(small).logits(IDS), expected)


@pytest.mark.parametrize(
    ("method", "bits"),
    [("gptq", 8), ("awq", 8), ("compressed-tensors", 8), ("compressed-tensors", 4)],
)
def test_four_bit_integers_are_exact_as_planes(method: str, bits: int, tmp_path: Path) -> None:
    """Without a zero point in 4 bits already."""
    small, whole = quantised(tmp_path, method, group=None)
    assert_same_weights(small, whole, bits)


def test_fp8_equals_transformers_own_decoder() -> None:
    parts, _ = fp8(torch.randn(48, 64), 0)
    decoded = decode_fp8(parts[".weight"], parts[".weight_scale_inv"], BLOCK)
    theirs = Fp8Dequantize(None)._dequantize_one(
        parts[".weight"], parts[".weight_scale_inv"], torch.float32
    )
    assert torch.equal(decoded, theirs)
    exponents = torch.randint(120, 130, (3, 2), dtype=torch.uint8)
    theirs = Fp8Dequantize(None)._dequantize_one(parts[".weight"], exponents, torch.float32)
    assert torch.equal(decode_fp8(parts[".weight"], exponents, BLOCK), theirs)


def powers(weight: Tensor, _: int) -> tuple[Parts, Tensor]:
    """FP8 with an exponent for each block."""
    parts, _exact = fp8(weight, 0)
    scale = parts[".weight_scale_inv"].to(torch.float8_e8m0fnu)
    return parts | {".weight_scale_inv": scale}, decode_fp8(parts[".weight"], scale.float(), BLOCK)


def test_exponents_as_scales_may_have_a_dtype_of_their_own(tmp_path: Path) -> None:
    config = METHODS["fp8"][1] | {"scale_fmt": "ue8m0"}
    small, whole = quantised(tmp_path, "fp8", way=(powers, config))
    assert b'"F8_E8M0"' in (small / "model.safetensors").read_bytes()
    assert torch.equal(
        MoE.from_pretrained(small).logits(IDS), MoE.from_pretrained(whole).logits(IDS)
    )
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]  # the last says NaN
    codes = torch.ones(255, 32).to(torch.float8_e4m3fn)
    for scales in (
        exponents.view(torch.float8_e8m0fnu),
        exponents.double().sub(127).exp2().float(),
    ):
        assert torch.equal(
            decode_fp8(codes, scales, (1, 32)), decode_fp8(codes, exponents, (1, 32))
        )
        as_planes = [float8_planes(codes, own, (1, 32), 32) for own in (scales, exponents)]
        assert torch.equal(as_planes[0][1].scale_ND, as_planes[1][1].scale_ND)


def mxfp4(experts: int, rows: int, columns: int) -> Parts:
    shape = (experts, rows, columns // 32)
    return {
        "_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        "_scales": torch.randint(118, 124, shape, dtype=torch.uint8),
    }


def test_mxfp4_equals_transformers_own_decoder() -> None:
    parts = mxfp4(3, 20, 64)
    decoded = decode_mxfp4(parts["_blocks"], parts["_scales"])
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"])
    assert torch.equal(decoded, theirs.float())


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    whole, small = folder / "whole", folder / "small"
    config = tiny_config("gpt_oss")
    assert isinstance(config, GptOssConfig)
    config.intermediate_size = 32  # a multiple of MXFP4's groups
    model = GptOssForCausalLM(config)
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = dict(exact)
    for name in [name for name in exact if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = exact[name].shape
        parts = mxfp4(experts, rows, columns)
        exact[name] = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"]).float()
        del tensors[name]
        tensors |= {name + end: part for end, part in parts.items()}
    model.load_state_dict(exact)
    model.save_pretrained(whole)
    write(small, whole, tensors, {"quant_method": "mxfp4"})
    return small, whole


def test_mxfp4_checkpoint(tmp_path: Path) -> None:
    """Logits of the decoded model, and at 8 bits the same weights to the last bit."""
    small, whole = gpt_oss(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    got = MoE.from_pretrained(small, model={"expert_bits": 16}).logits(IDS)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert_same_weights(small, whole)


def test_a_quantised_checkpoint_becomes_a_store(tmp_path: Path) -> None:
    small, _ = gpt_oss(tmp_path)
    settings = ModelSettings(group_size=32, trunk_bits=16, head_bits=16)
    notices: list[str] = []
    store = convert(small, tmp_path / "store", settings, on_notice=notices.append)
    assert notices == decoding_notices(read_config(small), 8)
    assert "quantization_config" not in (store / "config.json").read_text()
    direct = MoE.from_pretrained(small, model={"expert_bits": 8, "group_size": 32})
    assert torch.equal(MoE.from_pretrained(store).logits(IDS), direct.logits(IDS))


def damaged(folder: Path, method: str, changes: Mapping[str, Tensor | None]) -> Path:
    small, whole = quantised(folder, method)
    tensors = {**load_file(small / "model.safetensors"), **changes}
    config = json.loads((small / "config.json").read_text())["quantization_config"]
    write(small, whole, {n: t for n, t in tensors.items() if t is not None}, config)
    return small


EXPERT = "model.layers.1.mlp.experts.5.up_proj"


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fp8", {".weight_scale_inv": None}, r"weight is torch\.float8_e4m3fn without a scale"),
        ("fp8", {".weight": None}, r"up_proj\.weight: missing: weight"),
        ("fp8", {".weight_scale_inv": torch.ones(3, 2)}, r"up_proj\.weight: scales of blocks"),
        ("fp8", {".weight": torch.ones(24)}, r"up_proj\.weight: must be torch\.float8_e4m3fn or"),
        ("gptq", {".scales": None}, r"5\.up_proj: missing: scales"),
        ("gptq", {".qzeros": torch.ones(2, 2).int()}, r"5\.up_proj: expected a part of shape \(4,"),
        ("gptq", {".g_idx": torch.full((32,), 9).int()}, r"up_proj\.weight: g_idx names groups"),
        ("gptq", {".qweight": torch.ones(3).int()}, r"up_proj: qweight must have 2 dimensions"),
        ("awq", {".scales": torch.ones(3, 24)}, r"5\.up_proj: expected a part of shape \(3, 3\)"),
        ("compressed-tensors", {".weight_scale": torch.ones(24, 3)}, "32 columns cannot have 3"),
    ],
)  # fmt: skip
def test_parts_that_are_missing_or_do_not_fit(
    method: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path, method, {EXPERT + end: part for end, part in changes.items()})
    with pytest.raises(CheckpointError, match=message) as caught:
        MoE.from_pretrained(path)
    assert EXPERT in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitnet"}, r"\(bitnet\) are not supported: only FP8, MXFP4"),
        ({}, r"\(None\) are not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, known are"),
        ({"quant_method": "awq", "version": "gemv"}, "version is gemv, only gemm"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size is"),
        ({"quant_method": "compressed-tensors"}, "not supported: 'config_groups'"),
    ],
)
def test_other_ways_are_refused_by_name(
    config: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    config = config or {"bits": 4}
    write(tmp_path, saved, load_file(saved / "model.safetensors"), config)
    with pytest.raises(UnsupportedModelError, match=message):
        MoE.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("method", "bits", "message"),
    [
        ("fp8", None, r"FP8: decoded to \w+ \(.* rounded by 0.39 % at most\) while loading$"),
        ("fp8", 8, r"FP8: .* rounded again, to 8 bits \(by about 0\.\d+ % of their size"),
        ("gptq", 8, "GPTQ: .* hold the same numbers where groups fit$"),
        ("gptq", 4, r"GPTQ: .* rounded again, to 4 bits \(by about 9\.7 %"),
        ("modelopt", None, "ModelOpt NVFP4: decoded to"),
    ],
)
def test_what_became_of_the_weights_is_said(method: str, bits: int | None, message: str) -> None:
    config = Qwen3MoeConfig()
    config.quantization_config = {"quant_method": method, **(METHODS | NVFP4)[method][1]}
    (notice,) = decoding_notices(config, bits)
    assert re.search(message, notice)
    assert not decoding_notices(Qwen3MoeConfig(), bits)
