"""Train the small block-diffusion MoE model that this project ships.

What: a DiffusionGemma model (4 layers, 24 experts, top-4, canvases of 32 tokens, 7 M parameters) on
the text of ``train_demo.py``, with its tokenizer, and its token embeddings to begin with.
Why: policies that refine canvases in fewer passes, or share experts over one, trade quality for
speed; what they cost can be measured only on a model that has learnt something.
How: ``python -m examples.train_diffusion``. First the shared layers learn to read (next token, the
encoder alone: a third of the cost of a step that also refines). Then the decoder learns what the
generation code of transformers asks of it: the clean token at every position of a canvas on which a
share t of the tokens, uniform in (0, 1], are uniform noise, behind the clean text before it. All
canvases of a window are refined in one pass. Every second step gets the model's own predictions of
a noisier canvas as self-conditioning. It resumes from the checkpoint in ``--work``; ``--quick --out
DIR`` is a smoke test. Legend: B windows, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DynamicCache,
)

from examples import demo_data as data
from examples.demo_card import run_rows, table, write_card
from examples.train_demo import (
    REPO,
    build_optimizer,
    load_checkpoint,
    lr_scale,
    save_checkpoint,
)

DEMO = REPO / "examples/demo-model"
CARD = REPO / "examples/diffusion-model/README.md"
BALANCE, REVIVE = 0.01, 0.01  # weights of the two balance losses of train_demo.py
READ = 0.25  # weight of the next-token loss beside that of canvases
OWN = 0.1  # share of a canvas' clean tokens that are the model's own draws, right or wrong
PURE = 0.1  # share of canvases that are all noise, as each is at first
IN_ORDER = 0.5  # share of canvases whose noise is all at the end, as their refinement goes
TEMPERATURES = 0.4, 0.8  # of the predictions that condition the next pass, as in generation
TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "num_experts": 24,
    "top_k_experts": 4,
    "moe_intermediate_size": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {  # the class has a vision tower; text never reaches it
    "model_type": "gemma4_vision",
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "position_embedding_size": 16},
}
CANVAS = 32
LEVELS = (1.0, 0.75, 0.5, 0.25)  # noise at which held-out text is measured
MEASURED = 12_288  # tokens of held-out text in each domain


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the block-diffusion demo model.")
    parser.add_argument("--out", type=Path, default=REPO / "examples/diffusion-model")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-demo-diffusion")
    parser.add_argument("--text", type=Path, default=Path.home() / ".cache/moe-demo")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--read-steps", type=int, default=900, help="of them, reading only")
    parser.add_argument("--batch", type=int, default=6, help="windows per step")
    parser.add_argument("--length", type=int, default=384, help="tokens per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--quick", action="store_true", help="a few tiny steps on held-out text")
    args = parser.parse_args()
    if args.quick:
        if args.out == parser.get_default("out"):
            parser.error("--quick needs --out DIR, or it would replace the shipped model")
        args.work = Path(tempfile.mkdtemp())
        args.steps, args.read_steps, args.length = 4, 2, 2 * CANVAS
    return args


def build_model(tokenizer: Any, seed: int) -> Any:
    """The model with seeded random weights and the shipped model's token embeddings."""
    torch.manual_seed(seed)
    size = len(tokenizer)
    text = TEXT | {"vocab_size": size, "eos_token_id": tokenizer.eos_token_id}
    images: dict[str, Any] = {
        "image_token_id": size,
        "boi_token_id": size + 1,
        "eoi_token_id": size + 2,
    }
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=VISION, canvas_length=CANVAS, **images
    )
    model: Any = DiffusionGemmaForBlockDiffusion(config)
    demo: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(demo.lm_head.weight)
    model.set_experts_implementation("grouped_mm")
    return model


class Routers:
    """Collects what the routers of a pass say, and prices uneven loads."""

    def __init__(self, model: nn.Module) -> None:
        self.said: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if type(module).__name__.endswith("TextRouter"):
                module.register_forward_hook(lambda _, __, out: self.said.append((out[0], out[2])))

    def take(self) -> tuple[Tensor, float]:
        """The balance losses of `train_demo.losses`, summed over layers, and the least load."""
        said, self.said = self.said, []
        total, least = torch.zeros(()), 1.0
        for probabilities, chosen in said:
            experts = probabilities.shape[-1]
            share = chosen.flatten().bincount(minlength=experts) / chosen.numel()
            mean = probabilities.mean(0)
            total = total + BALANCE * experts * (share * mean).sum()
            total = total - REVIVE * (experts * mean).log().mean()
            least = min(least, share.min().item() * experts)
        return total, least


