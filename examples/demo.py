"""The demo: three prompts from three domains, continued in one batch by the shipped model.

    python -m examples.demo

Loads ``examples/demo-model`` with the profile ``demo``, streams the three continuations side by
side, and shows speed and which experts each domain used most.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe import Completion, MoE
from moe.completion import collect

MODEL = Path(__file__).parent / "demo-model"
PROMPTS = {
    "prose": "The :mod:`json` module provides functions to",
    "python": 'def read(self, size=-1):\n    """',
    "cpp": "template <typename T>\nclass TORCH_API ",
}
TOP = 3


def main() -> None:
    console = Console()
    start = time.perf_counter()
    model = MoE.from_pretrained(MODEL, "demo", progress=console.is_terminal)
    console.print(f"loaded {MODEL.name} in {time.perf_counter() - start:.1f} s")
    completions, first, seconds = stream(model, console)
    console.print(figures(completions, first, seconds))
    console.print(favourites(model, completions))


def stream(model: MoE, console: Console) -> tuple[list[Completion], float, float]:
    """Continue all prompts; returns completions, seconds to the first token and in all."""
    start = time.perf_counter()
    events, first = [], 0.0
    texts = [Text(prompt, style="bold") for prompt in PROMPTS.values()]
    panels = Group(*(Panel(t, title=d) for t, d in zip(texts, PROMPTS, strict=True)))
    with Live(panels, console=console, refresh_per_second=10):
        for event in model.stream(list(PROMPTS.values())):
            first = first or time.perf_counter() - start
            events.append(event)
            texts[event.prompt].append(event.delta.text, style="green")
    console.print()
    return collect(events), first, time.perf_counter() - start


def figures(completions: list[Completion], first: float, seconds: float) -> Table:
    tokens = sum(len(completion.tokens) for completion in completions)
    table = Table("sequences", "new tokens", "first token", "tokens/s", title="one batch")
    table.add_row(
        str(len(completions)), str(tokens), f"{first * 1e3:.0f} ms", f"{tokens / seconds:.1f}"
    )
    return table


def favourites(model: MoE, completions: list[Completion]) -> Table:
    """The experts that got most of each domain's tokens, layer by layer."""
    table = Table("layer", *PROMPTS, title="experts used most (share of the domain's tokens)")
    columns = []
    for completion in completions:
        model.reset_stats()
        model.logits([*completion.prompt_token_ids, *completion.token_ids])
        columns.append([_favourites(layer) for layer in model.stats()["layers"]])
    for layer, row in enumerate(zip(*columns, strict=True)):
        table.add_row(str(layer), *row)
    return table


def _favourites(layer: dict[str, Any]) -> str:
    counts = layer["tokens_per_expert"]
    order = sorted(range(len(counts)), key=lambda expert: -counts[expert])[:TOP]
    return "  ".join(f"{expert} ({counts[expert] / layer['tokens']:.0%})" for expert in order)


if __name__ == "__main__":
    main()
