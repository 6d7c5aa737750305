"""How much memory does loading take beside the weights, and how long, against transformers?

    python -m benchmarks.load_memory [--quick] [--repeats N]
    python -m benchmarks.load_memory --store DIR [--repeats N]

Writes a random Qwen3-MoE checkpoint in hub layout (one tensor an expert, several shards) piece by
piece, loads it in fresh processes by `moe.loading` and by `AutoModelForCausalLM.from_pretrained`,
and reports the peak resident size (VmHWM) above what the process held after its imports. That
peak includes file pages that a process maps: transformers maps the checkpoint, and although such
pages can be reclaimed, a container's memory limit and the out-of-memory killer see them.
Times are medians with the checkpoint in the page cache.

With ``--store``: is a store loaded as fast as the disk reads it? In turn, each in a fresh process
and with none of its files in the page cache: the store is loaded as `moe generate` does, and bare
threads read the same files past the page cache into fresh memory. Processor seconds are of reading
only, and include what the system takes to find memory. "Resident" is what a process that has had
another model before takes beside it once the store is loaded, over the store's size, and behind a
few tokens ("used"). The last line is JSON.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.memory_group import drop_from_cache
from experts.layer_file import READ_BYTES
from experts.safetensors_io import FileReader, as_bytes, fresh_bytes, open_tensors
from moe import MoE, SamplingParams
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config
from moe.loading.load import load_weights, plan_weights
from moe.loading.meta_model import build_meta_model
from moe.loading.progress import LoadProgress
from moe.loading.store import READERS

DEMO = Path(__file__).parents[1] / "examples/demo-model"
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


def load_store(path: Path) -> dict[str, float]:
    """Seconds of a load before, while and after weights are read, and the latter's work."""
    marks: dict[str, tuple[float, float]] = {}

    def report(progress: LoadProgress) -> None:
        marks.setdefault(progress.phase, (time.perf_counter(), time.process_time()))

    report(LoadProgress("begin"))
    MoE.from_pretrained(path, progress=report)
    report(LoadProgress("ready"))
    begun, reading, read, ready = (
        marks[phase] for phase in ("begin", "loading weights", "preparing", "ready")
    )
    return {
        "planning": reading[0] - begun[0],
        "reading": read[0] - reading[0],
        "reading_cpu": read[1] - reading[1],
        "preparing": ready[0] - read[0],
    }


def resident_bytes(path: Path) -> dict[str, float]:
    """Memory that a process takes for a store: once it is loaded, and behind a few tokens."""
    with MoE.from_pretrained(DEMO) as other:  # brings what models import
        other.generate([[1, 2]], SamplingParams(max_new_tokens=2))
    before = _status("VmRSS")
    model = MoE.from_pretrained(path)
    loaded = _status("VmRSS") - before
    model.generate([[1, 2]], SamplingParams(max_new_tokens=8))
    return {"loaded": loaded, "used": _status("VmRSS") - before}


def read_bare(path: Path) -> dict[str, float]:
    """The same files by as many threads; seconds, and work of the processor."""

    def one(file: Path) -> Tensor:
        opened = open_tensors(path, file.name)  # open until this process ends
        memory = fresh_bytes(opened.status.st_size)
        view = as_bytes(memory)
        with FileReader(opened) as reader:
            for at in range(0, len(view), READ_BYTES):
                reader.read(view[at : at + READ_BYTES], at)
        return memory

    started, work = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(READERS) as pool:
        _kept = list(pool.map(one, sorted(path.glob("*.safetensors"))))
    return {"reading": time.perf_counter() - started, "reading_cpu": time.process_time() - work}


def measure(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Each loader `repeats` times in turn: highest peak, median time."""
    return {
        loader: {
            "peak_bytes": max(run["peak_bytes"] for run in results),
            "seconds": statistics.median(run["seconds"] for run in results),
        }
        for loader, results in in_turn(LOADERS, path, repeats).items()
    }


def in_turn(loaders: Sequence[str], path: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return what a fresh process of each loader printed, `repeats` times."""
    runs: dict[str, list[dict[str, float]]] = {loader: [] for loader in loaders}
    for _ in range(repeats):
        for loader in loaders:
            command = [sys.executable, "-m", "benchmarks.load_memory", "--child", loader, str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{loader} failed:\n{done.stderr}")
            runs[loader].append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def compare_store(path: Path, repeats: int) -> None:
    runs = in_turn(("store", "bare"), path, repeats)
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    medians = {
        f"{loader}_{name}_s": statistics.median(run[name] for run in results)
        for loader, results in runs.items()
        for name in results[0]
    }
    ratios = [
        one["reading"] / other["reading"]
        for one, other in zip(runs["store"], runs["bare"], strict=True)
    ]
    (resident,) = in_turn(("resident",), path, 1)["resident"]
    line = {
        "store_bytes": nbytes,
        "resident_ratio": resident["loaded"] / nbytes,
        "used_ratio": resident["used"] / nbytes,
        "reading_ratio": statistics.median(ratios),
        **medians,
    }
    print_header(environment())
    print_table(f"{path.name}, {nbytes / 1e9:.2f} GB", ("", ""), list(line.items())[1:])
    print_json({name: round(value, 3) for name, value in line.items()})


OF_STORES = {"store": load_store, "bare": read_bare, "resident": resident_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about 0.3 GB instead of 1 GB")
    parser.add_argument("--repeats", type=int, help="processes of each kind (3; 1 with --quick)")
    parser.add_argument("--store", type=Path, metavar="DIR", help="load this store instead")
    parser.add_argument("--child", nargs=2, metavar=("LOADER", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 3)
    if arguments.child:
        loader, path = arguments.child[0], Path(arguments.child[1])
        if loader in LOADERS:
            print(json.dumps(load_and_measure(loader, path)))
        else:
            drop_from_cache(*path.glob("*.safetensors"))
            print(json.dumps(OF_STORES[loader](path)))
        return
    if arguments.store:
        compare_store(arguments.store, arguments.repeats)
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
