"""Train the multi-token-prediction layer of the shipped model: a draft of its next tokens but one.

What: one decoder layer of the model's own class and sizes, which reads the embedding of a token
and the model's hidden state of the token before it, and predicts what the model will say after it.
The embedding and the head are the model's own. Names are those of Qwen3-Next's checkpoints
(``mtp.fc``, ``mtp.pre_fc_norm_hidden``, ``mtp.layers.0``, ``mtp.norm``).
Why: a draft whose acceptance anybody can measure without a download from a model hub.
How: ``python -m examples.train_mtp`` writes ``mtp.safetensors`` beside the model. It learns the
model's own distribution (which is what acceptance depends on) rather than the text, every third
step two tokens deep; it starts from the model's last layer. ``--quick --out FILE`` is a smoke test.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel, Qwen3MoeRMSNorm

from examples import demo_data as data
from examples.train_demo import REPO, build_optimizer

EVERY = 3  # one step in so many also applies the layer to its own hidden states
DEEPER = 0.5  # weight of that second token's loss
WARMUP_STEPS = 40


class MtpLayer(nn.Module):
    """The layer, and what joins its two inputs. H hidden, T tokens of each of B windows."""

    def __init__(self, model: Any, residual: float) -> None:
        """``residual``: root mean square of what the model's last layer leaves, which this one is
        to go on from."""
        super().__init__()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.vocab_size = 1, 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3MoeRMSNorm(width, eps)
        self.pre_fc_norm_hidden = Qwen3MoeRMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.decoder = Qwen3MoeModel(config)
        self.decoder.set_experts_implementation("grouped_mm")
        last = model.model
        self.decoder.layers[0].load_state_dict(last.layers[-1].state_dict())
        self.decoder.norm.load_state_dict(last.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.mul_(0.2 * residual)
            self.fc.weight[:, width:].add_(residual * torch.eye(width))

    def forward(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        """``(B, T, H)`` hidden states: what the head reads, and the layer itself one token on."""
        embedded = self.pre_fc_norm_embedding(embedded_BTH)
        joined = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden_BTH)], -1))
        output: Tensor = self.decoder(inputs_embeds=joined, use_cache=False).last_hidden_state
        return output

    def tensors(self) -> dict[str, Tensor]:
        """The weights under the names of a checkpoint, each expert by itself, in bfloat16."""
        named: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("decoder.")
            if name == "embed_tokens.weight":
                continue
            tensor = tensor.to(torch.bfloat16)
            block, _, kind = name.partition("experts.")
            if not kind:
                named[f"mtp.{name}"] = tensor
            for expert, own in enumerate(tensor if kind else ()):
                parts = own.chunk(2) if kind == "gate_up_proj" else [own]
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                for each, part in zip(kinds, parts, strict=True):
                    named[f"mtp.{block}experts.{expert}.{each}.weight"] = part
        return {name: tensor.contiguous() for name, tensor in named.items()}

    def load(self, path: Path) -> None:
        """Take the weights of a file that `tensors` filled."""
        saved = load_file(path)
        own = self.state_dict()
        for name in own:
            name = name.removeprefix("decoder.")
            block, _, kind = name.partition("experts.")
            if name == "embed_tokens.weight":
                continue
            if not kind:
                own[f"decoder.{name}" if f"decoder.{name}" in own else name] = saved[f"mtp.{name}"]
                continue
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            count = len(own[f"decoder.{name}"])
            parts = [
                [saved[f"mtp.{block}experts.{e}.{each}.weight"] for each in kinds]
                for e in range(count)
            ]
            own[f"decoder.{name}"] = torch.stack([torch.cat(each) for each in parts])
        self.load_state_dict({name: tensor.float() for name, tensor in own.items()})


@torch.no_grad()
def residual_of(model: Any, ids_BT: Tensor) -> float:
    """Root mean square of the rows that the model's final norm reads."""
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    model.model(input_ids=ids_BT, use_cache=False)
    handle.remove()
    return seen[0].pow(2).mean().sqrt().item()


