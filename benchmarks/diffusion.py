"""What do models that write whole blocks cost, with all, half and a quarter of the experts?

    python -m benchmarks.diffusion [--quick] [--model DIR]

Four prompts are continued by the model's own generation code in transformers, one after the other,
by this engine one after the other, and by it together; then together with policies that accept
tokens sooner, or let the tokens of a canvas share experts (DES). "steps a token": passes that
refine a canvas, and tokens of final blocks. "experts a step": distinct experts of a layer in a pass
of all sequences that are there. "bytes a token": of those experts, as a machine without a cache
reads them; with a store, also what was really read from disk. "same": tokens equal to transformers'
own. Without --model, a model with random weights shows counts, and nothing about quality.
Times are wall times of one run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from benchmarks.common import environment, print_header, print_json, print_table
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings

PROMPTS = [list(range(5, 5 + length)) for length in (8, 16, 24, 32)]
SHARES = (1.0, 0.5, 0.25)
COLUMNS = (
    *("way", "experts held", "tokens/s", "steps a token", "experts a step"),
    *("bytes a token", "read a token", "same"),
)
Row = dict[str, Any]


def random_model(path: Path) -> Path:
    """A few million parameters: 4 layers of 32 experts, blocks of 32 tokens."""
    text: dict[str, Any] = {
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"global_head_dim": 32, "num_global_key_value_heads": 2, "num_experts": 32},
        **{"top_k_experts": 2, "moe_intermediate_size": 64, "sliding_window": 64},
        **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "eos_token_id": 0},
    }
    vision = {
        **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": 16, "position_embedding_size": 16},
    }
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=32, image_token_id=511
    )
    DiffusionGemmaForBlockDiffusion(config).save_pretrained(path)
    return path


def theirs(path: Path, num_new: int, steps: int) -> tuple[Row, list[list[int]]]:
    """transformers' own generation, a sequence at a time."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32).eval()
    settings = {"max_new_tokens": num_new, "eos_token_id": -1, "max_denoising_steps": steps}
    written, passes, start = [], 0.0, time.perf_counter()
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        out = model.generate(torch.tensor([prompt]), **settings)
        written.append(out.sequences[0, len(prompt) :].tolist())
        passes += num_new / float(out.tokens_per_forward)
    spent, total = time.perf_counter() - start, num_new * len(PROMPTS)
    row = {"way": "transformers", "held": 1.0, "rate": total / spent, "steps": passes / total}
    return row, written


def ours(
    model: MoE, way: str, held: float, num_new: int, expected: list[list[int]], *, together: bool
) -> Row:
    """This engine: all prompts in one batch, or one after the other."""
    model.reset_stats()
    params = [
        SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    pairs = list(zip(PROMPTS, params, strict=True))
    batches = [pairs] if together else [[pair] for pair in pairs]
    written: list[list[int]] = []
    start = time.perf_counter()
    for batch in batches:
        done = model.generate([prompt for prompt, _ in batch], [one for _, one in batch])
        written += [completion.token_ids for completion in done]
    spent, stats = time.perf_counter() - start, model.stats()
    total, layers = num_new * len(PROMPTS), stats["layers"]
    canvas = sum(layer["tokens_by"]["denoise"] for layer in layers) / len(layers)
    loads = sum(layer["expert_loads"] for layer in layers)
    read = stats["offload"]["bytes_read"] if stats["offload"] else 0
    return {
        "way": way,
        "held": held,
        "rate": total / spent,
        "steps": canvas / model.config.canvas_length / total,
        "experts": loads / sum(layer["steps"] for layer in layers),
        "bytes": stats["expert_bytes_read"] / total,
        "read": read / total,
        "same": written == expected,
    }


def runs(path: Path, work: Path, num_new: int, steps: int, *, quick: bool) -> list[Row]:
    row, expected = theirs(path, num_new, steps)
    rows = [row]
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(path, work / "store", whole)
    base: dict[str, Any] = {
        "lossless": False,
        "diffusion.max_steps": steps,
        "memory.kv_tokens": 1024,
        "memory.reserve_gib": 0.0,
    }
    with MoE.from_pretrained(store, base) as model:
        plan, experts = model.memory_plan, model.stats()["expert_bytes"]
        canvas: int = model.config.canvas_length
    everything = canvas * len(PROMPTS)
    policies: dict[str, dict[str, Any]] = {
        "own schedule, together": {},
        "DES, half for all canvases": {"routing.policies": [f"des_vote:0.5:{everything}"]},
        "confidence:0.9": {"diffusion.accept": "confidence:0.9"},
        "entropy:1": {"diffusion.accept": "entropy:1"},
        "stable for 2 passes": {"diffusion.stable_steps": 2},
        "DES, half for each canvas": {"routing.policies": [f"des_vote:0.5:{canvas}"]},
        "DES, best of each token": {"routing.policies": [f"des_seq:1:{canvas}"]},
    }
    if quick:
        policies = dict(list(policies.items())[:2])
    for share in SHARES:
        limit = (plan.needed_bytes - (1 - share) * experts + 65536) / GIB
        held = base if share == 1 else base | {"memory.device_gib": limit}
        with MoE.from_pretrained(store, held) as model:
            way = "own schedule, alone"
            rows.append(ours(model, way, share, num_new, expected, together=False))
        for way, changes in policies.items():
            with MoE.from_pretrained(store, held | changes) as model:
                rows.append(ours(model, way, share, num_new, expected, together=True))
    return rows


def show(rows: Sequence[Row]) -> None:
    print_table(
        "blocks",
        COLUMNS,
        [
            [
                row["way"],
                f"{row['held']:.0%}",
                f"{row['rate']:.1f}",
                f"{row['steps']:.3f}",
                *(f"{row[key]:.4g}" if key in row else "" for key in ("experts", "bytes", "read")),
                row.get("same", ""),
            ]
            for row in rows
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one block, few passes, two ways")
    parser.add_argument("--model", type=Path, help="a block-diffusion model's directory")
    args = parser.parse_args(argv)
    facts = environment() | {"model": "random" if args.model is None else str(args.model)}
    print_header(facts)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = args.model or random_model(work / "model")
        config = DiffusionGemmaConfig.from_pretrained(path)
        blocks, steps = (1, 4) if args.quick else (4, 48)
        rows = runs(path, work, blocks * (config.canvas_length or 1), steps, quick=args.quick)
    show(rows)
    print_json({"environment": facts, "rows": rows})


if __name__ == "__main__":
    main()
