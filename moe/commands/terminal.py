"""Generation in a terminal: text to stdout, notices and summaries to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe.commands.printable import printable
from moe.completion import Completion, collect
from moe.model import MoE
from moe.settings.profile import LoadedProfile
from moe.text.tokenizer import Prompt


@dataclass(frozen=True)
class RunStats:
    """Figures of one generation.

    Attributes:
        ttft_s: seconds from the request to the first token.
        tokens_per_second: new tokens after the first over the seconds they took; 0 for one token.
        expert_bytes_read: bytes of the distinct experts of every step.
        hit_ratio: share of those experts that were in memory; None if nothing is offloaded.
        disk_bytes_read: bytes read from disk, prefetched experts included.
        speculation: statistics of drafts since the model was loaded; None without speculation.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    tokens_per_second: float
    expert_bytes_read: int
    hit_ratio: float | None
    disk_bytes_read: int
    speculation: dict[str, Any] | None = None

    def summary(self) -> str:
        tokens = max(self.new_tokens, 1)
        per_token = self.expert_bytes_read / tokens / 1e6
        disk = drafts = ""
        if self.hit_ratio is not None:
            megabytes = self.disk_bytes_read / tokens / 1e6
            disk = f", {self.hit_ratio:.1%} of them in memory, {megabytes:.2f} MB from disk"
        if self.speculation is not None:
            drafts = f", {self.speculation['tokens_per_verification']:.2f} tokens a verification"
        return (
            f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens, "
            f"first after {self.ttft_s:.2f} s, {self.tokens_per_second:.1f} tokens/s, "
            f"{per_token:.2f} MB of experts read a token{disk}{drafts}"
        )


def run(
    model: MoE,
    prompt: Prompt,
    write: Callable[[str], object],
    asked: Mapping[str, Any] | None = None,
    shown: Collection[int] = (),
) -> tuple[Completion, RunStats]:
    """Continue one prompt, pass new text to ``write``, and measure it.

    Args:
        asked: fields of `SamplingParams` that differ from the defaults.
        shown: special tokens that are part of the text.
    """
    params = None
    if asked:
        params = model.params(len(model.codec.encode(prompt)), chat=False, **asked)
    before = model.stats()
    start = time.perf_counter()
    events, times = [], []
    for event in model.stream(prompt, params, shown):
        times.append(time.perf_counter())
        events.append(event)
        write(event.delta.text)
    completion = collect(events)[0]
    after = model.stats()
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return completion, RunStats(
        prompt_tokens=len(completion.prompt_token_ids),
        new_tokens=len(completion.tokens),
        ttft_s=times[0] - start,
        tokens_per_second=rate,
        expert_bytes_read=after["expert_bytes_read"] - before["expert_bytes_read"],
        hit_ratio=_hit_ratio(before["offload"], after["offload"]),
        disk_bytes_read=_disk_bytes(after["offload"]) - _disk_bytes(before["offload"]),
        speculation=after["speculation"],
    )


def _hit_ratio(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> float | None:
    if before is None or after is None:
        return None
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else 1.0


def _disk_bytes(offload: Mapping[str, Any] | None) -> int:
    return 0 if offload is None else int(offload["bytes_read"])


def generate(
    name: str | Path,
    profile: LoadedProfile,
    prompt: str,
    asked: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    """``moe generate``: stream a continuation, or print one JSON object."""
    model = load(name, profile)
    if as_json:
        print(json.dumps(_as_json(*run(model, prompt, lambda _: None, asked))))
        return 0
    _, stats = run(model, prompt, write_out, asked)
    write_out("\n")
    print(stats.summary(), file=sys.stderr)
    return 0


def write_out(text: str, *, dimmed: bool = False) -> None:
    """Write a model's text: to a terminal `printable`, to a file or pipe as it is.

    Args:
        dimmed: on a terminal, in a weaker colour.
    """
    if sys.stdout.isatty():
        text = printable(text)
        text = f"\x1b[2m{text}\x1b[0m" if dimmed else text
    print(text, end="", flush=True)


def load(name: str | Path, profile: LoadedProfile) -> MoE:
    model = MoE.from_pretrained(name, profile, progress=sys.stderr.isatty())
    for notice in model.notices:
        print(f"moe: {printable(notice)}", file=sys.stderr)
    return model


def _as_json(completion: Completion, stats: RunStats) -> dict[str, Any]:
    figures = asdict(stats)
    del figures["prompt_tokens"]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": completion.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "stats": figures,
    }