def losses(
    model: Any, layer: MtpLayer, ids_BT: Tensor, depths: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each depth the cross entropy with the model's distribution (nats a token), and the share
    of tokens whose likeliest is the model's."""
    with torch.no_grad():
        hidden = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        target = model.lm_head(hidden)
        embedded = model.model.embed_tokens(ids_BT)
    nats, agreed = [], []
    for depth in range(1, depths + 1):
        hidden = layer(embedded[:, depth:], hidden[:, : ids_BT.shape[1] - depth])
        logits, own = model.lm_head(hidden), target[:, depth:]
        nats.append(F.cross_entropy(logits.flatten(0, 1), own.softmax(-1).flatten(0, 1)))
        agreed.append((logits.argmax(-1) == own.argmax(-1)).float().mean())
    return nats, agreed


def train(
    args: argparse.Namespace, model: Any, layer: MtpLayer, streams: list[Tensor]
) -> tuple[int, float]:
    """Train the layer; returns the steps, and the seconds that they took."""
    optimizer, start = build_optimizer(layer, args.lr), time.time()
    for step in range(args.steps):
        done = max(step / args.steps, (time.time() - start) / 60 / args.minutes)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * max(0.0, min((step + 1) / WARMUP_STEPS, 1 - done))
        batch = data.training_batch(streams, args.length, args.batch, step, args.seed)
        nats, agreed = losses(model, layer, batch, 1 + (step % EVERY == EVERY - 1))
        sum(DEEPER**depth * loss for depth, loss in enumerate(nats)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % (4 * EVERY) == 0:
            told = ", ".join(
                f"{n.item():.3f} nats {a.item():.3f} agreed"
                for n, a in zip(nats, agreed, strict=True)
            )
            pace = (time.time() - start) / (step + 1)
            print(f"step {step + 1}/{args.steps}: {told}; {pace:.2f} s a step", flush=True)
        last = step + 1 == args.steps or done >= 1
        if (step + 1) % args.save_every == 0 or last:
            save_file(layer.tensors(), args.out, metadata={"format": "pt"})
        if last:
            break
    return step + 1, time.time() - start


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the shipped model's MTP layer.")
    parser.add_argument("--model", type=Path, default=REPO / "examples/demo-model")
    parser.add_argument("--out", type=Path, help="default: mtp.safetensors beside the model")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-demo")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=inf, help="end after so many")
    parser.add_argument("--batch", type=int, default=3, help="windows per step, of each domain one")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100, help="steps between files")
    parser.add_argument("--go-on", type=Path, help="begin with the weights of this file")
    parser.add_argument("--quick", action="store_true", help="a few tiny steps on held-out text")
    args = parser.parse_args()
    if args.quick:
        if args.out is None:
            parser.error("--quick needs --out FILE, or it would replace the shipped layer")
        args.work, args.steps, args.length = Path(tempfile.mkdtemp()), 3, 64
    args.out = args.out or args.model / "mtp.safetensors"
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    model.requires_grad_(False)
    heldout = REPO / "tests/data"
    if args.quick:
        paths = [heldout / f"heldout_{domain}.txt" for domain in data.DOMAINS]
        texts = [[path.read_text("utf-8")[:20_000]] for path in paths]
    else:
        texts = list(data.load_text(args.work / "deb", heldout)[0].values())
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    streams = [data.encode(tokenizer, own) for own in texts]
    sample = data.training_batch(streams, args.length, args.batch, 0, args.seed)
    layer = MtpLayer(model, residual_of(model, sample))
    if args.go_on is not None:
        layer.load(args.go_on)
    steps, seconds = train(args, model, layer, streams)
    print(f"{args.out}: {steps} steps in {seconds / 60:.0f} min")


if __name__ == "__main__":
    main()
