"""Train the small Mixture-of-Experts language model that this project ships.

What: a Qwen3-MoE model (6 layers, 32 experts, top-4, 21 M parameters) trained with transformers'
own classes on Python documentation, Python code and C++ headers, saved in Hugging Face format
with a tokenizer, a chat template and a model card made of measured numbers.
Why: an engine for MoE models needs one real checkpoint, with real routing, that fits in the
repository and that anybody can make again without a download from a model hub.
How: ``python -m examples.train_demo`` (needs torch and transformers; uses a GPU where there is
one). It resumes from the checkpoint in ``--work``; ``--quick --out DIR`` is a smoke test.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from examples import demo_data as data
from examples.demo_card import (
    expert_loads,
    load_table,
    measure,
    quality_table,
    run_rows,
    table,
    write_card,
)

REPO = Path(__file__).resolve().parent.parent
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 100
REVIVE_FROM = 700  # the step from which a second balance loss revives experts hardly ever chosen
REVIVE = 0.03  # its weight
DECAY_SHARE = 0.45  # the learning rate falls linearly to 0 over this last share of the steps
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "router_aux_loss_coef": 0.01,  # weight of each layer's load-balancing loss
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=REPO / "examples/demo-model")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-demo")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--quick", action="store_true", help="a few tiny steps on held-out text")
    args = parser.parse_args()
    if args.quick:
        if args.out == parser.get_default("out"):
            parser.error("--quick needs --out DIR, or it would replace the shipped model")
        args.work, args.steps, args.length = Path(tempfile.mkdtemp()), 4, 64
    return args


def build_model(corpus: data.Corpus, seed: int) -> Any:
    """Create the model with seeded random weights."""
    torch.manual_seed(seed)
    end = corpus.tokenizer.eos_token_id
    ids = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(corpus.tokenizer), **ids, **MODEL))
    model.set_experts_implementation("grouped_mm")
    return model


def build_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def lr_scale(step: int, steps: int) -> float:
    """Warm up, stay, then decay linearly to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def losses(model: Any, batch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cross entropy (nats per token), two balance losses, expert loads [layer, expert].

    The balance losses are one term per layer, summed: transformers' own adds up the loads of all
    layers before it compares them, so experts of different layers could make up for each other.
    The first is the Switch loss, whose pull on an expert fades with the expert's probability. The
    second, KL(even use || mean router probability), pulls all the more the rarer an expert is.
    """
    top_k, experts = model.config.num_experts_per_tok, model.config.num_experts
    with torch.autocast(batch.device.type, torch.bfloat16):
        out = model(input_ids=batch, output_router_logits=True, use_cache=False)
    nats = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    routers = [logits.float() for logits in out.router_logits]
    switch = [load_balancing_loss_func((r,), experts, top_k) / top_k for r in routers]
    unused = [-(experts * r.softmax(-1).mean(0)).log().mean() for r in routers]
    loads = expert_loads(out.router_logits, top_k)
    return nats, torch.stack(switch).sum(), torch.stack(unused).sum(), loads


def save_checkpoint(path: Path, model: Any, optimizer: Any, step: int, seconds: float) -> None:
    """Write a checkpoint such that an interruption leaves the previous one whole."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[name] = p.detach()
        tensors |= {f"{name}:{key}": value for key, value in optimizer.state[p].items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "seconds": str(seconds)})
    partial.replace(path)


def load_checkpoint(path: Path, model: Any, optimizer: Any, device: str) -> tuple[int, float]:
    """Restore model and optimizer; return the steps done and the seconds spent."""
    with safe_open(path, "pt", device=device) as file:
        trained = set(file.keys())
        for name, p in model.named_parameters():
            p.data.copy_(file.get_tensor(name))
            if f"{name}:step" in trained:
                keys = ("step", "exp_avg", "exp_avg_sq")
                optimizer.state[p] = {key: file.get_tensor(f"{name}:{key}") for key in keys}
        return int(file.metadata()["step"]), float(file.metadata()["seconds"])


def train(args: argparse.Namespace, model: Any, corpus: data.Corpus, device: str) -> float:
    """Train up to ``args.steps`` steps, resuming from a checkpoint; return the seconds spent."""
    optimizer = build_optimizer(model, args.lr)
    streams = list(corpus.train.values())
    path, first, before = args.work / "checkpoint.safetensors", 0, 0.0
    if path.exists():
        first, before = load_checkpoint(path, model, optimizer, device)
    model.train()
    start = time.time()
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_scale(step, args.steps)
        batch = data.training_batch(streams, args.length, args.batch, step, args.seed)
        nats, switch, unused, loads = losses(model, batch.to(device))
        loss = nats + MODEL["router_aux_loss_coef"] * switch
        (loss + REVIVE * unused if step >= REVIVE_FROM else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, seconds = step + 1, time.time() - start
        if done % 10 == 0 or done == args.steps:
            pace = seconds / (done - first)
            print(
                f"step {done}/{args.steps} loss {nats.item():.3f} "
                f"balance {switch.item() / len(loads):.3f} {unused.item() / len(loads):.4f} "
                f"least load {loads.min().item() / loads.float().mean().item():.2f} "
                f"{pace:.2f} s/step, {pace * (args.steps - done) / 60:.0f} min left",
                flush=True,
            )
        if done % args.save_every == 0 or done == args.steps:
            save_checkpoint(path, model, optimizer, done, before + seconds)
    return before + time.time() - start


def settings_table(args: argparse.Namespace, model: Any, seconds: float) -> str:
    """Tabulate what the model is and how it was trained."""
    names = ("steps", "batch", "length", "lr", "seed", "threads")
    rows = MODEL | {name: getattr(args, name) for name in names}
    rows |= {
        "optimizer": f"AdamW, betas {BETAS}, weight decay {WEIGHT_DECAY} on matrices",
        "schedule": f"{WARMUP_STEPS} steps up, constant, last {DECAY_SHARE:.0%} linearly to 0",
        "revival loss": f"weight {REVIVE} from step {REVIVE_FROM}",
        "vocabulary": model.config.vocab_size,
    }
    rows |= run_rows(model, MODEL["num_experts_per_tok"], MODEL["num_experts"], seconds)
    return table([["setting", "value"], *map(list, rows.items())])


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = data.load_corpus(args.work, REPO / "tests/data", args.vocab, args.quick)
    model = build_model(corpus, args.seed).to(device)
    seconds = train(args, model, corpus, device)
    model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    corpus.tokenizer.save_pretrained(args.out)
    # Measured as shipped: the bfloat16 weights, computed in float32.
    shipped: Any = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    shipped.to(device)
    nats, loads = measure(shipped, corpus, args.length, device)
    seen = args.steps * args.batch * args.length / len(corpus.train)
    sections = {
        "Held-out quality": quality_table(corpus, nats, seen),
        "Expert load on the held-out text": load_table(loads),
        "Settings": settings_table(args, shipped, seconds),
    }
    write_card(args.out / "README.md", sections)
    print("\n".join(sections.values()))


if __name__ == "__main__":
    main()
