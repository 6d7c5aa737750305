"""``moe bench``: measure prefill, decode and the gain of speculative decoding, in a minute.

The text is source code of Python's library, so that routing and drafts are realistic. Drafts may be
accepted more or less often on other text.
"""

from __future__ import annotations

import argparse as some_text
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from moe.commands.console import stdout_console
from moe.engine.engine import Engine
from moe.errors import RequestError
from moe.model import MoE
from moe.sampling.params import SamplingParams
from moe.settings.profile import LoadedProfile, load_profile

BATCHES = (1, 4)
ROUNDS = 3
BESIDE = 64
"""Tokens of the prompt of a sequence that is decoded."""


def run(
    name: str | Path, profile: LoadedProfile, *, prompt: int, tokens: int, as_json: bool
) -> int:
    """Measure, and print a table or one JSON object."""
    model = MoE.from_pretrained(name, _with_drafts(profile))
    found = measure(model, prompt, tokens)
    if as_json:
        print(json.dumps(found))
        return 0
    _show(found)
    return 0


def measure(model: MoE, prompt: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of prefill and of decoding, as medians; ready for JSON.

    Args:
        prompt: tokens of the prompt to read; fewer if the context is shorter.
        tokens: tokens to decode for each sequence.

    Raises:
        RequestError: the context or the KV cache is too small for this many tokens.
    """
    if prompt < 1 or tokens < 2:
        raise RequestError(
            f"--prompt-tokens is {prompt} and --new-tokens {tokens}; at least 1 must be read, and "
            "2 decoded, as the first comes with the prompt"
        )
    limit = model.context_length or max(prompt, BESIDE) + tokens
    if BESIDE + tokens > limit:
        raise RequestError(
            f"--new-tokens is {tokens}, behind a prompt of {BESIDE}, and the context is {limit} "
            "tokens; lower it"
        )
    prompt = min(prompt, limit - tokens)
    ids = model.codec.encode(Path(some_text.__file__).read_text())
    ids *= -(-(prompt + ROUNDS * 101) // len(ids))  # a long prompt repeats it
    _decode(model, [ids[:BESIDE]], 4, drafts=False)  # warm-up
    rates = [_read(model, ids[at * 101 :][:prompt]) for at in range(ROUNDS)]
    speculates = model.status()["speculation"]["enabled"]
    most = model.profile.profile.engine.max_batch_size
    batches = [batch for batch in BATCHES if batch <= most]
    return {
        "prompt": {"tokens": prompt, "tokens_per_second": median(rates)},
        "decode": [_decoding(model, ids, batch, tokens, speculates) for batch in batches],
        "speculation": {**model.status()["speculation"], "figures": model.stats()["speculation"]},
        "notices": list(model.notices),
    }


def _decoding(
    model: MoE, ids: Sequence[int], batch: int, tokens: int, speculates: bool
) -> dict[str, Any]:
    """Decode alternately without and with drafts; one run with drafts first is a warm-up."""
    prompts = [list(ids[200 * index :][:BESIDE]) for index in range(batch)]
    if speculates:
        _decode(model, prompts, tokens, drafts=True)
    plain, drafted = [], []
    for _ in range(ROUNDS):
        plain.append(_decode(model, prompts, tokens, drafts=False))
        if speculates:
            drafted.append(_decode(model, prompts, tokens, drafts=True))
    rate, with_drafts = median(plain), median(drafted) if drafted else None
    gain = None if with_drafts is None else with_drafts / rate
    figures = {"tokens_per_second": rate, "with_drafts": with_drafts, "gain": gain}
    return {"batch": batch, **figures}


def _read(model: MoE, prompt: Sequence[int]) -> float:
    """Tokens per second of prefill."""
    start = time.perf_counter()
    model.generate([list(prompt)], SamplingParams(max_new_tokens=1))
    return len(prompt) / (time.perf_counter() - start)


def _decode(model: MoE, prompts: Sequence[list[int]], tokens: int, *, drafts: bool) -> float:
    """Tokens per second of all sequences together, while all of them decode."""
    engine = model.engine(drafts=drafts)
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.submit(model.request(prompt, params))
    while len(engine.scheduler.running) < len(prompts):
        _step(engine)
        if engine.idle:
            raise RequestError(
                f"{len(prompts)} sequences of {BESIDE} + {tokens} tokens never run at once with "
                f"memory.kv_tokens = {engine.kv_tokens:g}; raise it, or lower --new-tokens"
            )
    start, count = time.perf_counter(), 0
    while len(engine.scheduler.running) == len(prompts):
        count += _step(engine)
    seconds = time.perf_counter() - start
    while not engine.idle:
        _step(engine)
    return count / seconds


def _step(engine: Engine) -> int:
    """Run a step; returns its number of new tokens. Raises the error of a failed sequence."""
    events = engine.step()
    for _, event in events:
        if isinstance(event, Exception):
            raise event
    return len(events)


def _with_drafts(profile: LoadedProfile) -> LoadedProfile:
    """The same profile, with ``speculation.mode: auto`` unless it sets the mode itself."""
    if profile.origins["speculation.mode"] != "default" or profile.profile.speculation.contrast:
        return profile
    return load_profile(profile, {"speculation.mode": "auto"}, overrides_origin="moe bench")


def _show(found: dict[str, Any]) -> None:
    console = stdout_console()
    for notice in found["notices"]:
        console.print(f"moe: {notice}", style="dim")
    prompt = found["prompt"]
    table = Table("", "tokens/s", "with drafts", "gain")
    table.add_row(f"prompt of {prompt['tokens']}", f"{prompt['tokens_per_second']:,.1f}", "", "")
    for row in found["decode"]:
        drafted = "-" if row["gain"] is None else f"{row['with_drafts']:,.1f}"
        gain = "-" if row["gain"] is None else f"{row['gain']:.2f} x"
        table.add_row(f"decode {row['batch']}", f"{row['tokens_per_second']:,.1f}", drafted, gain)
    console.print(table)
    console.print(found["speculation"]["why"])
    if found["speculation"]["figures"] is not None:
        _show_drafts(found["speculation"]["figures"], console)


def _show_drafts(figures: dict[str, Any], console: Console) -> None:
    """Depth, acceptance and gain of drafts over all batches."""
    depths = ", ".join(f"{depth}: {count}" for depth, count in figures["depths"].items())
    rate = figures["tokens_per_verification"]
    console.print(f"{rate:.2f} tokens a verification; steps by drafted tokens {depths}")
    for mode, record in figures["modes"].items():
        rates = " ".join(f"{p['acceptance']:.2f}" for p in record["by_position"])
        console.print(f"{mode}: {record['drafts']} drafts, accepted by position {rates}")
    if (control := figures["control"]) is not None:
        predicted = control["predicted_gain"]
        forecast = "" if predicted is None else f", {predicted:.2f} x predicted"
        console.print(f"gain by its own account: {control['measured_gain']:.2f} x{forecast}")
