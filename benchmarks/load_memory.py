"""How much memory does loading take beside the weights, and how long, against transformers?

    python -m benchmarks.load_memory [--quick] [--repeats N]

Writes a random Qwen3-MoE checkpoint in hub layout (one tensor an expert, several shards) piece by
piece, loads it in fresh processes by `moe.loading` and by `AutoModelForCausalLM.from_pretrained`,
and reports the peak resident size (VmHWM) above what the process held after its imports. That
peak includes file pages that a process maps: transformers maps the checkpoint, and although such
pages can be reclaimed, a container's memory limit and the out-of-memory killer see them.
Times are medians with the checkpoint in the page cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.common import environment, print_header, print_json, print_table
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config
from moe.loading.load import load_weights
from moe.loading.meta_model import build_meta_model
from moe.loading.weight_plan import plan_weights

SHARD_BYTES = 200 << 20
LOADERS = ("ours", "transformers")
Shapes = dict[str, tuple[int, ...]]


def hub_shapes(config: Qwen3MoeConfig) -> Shapes:
    """Tensor names and shapes as on the hub: every expert's matrices are tensors of their own."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    head = hidden // config.num_attention_heads
    keys = config.num_key_value_heads * head
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("q_proj", hidden, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, hidden),
        ):
            shapes[f"{at}self_attn.{name}.weight"] = (rows, columns)
        shapes[f"{at}self_attn.q_norm.weight"] = (head,)
        shapes[f"{at}self_attn.k_norm.weight"] = (head,)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{at}mlp.gate.weight"] = (config.num_experts, hidden)
        for expert in range(config.num_experts):
            one = f"{at}mlp.experts.{expert}."
            shapes[f"{one}gate_proj.weight"] = (inner, hidden)
            shapes[f"{one}up_proj.weight"] = (inner, hidden)
            shapes[f"{one}down_proj.weight"] = (hidden, inner)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def write_checkpoint(directory: Path, config: Qwen3MoeConfig, shapes: Shapes) -> int:
    """Random bf16 shards, index and config.json; returns the bytes of weights."""
    shards: list[Shapes] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * math.prod(shape)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    config.save_pretrained(directory)
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def _write_shard(file: Path, shard: Shapes) -> None:
    pool = torch.randn(1 << 20).mul_(0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    header, position = {}, 0
    for name, shape in shard.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        while position > 0:
            start = 2 * random.randrange(len(pool) // 4)
            position -= out.write(pool[start : start + min(position, len(pool) // 2)])


def _status(field: str) -> int:
    """A size of this process from /proc, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def load_and_measure(loader: str, path: Path) -> dict[str, float]:
    """Load once in this process; bytes at the peak above the imports, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _status("VmRSS")
    started = time.perf_counter()
    if loader == "ours":
        model = build_meta_model(read_config(path))
        with Checkpoint.open(path) as checkpoint:
            weights = plan_weights(model, checkpoint, lambda _, dtype: dtype)
            load_weights(model, checkpoint, weights, device="cpu")
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    seconds = time.perf_counter() - started
    assert all(not parameter.is_meta for parameter in model.parameters())
    return {"peak_bytes": _status("VmHWM") - before, "seconds": seconds}


def measure(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Each loader `repeats` times in turn: highest peak, median time."""
    runs: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for _ in range(repeats):
        for loader in LOADERS:
            command = [sys.executable, "-m", "benchmarks.load_memory", "--child", loader, str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{loader} failed:\n{done.stderr}")
            runs[loader].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        loader: {
            "peak_bytes": max(run["peak_bytes"] for run in results),
            "seconds": statistics.median(run["seconds"] for run in results),
        }
        for loader, results in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about 0.3 GB instead of 1 GB")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind")
    parser.add_argument("--child", nargs=2, metavar=("LOADER", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(load_and_measure(arguments.child[0], Path(arguments.child[1]))))
        return
    config = Qwen3MoeConfig(
        vocab_size=32768, hidden_size=1024, moe_intermediate_size=512, num_experts=32,
        num_hidden_layers=2 if arguments.quick else 8, num_attention_heads=16,
        num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        weights = write_checkpoint(Path(directory), config, hub_shapes(config))
        results = measure(Path(directory), arguments.repeats)
    rows = [
        (loader, result["peak_bytes"] / 1e6, result["peak_bytes"] / weights, result["seconds"])
        for loader, result in results.items()
    ]
    print_header(environment())
    columns = ("", "peak MB", "peak / weights", "seconds")
    print_table(f"loading {weights / 1e6:.0f} MB of bf16 weights", columns, rows)
    line: dict[str, Any] = {"weights_bytes": weights}
    for loader, result in results.items():
        line |= {
            f"{loader}_peak_bytes": int(result["peak_bytes"]),
            f"{loader}_ratio": round(result["peak_bytes"] / weights, 4),
            f"{loader}_s": round(result["seconds"], 3),
        }
    print_json(line)


if __name__ == "__main__":
    main()
