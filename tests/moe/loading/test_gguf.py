"""GGUF files: the logits of the model they were written from, and as transformers decodes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Regex, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from examples.models import gguf_files, gguf_rules
from examples.models.gguf_files import Kind, write_model
from examples.models.gguf_rules import ARCHITECTURES, AS_LLAMA_CPP
from examples.models.tiny import tiny_config
from experts.manifest import read_manifest
from experts.store import Store
from experts.weights import dequantize_experts
from kernels import QuantizedExperts
from moe import MoE
from moe.cli import main
from moe.commands.calibrate.calibrate import calibrate
from moe.commands.convert.convert import convert
from moe.errors import CalibrationError, CheckpointError, RequestError
from moe.loading.gguf.architectures import ARCHITECTURES as TABLE
from moe.loading.gguf.tokenizer import SPLITS
from moe.loading.hub import read_config, resolve_model
from moe.loading.local import public_name
from moe.loading.meta_model import build_meta_model
from moe.loading.quantized import decoding_notices, open_checkpoint
from moe.loading.store import read_layers
from moe.network.seam import take_experts
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from tests.amounts import deep_except
from tests.fake_hub import FakeHub

IDS = list(range(3, 23))
DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
TEXT = "def main():\n    print('Hello wörld 123')  # <|im_start|>\n\n  don't I'LL"
PLAIN = {"fused": "off"}
"""Nothing is compiled or probed for these few tokens."""

Write = Callable[..., Path]


def reference(model_type: str) -> PreTrainedModel:
    """A tiny model of an architecture, as llama.cpp can run it."""
    config = tiny_config(model_type)
    values = config.to_dict()
    values.get("text_config", values).update(AS_LLAMA_CPP.get(model_type, {}))
    torch.manual_seed(0)
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if multimodal else MODEL_FOR_CAUSAL_LM_MAPPING
    made: Any = kinds[type(config)]
    model: PreTrainedModel = made(type(config).from_dict(values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter)
            spread = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(parameter * (parameter.ndim < 2) + spread * drawn)
        for name, buffer in model.named_buffers():
            if "bias" in name or "layer_scalar" in name:
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
    return model


@cache
def broad(model_type: str) -> PreTrainedModel:
    """One with rows of 256, as types with large blocks want."""
    config = tiny_config(model_type)
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    config.update(dict.fromkeys(sizes, 256) | {"num_hidden_layers": 1})
    config.update({"shared_expert_intermediate_size": 256, "head_dim": 64})
    torch.manual_seed(0)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    network: PreTrainedModel = made(config)
    return network.eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(model: PreTrainedModel, kind: Kind = lambda _: "F32", **options: Any) -> Path:
        file = tmp_path / "model-of-mine.gguf"
        write_model(model, file, kind, **options)
        return file

    return make


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return json.loads((DEMO / "tokenizer.json").read_text())


@pytest.mark.parametrize("name", TABLE)
def test_names_are_those_that_llama_cpp_publishes(name: str) -> None:
    numbers = {own: number for number, own in gguf.MODEL_ARCH_NAMES.items()}
    tensors = gguf.MODEL_TENSORS[numbers[name]]
    published = {gguf.TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in tensors}
    for row in TABLE[name]:
        kinds = (own for kinds in row.by_layer.values() for own in kinds)
        shown = (tensor.rpartition(".")[0] for tensor in row.shown.values())
        sizes = row.sizes.keys() - {"experts", "width"}
        names = {tensor.removesuffix(".scale") for tensor in row.names}
        assert {*names, *row.layouts, *kinds, *shown, *sizes} <= published
    assert {own.model_type for own in TABLE[name]} <= set(ARCHITECTURES) | {"granitemoeshared"}


def test_every_architecture_of_the_table_is_tried() -> None:
    assert {*ARCHITECTURES.values(), "qwen3vlmoe"} == set(TABLE)


@pytest.mark.parametrize(
    "model_type", deep_except(["qwen3_moe", "deepseek_v3", "gpt_oss"], ARCHITECTURES)
)
def test_logits_are_those_of_the_model_it_was_written_from(model_type: str, write: Write) -> None:
    model = reference(model_type)
    torch.testing.assert_close(
        MoE.from_pretrained(write(model), engine=PLAIN).logits(IDS),
        logits_of(model),
        rtol=1e-4,
        atol=1e-4,
    )


def parameters_of(file: Path) -> dict[str, Tensor]:
    """What a network's parameters are filled with."""
    path = resolve_model(file)
    config = read_config(path)
    network = build_meta_model(config)
    with open_checkpoint(path, config, exact=True) as checkpoint:
        plan = checkpoint.make_plan(network)
        assert not plan.problems
        found = {}
        for conversion in plan.conversions:
            ((target, shape),) = conversion.targets.items()
            found[target] = torch.full(shape, torch.nan)
            for name, index in conversion.pieces:
                found[target][index] = checkpoint.read(name)
    return found