def masks(length: int, window: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Who attends to whom, by kind of layer: reading ``(1, 1, T, T)``, and refining all canvases of
    a window at once ``(1, 1, T, 2 T)``, behind the keys of the clean text."""
    at = torch.arange(length)
    causal = at[:, None] >= at
    begin = at[:, None] // CANVAS * CANVAS
    before, same = at < begin, at // CANVAS == at[:, None] // CANVAS
    near = at >= begin - (window - 1)  # what a cache of sliding layers still holds then
    reading = {
        "full_attention": causal,
        "sliding_attention": causal & (at[:, None] - at < window),
    }
    refining = {
        "full_attention": torch.cat([before, same], 1),
        "sliding_attention": torch.cat([before & near, same], 1),
    }
    return (
        {kind: mask[None, None] for kind, mask in reading.items()},
        {kind: mask[None, None] for kind, mask in refining.items()},
    )


def noise_mask(shape: tuple[int, int], level: Tensor, in_order: float = IN_ORDER) -> Tensor:
    """Which tokens of each canvas are noise: ``(B, T)`` by the canvases' shares ``(B, T / C)``."""
    rank = torch.rand(*shape).unflatten(1, (-1, CANVAS)).argsort(2).argsort(2)
    ordered = torch.rand(level.shape) < in_order
    at = torch.where(ordered[..., None], CANVAS - 1 - torch.arange(CANVAS), rank)
    return (at < (level[..., None] * CANVAS).ceil()).flatten(1)


def read(model: Any, ids_BT: Tensor, mask: dict[str, Tensor]) -> tuple[Tensor, DynamicCache]:
    """Hidden states of clean text, and the keys and values that canvases attend to."""
    cache = DynamicCache()  # keeps all positions: `masks` knows what sliding layers forget
    reader = model.model.encoder.language_model
    hidden: Tensor = reader(input_ids=ids_BT, attention_mask=mask, cache=cache).last_hidden_state
    return hidden, cache


def next_token_nats(model: Any, hidden: Tensor, ids_BT: Tensor) -> Tensor:
    cap = model.final_logit_softcapping
    logits = torch.tanh(model.lm_head(hidden[:, :-1]).float() / cap) * cap
    return F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def refine(
    model: Any, canvas_BT: Tensor, cache: DynamicCache, mask: Any, before: Tensor | None = None
) -> Tensor:
    """``(B, T, V)`` logits of the clean tokens, given the logits of a pass before."""
    positions = torch.arange(canvas_BT.shape[1])[None]
    logits: Tensor = model(
        decoder_input_ids=canvas_BT,
        cache=cache,
        decoder_attention_mask=mask,
        decoder_position_ids=positions,
        self_conditioning_logits=before,
    ).logits
    return logits


def canvas_nats(
    model: Any, ids_BT: Tensor, cache: DynamicCache, mask: Any, *, conditioned: bool
) -> Tensor:
    """Nats a token of canvases that are partly noise, over all their positions."""
    vocabulary, shape = model.config.text_config.vocab_size, (ids_BT.shape[0], ids_BT.shape[1])
    level = torch.rand(shape[0], shape[1] // CANVAS)
    level[torch.rand(level.shape) < PURE] = 1.0
    noise, is_noise = torch.randint(vocabulary, shape), noise_mask(shape, level)
    clean, before = ids_BT, None
    if conditioned:
        more = torch.rand(level.shape) * (1 - level) + level
        earlier = torch.where(noise_mask(shape, more), torch.randint(vocabulary, shape), ids_BT)
        low, high = TEMPERATURES
        with torch.no_grad():
            before = refine(model, earlier, cache, mask) / (low + (high - low) * torch.rand(()))
            draws = torch.multinomial(before.softmax(-1).flatten(0, 1), 1).view(shape)
        clean = torch.where(torch.rand(shape) < OWN, draws, ids_BT)
    logits = refine(model, torch.where(is_noise, noise, clean), cache, mask, before)
    return F.cross_entropy(logits.flatten(0, 1), ids_BT.flatten())


def train(args: argparse.Namespace, model: Any, streams: list[Tensor]) -> float:
    """Train up to ``args.steps`` steps, resuming from a checkpoint; return the seconds spent."""
    optimizer, routers = build_optimizer(model, args.lr), Routers(model)
    path, first, before = args.work / "checkpoint.safetensors", 0, 0.0
    if path.exists():
        first, before = load_checkpoint(path, model, optimizer, "cpu")
    reading, refining = masks(args.length, model.config.text_config.sliding_window)
    model.train()
    start = time.time()
    for step in range(first, args.steps):
        torch.manual_seed(args.seed + 1_000_003 * step)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_scale(step, args.steps)
        batch = data.training_batch(streams, args.length, args.batch, step, args.seed)
        canvas = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            hidden, cache = read(model, batch, reading)
            text = next_token_nats(model, hidden, batch)
            loss = text
            if step >= args.read_steps:
                canvas = canvas_nats(model, batch, cache, refining, conditioned=step % 2 == 1)
                loss = READ * text + canvas
        balance, least = routers.take()
        (loss + balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, seconds = step + 1, time.time() - start
        if done % 20 == 0 or done == args.steps:
            print(
                f"step {done}/{args.steps} next token {text.item():.3f} canvas {canvas.item():.3f} "
                f"balance {balance.item():.3f} least load {least:.2f} "
                f"{seconds / (done - first):.2f} s/step",
                flush=True,
            )
        if done % args.save_every == 0 or done == args.steps:
            save_checkpoint(path, model, optimizer, done, before + seconds)
    return before + time.time() - start


@torch.no_grad()
def measure(
    model: Any, held_out: dict[str, Tensor], length: int
) -> tuple[dict[str, list[float]], Tensor]:
    """Bits a token of held-out text by domain (the next one, then on canvases with each of
    `LEVELS`), and the loads of experts while refining, ``[layer, expert]``, 1 being even.

    Canvases are read in one first pass, without a pass before it; noise is the same at each call.
    """
    torch.manual_seed(0)
    routers, bits, loads = Routers(model), {}, torch.zeros(())
    reading, refining = masks(length, model.config.text_config.sliding_window)
    vocabulary = model.config.text_config.vocab_size
    for domain, stream in held_out.items():
        count = min(MEASURED, len(stream)) // length
        windows = stream[: count * length].long().view(-1, 1, length)
        sums = torch.zeros(1 + len(LEVELS))
        for ids in windows:
            hidden, cache = read(model, ids, reading)
            sums[0] += next_token_nats(model, hidden, ids)
            routers.said.clear()
            for at, level in enumerate(LEVELS):
                shares = torch.full((1, length // CANVAS), level)
                noise = torch.randint(vocabulary, ids.shape)
                canvas = torch.where(noise_mask((1, length), shares, in_order=0), noise, ids)
                logits = refine(model, canvas, cache, refining)
                sums[1 + at] += F.cross_entropy(logits[0], ids[0])
            chosen = torch.stack([ids_TK.flatten() for _, ids_TK in routers.said])
            routers.said.clear()
            experts = torch.arange(TEXT["num_experts"])
            counts = (chosen[..., None] == experts).sum(1).unflatten(0, (len(LEVELS), -1))
            loads = loads + counts.sum(0)
        bits[domain] = (sums / len(windows) / math.log(2)).tolist()
    return bits, loads / loads.mean(1, keepdim=True)


def quality_table(bits: dict[str, list[float]]) -> str:
    levels = [f"canvas, {level:.0%} noise" for level in LEVELS]
    rows = [["domain", "next token", *levels]]
    rows += [[domain, *(f"{value:.2f}" for value in own)] for domain, own in bits.items()]
    mean = torch.tensor(list(bits.values())).mean(0).tolist()
    return table([*rows, ["**all**", *(f"**{value:.2f}**" for value in mean)]])


def load_table(loads: Tensor) -> str:
    rows: list[list[Any]] = [["layer", "least", "most", "below 0.1"]]
    for layer, own in enumerate(loads):
        rows.append([layer, f"{own.min():.2f}", f"{own.max():.2f}", int((own < 0.1).sum())])
    return table(rows)


def settings_table(args: argparse.Namespace, model: Any, seconds: float) -> str:
    names = ("steps", "read_steps", "batch", "length", "lr", "seed", "threads")
    rows = TEXT | {"canvas_length": CANVAS} | {name: getattr(args, name) for name in names}
    rows |= {"vocabulary": model.config.text_config.vocab_size}
    rows |= run_rows(model, TEXT["top_k_experts"], TEXT["num_experts"], seconds)
    return table([["setting", "value"], *map(list, rows.items())])


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    held = {d: (REPO / f"tests/data/heldout_{d}.txt").read_text("utf-8") for d in data.DOMAINS}
    if args.quick:
        held = {domain: text[:20_000] for domain, text in held.items()}
        texts = [[text] for text in held.values()]
    else:
        texts = list(data.load_text(args.text / "deb", REPO / "tests/data")[0].values())
    model = build_model(tokenizer, args.seed)
    seconds = train(args, model, [data.encode(tokenizer, own) for own in texts])
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # Measured as shipped: the bfloat16 weights, computed in float32.
    shipped: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(args.out, dtype=torch.float32)
    streams = {domain: data.encode(tokenizer, [text]) for domain, text in held.items()}
    bits, loads = measure(shipped.eval(), streams, args.length)
    sections = {
        "Held-out quality, bits a token": quality_table(bits),
        "Expert load on held-out canvases": load_table(loads),
        "Settings": settings_table(args, shipped, seconds),
    }
    write_card(args.out / "README.md", sections, CARD)
    print("\n".join(sections.values()))


if __name__ == "__main__":
    main()
