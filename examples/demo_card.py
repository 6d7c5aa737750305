"""Measured part of the demo model's card: held-out bits per byte and expert loads.

What: measures a trained model on the held-out text and writes the numbers as Markdown tables.
Why: a model card that a program fills in cannot disagree with the weights beside it.
How: called by ``examples/train_demo.py`` and ``train_diffusion.py`` after training.
"""

from __future__ import annotations

import math
import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from examples import demo_data as data

CARD = Path(__file__).parent / "demo-model/README.md"
MARKS = ("<!-- measured by the training script -->", "<!-- end of the measured part -->")


def expert_loads(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Count the tokens each expert gets, as [layer, expert]."""
    experts = router_logits[0].shape[-1]
    chosen = [logits.topk(top_k).indices.flatten() for logits in router_logits]
    return torch.stack([c.bincount(minlength=experts) for c in chosen])


@torch.no_grad()
def measure(
    model: Any, corpus: data.Corpus, length: int, device: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return held-out nats and expert loads [layer, expert] by domain.

    Windows do not overlap, and every token is predicted once: the first of a window from the
    token before it alone, the first of all from ``<|endoftext|>``.
    """
    nats, loads = dict.fromkeys(corpus.heldout, 0.0), {}
    for domain, tokens in corpus.heldout.items():
        stream = tokens.roll(1).long().to(device)  # its last token is <|endoftext|>
        counts = []
        for x, y in zip(stream[:-1].split(length), stream[1:].split(length), strict=True):
            out = model(input_ids=x[None], output_router_logits=True, use_cache=False)
            nats[domain] += F.cross_entropy(out.logits[0], y, reduction="sum").item()
            counts.append(expert_loads(out.router_logits, model.config.num_experts_per_tok))
        loads[domain] = torch.stack(counts).sum(0).cpu()
    return nats, loads


def run_rows(model: Any, top_k: int, num_experts: int, seconds: float) -> dict[str, str]:
    """Return what each training states: sizes, machine, software and time."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    used = total - experts + experts * top_k // num_experts
    return {
        "parameters": f"{total} ({used} used by a token)",
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "training time": f"{seconds / 60:.0f} min",
    }


def table(rows: list[list[Any]]) -> str:
    """Format rows, the first of them the header, as a Markdown table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def quality_table(corpus: data.Corpus, nats: dict[str, float], seen: float) -> str:
    """Tabulate text sizes, passes over the text (``seen`` tokens of each) and bits per byte."""
    header = ["domain", "training MB", "tokens", "passes"]
    rows: list[list[Any]] = [[*header, "held-out bytes", "lines copied", "bits per byte"]]
    sizes = {d: int(s["heldout_bytes"]) for d, s in corpus.stats.items()}
    for d, s in corpus.stats.items():
        bits = nats[d] / math.log(2) / sizes[d]
        tokens, copied = len(corpus.train[d]), f"{s['copied_lines']:.1%}"
        row: list[Any] = [d, f"{s['bytes'] / 1e6:.1f}", tokens, f"{seen / tokens:.2f}"]
        rows.append([*row, sizes[d], copied, f"{bits:.3f}"])
    bits = sum(nats.values()) / math.log(2) / sum(sizes.values())
    return table([*rows, ["**all**", "", "", "", sum(sizes.values()), "", f"**{bits:.3f}**"]])


def load_table(loads: dict[str, Tensor]) -> str:
    """Tabulate each layer's expert loads (1.00 = an even share) and each domain's specialist."""
    of_domain = torch.stack([n / n.sum(1, keepdim=True) for n in loads.values()])
    share = of_domain / of_domain.sum(0)  # [domain, layer, expert]
    counts = torch.stack(list(loads.values())).sum(0).float()
    header: list[Any] = ["layer", "least", "most", "below 0.1", *loads, "load of experts 0, 1, ..."]
    rows = [header]
    for layer, load in enumerate(counts / counts.mean(1, keepdim=True)):
        row: list[Any] = [layer, f"{load.min():.2f}", f"{load.max():.2f}", int((load < 0.1).sum())]
        row += [f"{int(s.argmax())} ({s.max():.0%})" for s in share[:, layer]]
        rows.append([*row, " ".join(f"{x:.2f}" for x in load)])
    return table(rows)


def cpu_name() -> str:
    """Return the processor's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.machine()


def write_card(path: Path, sections: dict[str, str], card: Path = CARD) -> None:
    """Copy a shipped model's card to ``path`` with its measured part replaced."""
    text = card.read_text("utf-8")
    head, tail = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    body = "\n".join(f"### {title}\n\n{rows}" for title, rows in sections.items())
    path.write_text(f"{head}{MARKS[0]}\n{body}{MARKS[1]}{tail}", "utf-8")