@pytest.mark.parametrize("model_type", deep_except(["qwen2_moe"], ["qwen3_moe", "qwen2_moe"]))
@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
)
def test_weights_are_what_transformers_decodes(model_type: str, kind: str, write: Write) -> None:
    model = broad(model_type)
    file = write(model, lambda _: kind)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    ours = parameters_of(file)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].view(tensor.shape)), name  # one of theirs is 3D


def test_queries_and_keys_in_pairs_are_put_back_as_by_transformers(write: Write) -> None:
    """transformers takes Mixtral for a dense model, so only this part of it is an oracle."""
    model = broad("mixtral")
    file = write(model, lambda _: "Q8_0")
    ours = parameters_of(file)
    processor = LlamaTensorProcessor(model.config.to_dict())
    for tensor in gguf.GGUFReader(file).tensors:
        if (part := tensor.name.rpartition("attn_")[2]) in ("q.weight", "k.weight", "v.weight"):
            whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            theirs = torch.from_numpy(processor.process(whole, tensor.name).weights)
            name = f"model.layers.0.self_attn.{part[0]}_proj.weight"
            assert torch.equal(ours.pop(name), theirs)
    assert not any(name.endswith("k_proj.weight") for name in ours)


@pytest.mark.parametrize(("model_type", "kind"), [("qwen3_moe", "Q4_0"), ("gpt_oss", "MXFP4")])
def test_a_store_keeps_scales_of_small_types(
    model_type: str, kind: str, write: Write, tmp_path: Path
) -> None:
    model = broad(model_type)
    file = write(model, lambda _: kind)
    store = convert(file, tmp_path / "store", ModelSettings(expert_bits=8, group_size=32))
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    like = take_experts(build_meta_model(read_config(store)))
    with Store.open(store) as opened:
        (layer,) = read_layers(opened, like, 8, lambda own: own, torch.device("cpu"), lambda _: 0)
    assert isinstance(layer, QuantizedExperts)
    experts = dequantize_experts(layer)
    down = stored["blk.0.ffn_down_exps.weight"]
    wanted = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    assert torch.equal(experts.down_EHF.float(), wanted)
    assert "quantization_config" not in json.loads((store / "config.json").read_text())
    assert read_manifest(store).source == "model-of-mine"
    (notice,) = decoding_notices(read_config(resolve_model(file)), 8)
    assert f"GGUF (F32, {kind})" in notice
    assert "hold the same numbers where groups fit" in notice


def test_a_store_answers_as_the_file_does(write: Write, tmp_path: Path) -> None:
    file = write(reference("qwen2_moe"))
    settings = ModelSettings(expert_bits=4, group_size=32)
    store = convert(file, tmp_path / "store", settings)
    wanted = {"expert_bits": 4, "group_size": 32, "trunk_bits": 8, "head_bits": 8}
    read = MoE.from_pretrained(file, model=wanted, engine=PLAIN)
    assert torch.equal(MoE.from_pretrained(store, engine=PLAIN).logits(IDS), read.logits(IDS))


