"""``moe plan`` of models on a hub: their headers are read, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from examples.models.gguf_files import write_keys, write_model
from examples.models.gguf_rules import ARCHITECTURES
from examples.models.tiny import tiny_config, tiny_model
from experts.safetensors_io import Entry, encode_header
from moe.cli import main
from moe.commands.convert.convert import convert
from moe.commands.plan.command import next_commands
from moe.loading.meta_model import build_meta_model
from moe.settings.profile import load_profile, parse_assignments
from tests.fake_hub import FakeHub
from tests.moe.convert.stores import SETTINGS

GB = 10**9
MOST_READ = 20_000_000


def big_network() -> PreTrainedModel:
    """Of 30 billion parameters, on meta."""
    config = tiny_config("qwen3_moe")
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 416}
    sizes |= {"head_dim": 64}
    config.update(sizes | {"num_hidden_layers": 4, "vocab_size": 150_000, "dtype": "bfloat16"})
    return build_meta_model(config)


def write_sparse_safetensors(network: PreTrainedModel, out: Path, shards: int) -> int:
    """A checkpoint with a tensor for each expert, as the hub has them; its data is a hole."""
    entries = []
    for name, tensor in network.state_dict().items():
        if name.endswith("gate_up_proj"):
            count, width, hidden = tensor.shape
            for expert in range(count):
                for part in ("gate", "up"):
                    own = name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")
                    entries.append(Entry(own, tensor.dtype, (width // 2, hidden)))
        elif name.endswith("experts.down_proj"):
            for expert in range(len(tensor)):
                own = name.replace("down_proj", f"{expert}.down_proj.weight")
                entries.append(Entry(own, tensor.dtype, tuple(tensor.shape[1:])))
        else:
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape)))
    network.config.save_pretrained(out)
    each, total = -(-len(entries) // shards), 0
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        own_entries = entries[shard * each : (shard + 1) * each]
        file = out / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header = encode_header(own_entries)
        with file.open("wb") as target:
            target.write(header)
            target.truncate(len(header) + sum(entry.nbytes for entry in own_entries))
        weight_map |= dict.fromkeys((entry.name for entry in own_entries), file.name)
        total += file.stat().st_size
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def write_sparse_gguf(network: PreTrainedModel, out: Path) -> int:
    """A GGUF file with a vocabulary; its data is a hole, apart from what divides frequencies."""
    config = network.config
    writer = gguf.GGUFWriter(out, ARCHITECTURES["qwen3_moe"])
    write_keys(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_token_merges([f"a{number} b{number}" for number in range(config.vocab_size)])
    shape, width = (config.hidden_size,), config.moe_intermediate_size
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, *shape),
        "output_norm.weight": shape,
        "output.weight": (config.vocab_size, *shape),
    }
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}"
        rows = {part: heads[part] * config.head_dim for part in heads}
        experts = (config.num_experts, width, *shape)
        tensors |= {
            **{f"{block}.{name}_norm.weight": shape for name in ("attn", "ffn")},
            **{f"{block}.attn_{part}_norm.weight": (config.head_dim,) for part in heads},
            **{f"{block}.attn_{part}.weight": (rows[part], *shape) for part in heads},
            f"{block}.attn_v.weight": (rows["k"], *shape),
            f"{block}.attn_output.weight": (*shape, rows["q"]),
            f"{block}.ffn_gate_inp.weight": (config.num_experts, *shape),
            f"{block}.ffn_gate_exps.weight": experts,
            f"{block}.ffn_up_exps.weight": experts,
            f"{block}.ffn_down_exps.weight": (config.num_experts, *shape, width),
        }
    total = 0
    for name, sizes in tensors.items():
        nbytes = 2 * int(np.prod(sizes))
        kind = gguf.GGMLQuantizationType.F16
        writer.add_tensor_info(name, sizes, np.dtype(np.float16), nbytes, raw_dtype=kind)
        total += -(-nbytes // 32) * 32
    divisors = np.ones(config.head_dim // 2, np.float32)
    writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with out.open("r+b") as file:
        start = file.seek(0, 2)
        file.seek(-(-start // 32) * 32 + total)
        file.write(divisors.tobytes())
    return out.stat().st_size


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_sixty_gigabytes_of_safetensors_are_planned_from_their_headers(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    total = write_sparse_safetensors(big_network(), hub.repository("org/big"), 4)
    assert total > 60 * GB
    found = planned(capsys, "org/big", "--set", "memory.device_gib=8")
    assert hub.bytes_sent() < MOST_READ < total / 1000
    assert found["download_bytes"] >= total
    assert "memory.device_gib of at least" in found["misfit"]
    assert found["commands"] == [
        "moe convert org/big big-store",
        "moe serve big-store --profile offload --set memory.device_gib=8",
    ]
    experts = next(one for one in found["memory"]["lines"] if one["name"] == "experts")
    assert experts["bytes"] == 4 * 416 * 3 * 4096 * 1536 * 2


def test_sixty_gigabytes_of_gguf_are_planned_from_their_header(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    total = write_sparse_gguf(big_network(), hub.repository("org/big") / "big-F16.gguf")
    assert total > 60 * GB
    (hub.repository("org/big") / "big-Q4_0.gguf").write_bytes(b"another")
    found = planned(capsys, "org/big:F16", "--set", "memory.device_gib=8")
    assert hub.bytes_sent() < MOST_READ < total / 1000
    assert hub.files_sent() == {"big-F16.gguf"}
    assert found["download_bytes"] == total
    assert found["commands"][0] == "moe convert org/big:F16 big-F16-store"


@pytest.mark.deep
def test_a_plan_of_a_hub_is_that_of_a_directory(
    hub: FakeHub, tmp_path: Path, tiny_checkpoint: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tiny_model("qwen3_moe").save_pretrained(hub.repository("org/tiny"), max_shard_size="100KB")
    convert(tiny_checkpoint("qwen3_moe"), hub.root / "org" / "store", SETTINGS)
    write_model(tiny_model("qwen3_moe"), hub.repository("org/gguf") / "tiny.gguf")
    here = {"org/tiny": "org/tiny", "org/store": "org/store", "org/gguf": "org/gguf/tiny.gguf"}
    for name, path in here.items():
        options = ["--profile", "offload"] if name == "org/store" else []
        there = planned(capsys, name, *options)
        local = planned(capsys, str(hub.root / path), *options)
        for key in ("memory", "sizes", "misfit"):
            assert _stable(there[key]) == _stable(local[key]), (name, key)
        assert there["commands"] == [shlex.join(["moe", "serve", name, *options])]
        assert local["download_bytes"] == 0 < there["download_bytes"]


def _stable(part: Any) -> Any:
    """Without how much memory is free, which another moment changes."""
    if isinstance(part, dict) and "lines" in part:
        return [line for line in part["lines"] if line["name"] in ("trunk", "experts")]
    return part


def test_ranks_are_planned_from_a_hub_too(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3_moe").save_pretrained(hub.repository("org/tiny"))
    assert main(["plan", "org/tiny", "--ranks", "2", "--link", "1,10", "--revision", "v1"]) == 0
    assert "2 ranks" in capsys.readouterr().out


def test_what_to_run_next_can_be_pasted_into_a_shell() -> None:
    plain = load_profile(None, environ={})
    (serve,) = next_commands("my model", False, "", ["--set", "routing.policies=[top_k:2]"], plain)
    assert serve == "moe serve 'my model' --set 'routing.policies=[top_k:2]'"
    made, served = next_commands("my model", True, "too large", ["--set", "x=1"], plain)
    assert made == "moe convert 'my model' 'my model-store'"
    assert served == "moe serve 'my model-store' --profile offload --set x=1"


def test_what_to_run_next_keeps_the_profile_of_the_plan(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("memory: {device_gib: 0.5}\nengine: {max_batch_size: 2}\n")
    profile = load_profile(str(own), environ={})
    _, served = next_commands("m", True, "too large", ["--profile", str(own)], profile)
    assert served.startswith(f"moe serve m-store --profile {own} --set ")
    said = parse_assignments([word for word in shlex.split(served)[5:] if word != "--set"])
    again = load_profile(str(own), said)
    tuned = load_profile("offload", {"memory.device_gib": 0.5, "engine.max_batch_size": 2})
    assert again.profile == tuned.profile


def test_tables_and_commands_print_brackets_as_they_are(
    tiny_checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["--set", "routing.policies=[top_k:2]", "--set", "lossless=false"]
    assert main(["plan", str(tiny_checkpoint("qwen3_moe")), *said]) == 0
    assert "--set 'routing.policies=[top_k:2]'" in capsys.readouterr().out