def test_split_files_are_one_model(write: Write, tmp_path: Path) -> None:
    model = reference("qwen3_moe")
    write(model, parts=3)
    first = tmp_path / "model-of-mine-00001-of-00003.gguf"
    got = MoE.from_pretrained(first, engine=PLAIN).logits(IDS)
    torch.testing.assert_close(got, logits_of(model), rtol=1e-4, atol=1e-4)
    assert resolve_model(first).name == "model-of-mine"
    with pytest.raises(CheckpointError, match="is part 2 of 3; name the first"):
        resolve_model(tmp_path / "model-of-mine-00002-of-00003.gguf")
    (tmp_path / "model-of-mine-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"missing.*\n.*00003-of-00003"):
        resolve_model(first)
    first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts with 51 tensors"):
        resolve_model(tmp_path / "alone.gguf")


@pytest.mark.parametrize("blobs", ["cba", "bac"])
def test_parts_in_a_hub_cache_keep_their_order(blobs: str, write: Write, tmp_path: Path) -> None:
    """There each part is a link to a file whose name is a hash."""
    write(reference("qwen3_moe"), parts=3)
    parts = sorted(tmp_path.glob("*.gguf"))
    whole = MoE.from_pretrained(parts[0], engine=PLAIN).logits(IDS)
    for part, blob in zip(parts, blobs, strict=True):
        part.rename(tmp_path / blob)
        part.symlink_to(blob)
    assert torch.equal(MoE.from_pretrained(parts[0], engine=PLAIN).logits(IDS), whole)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="the extra gguf wants 5.18"
)
@pytest.mark.parametrize(
    "model_type", deep_except(["qwen3_moe"], ["qwen3_moe", "mixtral", "minimax_m2"])
)
def test_the_tokenizer_is_the_one_that_transformers_makes(
    model_type: str, write: Write, vocabulary: Any
) -> None:
    file = write(reference(model_type), vocabulary=vocabulary)
    directory = resolve_model(file)
    ours = AutoTokenizer.from_pretrained(directory)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.decode(ours(TEXT).input_ids) == TEXT
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.eos_token_id, ours.bos_token_id) == (2, None)
    assert ours.chat_template == theirs.chat_template
    assert read_config(directory).eos_token_id == [2]


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("deepseek-v3", "a 1234,b  c\n你好 don't", "a| |123|4|,b| | c|\n|你好| don|'t"),
        ("glm4", "I'LL 1234 x!!\n\n y", "I|'LL| |123|4| x|!!\n\n| y"),
        ("hunyuan", "I'LL 12 x", "I|'LL| |1|2| x"),
        ("refact", "I'll 12 x", "I|'ll| |1|2| x"),
        ("olmo", "I'll 12  x", "I|'ll| 12| | x"),
        ("qwen35", "né 12", "né| |1|2"),
        ("tekken", "HelloWorld 12", "Hello|World| |1|2"),
    ],
)
def test_text_is_split_as_the_models_own_tokenizers_do(split: str, text: str, pieces: str) -> None:
    """Written down by hand, from what the expressions are for."""
    expressions = [pre_tokenizers.Split(Regex(own), "isolated") for own in SPLITS[split]]
    found = pre_tokenizers.Sequence(expressions).pre_tokenize_str(text)
    assert "|".join(piece for piece, _ in found) == pieces


@pytest.mark.parametrize("name", sorted(set(SPLITS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_expressions_are_those_of_transformers_where_it_has_them(name: str) -> None:
    theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    (expression,) = SPLITS[name]
    ours = pre_tokenizers.Split(Regex(expression), "isolated")
    for text in (TEXT, "HelloWORLD's 1234567 né  \r\n\t !!x/\n/ 你好ーー ÉtéǅX ok'S"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_text_that_would_be_split_otherwise_is_refused(write: Write, vocabulary: Any) -> None:
    file = write(reference("qwen3_moe"), vocabulary=vocabulary, split="afmoe")
    with pytest.raises(RequestError, match=r"splits text as 'afmoe' \(tokenizer.ggml.pre\)"):
        MoE.from_pretrained(file, engine=PLAIN).generate(["text"])


def test_commands_take_a_file(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(broad("gpt_oss"), lambda _: "MXFP4")
    assert public_name(file) == "model-of-mine"
    assert main(["plan", str(file)]) == 0


@pytest.mark.parametrize("name", ["a file", "org/small", "org/small:F32"])
def test_a_calibration_is_not_written_to_a_directory_that_goes(
    name: str, write: Write, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MoE, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    file = write(reference("qwen3_moe"))
    file.rename(at := hub.repository("org/small") / "small-F32.gguf")
    model = str(at) if name == "a file" else name
    with pytest.raises(CalibrationError, match=f"beside {model} .* give it a folder with --out"):
        calibrate(model, load_profile(None), DEMO / "README.md", 5000, None)


def rewritten(model_type: str, write: Write, patch: pytest.MonkeyPatch, change: Any) -> None:
    """A file whose tensors and keys `change` has rearranged has the model's logits."""
    model = reference(model_type)
    tensors = gguf_files.gguf_tensors(model)
    keys = gguf_files.gguf_keys(model.config)
    change(model, tensors, keys)
    patch.setattr(gguf_files, "gguf_tensors", lambda _: tensors)
    patch.setattr(gguf_files, "gguf_keys", lambda _: keys)
    got = MoE.from_pretrained(write(model), engine=PLAIN).logits(IDS)
    torch.testing.assert_close(got, logits_of(model), rtol=1e-4, atol=1e-4)


def test_old_files_of_latent_attention(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before keys and values were split, with positions scaled by YaRN."""

    def whole(model: PreTrainedModel, tensors: Any, keys: Any) -> None:
        config: Any = model.config
        for name in [name for name in tensors if name.endswith(".attn_k_b.weight")]:
            layer = name.split(".")[1]
            del tensors[name], tensors[f"blk.{layer}.attn_v_b.weight"]
            own = model.get_parameter(f"model.layers.{layer}.self_attn.kv_b_proj.weight")
            tensors[f"blk.{layer}.attn_kv_b.weight"] = own
        del keys["attention.key_length_mla"], keys["attention.value_length_mla"]
        keys["attention.key_length"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        keys["attention.value_length"] = config.v_head_dim
        keys["attention.head_count_kv"] = config.num_attention_heads

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    monkeypatch.setitem(AS_LLAMA_CPP, "deepseek_v3", {"rope_parameters": rope})
    rewritten("deepseek_v3", write, monkeypatch, whole)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 2.0, 4.0],
    "long_factor": [1.0, 2.0, 3.0, 8.0],
    "original_max_position_embeddings": 16,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}


@pytest.mark.parametrize("model_type", deep_except(["mixtral"], ["llama4_text", "mixtral"]))
def test_frequencies_that_a_tensor_divides(
    model_type: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama 3.1 and 4 Scout have them."""

    def divided(model: PreTrainedModel, tensors: Any, keys: Any) -> None:
        scaled: Any = ROPE_INIT_FUNCTIONS["llama3"](model.config, None)[0]
        size = keys["rope.dimension_count"]
        plain = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        assert not torch.equal(scaled, plain)
        tensors["rope_freqs.weight"] = plain / scaled

    values = AS_LLAMA_CPP.get(model_type, {}) | {"rope_parameters": LLAMA3}
    monkeypatch.setitem(AS_LLAMA_CPP, model_type, values)
    rewritten(model_type, write, monkeypatch, divided)


def test_frequencies_that_a_tensor_divides_in_full_layers_alone(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Step 3.5 has them, with numbers for all of a head, of which these layers turn half."""

    def divided(model: PreTrainedModel, tensors: Any, keys: Any) -> None:
        config: Any = model.config.get_text_config()
        scaled: Any = ROPE_INIT_FUNCTIONS["llama3"](config, None, layer_type="full_attention")[0]
        plain = 5e6 ** (-torch.arange(0, 8, 2).float() / 8)
        assert not torch.equal(scaled, plain)
        tensors["rope_freqs.weight"] = torch.cat([plain / scaled, torch.full((4,), 7.0)])

    values = AS_LLAMA_CPP["step3p7"]
    kinds = values["rope_parameters"]
    full = kinds["full_attention"] | LLAMA3 | {"rope_theta": 5e6}
    changed = values | {"rope_parameters": kinds | {"full_attention": full}}
    monkeypatch.setitem(AS_LLAMA_CPP, "step3p7", changed)
    rewritten("step3p7", write, monkeypatch, divided)


def test_frequencies_of_short_and_long_prompts(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Phi-3.5-MoE has them."""

    def lengths(_: PreTrainedModel, tensors: Any, keys: Any) -> None:
        for name in ("short", "long"):
            tensors[f"rope_factors_{name}.weight"] = torch.tensor(LONGROPE[f"{name}_factor"])
        keys["rope.scaling.original_context_length"] = 16
        keys["rope.scaling.attn_factor"] = 1.2

    values = AS_LLAMA_CPP["phimoe"] | {"rope_parameters": LONGROPE}
    monkeypatch.setitem(AS_LLAMA_CPP, "phimoe", values)
    assert len(IDS) > 16
    rewritten("phimoe", write, monkeypatch, lengths)


def test_old_files_with_a_tensor_for_each_expert(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(_: PreTrainedModel, tensors: Any, __: Any) -> None:
        for name in [name for name in tensors if "_exps" in name]:
            for expert, value in enumerate(tensors.pop(name)):
                tensors[name.replace("_exps", f".{expert}")] = value

    rewritten("mixtral", write, monkeypatch, apart)


def test_layers_that_draft_are_left_out(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def drafting(model: PreTrainedModel, tensors: Any, keys: Any) -> None:
        count = model.config.num_hidden_layers
        for name in [name for name in tensors if name.startswith("blk.1.")]:
            tensors[name.replace("blk.1.", f"blk.{count}.")] = tensors[name] + 1
        tensors[f"blk.{count}.nextn.eh_proj.weight"] = torch.ones(32, 64)
        keys |= {"block_count": count + 1, "nextn_predict_layers": 1}

    rewritten("glm4_moe", write, monkeypatch, drafting)


def test_the_text_part_of_qwen3_vl(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """At positions of text alone it computes what Qwen3-MoE does."""

    def sections(_: PreTrainedModel, __: Any, keys: Any) -> None:
        keys |= {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}

    for rules in (gguf_rules, gguf_files):
        monkeypatch.setattr(rules, "ARCHITECTURES", {"qwen3_moe": "qwen3vlmoe"})
    rewritten("qwen3_moe", write, monkeypatch, sections)


def test_the_plan_says_what_no_planes_hold(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(broad("qwen3_moe"), lambda name: "TQ2_0" if "_exps" in name else "Q8_0")
    assert main(["plan", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "others (TQ2_0 among them) are decoded to bfloat16" in told
    assert "(numbers are rounded by 0.39 % at most)" in told
