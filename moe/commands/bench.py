"""``moe bench``: measure prefill, decode and the gain of speculative decoding, in a minute.

The text is source code of Python's library, so that routing and drafts are realistic. Drafts may be
accepted more or less often on other text.
"""

from __future__ import annotations

import argparse as some_text
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels.cpu.compiler import BuildError
from kernels.cpu.limits import read_speed
from kernels.cpu.stages import StageTimes, measured_stages
from moe.commands.console import stdout_console
from moe.engine.engine import Engine
from moe.errors import RequestError
from moe.hooks import methods_on
from moe.model import MoE
from moe.sampling.params import SamplingParams
from moe.settings.profile import LoadedProfile, load_profile

BATCHES = (1, 4)
ROUNDS = 3
BESIDE = 64
"""Tokens of the prompt of a sequence that is decoded."""


def run(
    name: str | Path,
    profile: LoadedProfile,
    *,
    prompt: int,
    tokens: int,
    stages: bool,
    as_json: bool,
) -> int:
    """Measure, and print tables or one JSON object. ``stages``: also where the time goes."""
    model = MoE.from_pretrained(name, _measured(profile))
    found = measure(model, prompt, tokens)
    if stages:
        found |= stages_of_runs(model, prompt, tokens)
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
    prompt, ids = _text(model, prompt, tokens)
    _decode(model, [ids[:BESIDE]], 4, drafts=False)  # warm-up
    rates = [_read(model, ids[at * 101 :][:prompt]).rate for at in range(ROUNDS)]
    speculates = model.status()["speculation"]["enabled"]
    return {
        "prompt": {"tokens": prompt, "tokens_per_second": median(rates)},
        "decode": [_decoding(model, ids, batch, tokens, speculates) for batch in _batches(model)],
        "speculation": {**model.status()["speculation"], "figures": model.stats()["speculation"]},
        "notices": list(model.notices),
    }


def stages_of_runs(model: MoE, prompt: int, tokens: int) -> dict[str, Any]:
    """Measure the stages of a prompt and of decode steps; ready for JSON.

    Raises:
        RequestError: as `measure`; compiled kernels are missing, so that there are no stages.
    """
    prompt, ids = _text(model, prompt, tokens)
    try:
        limit = read_speed()
        runs = {f"prompt of {prompt}": _read(model, ids[:prompt], stages=True)}
        for batch in _batches(model):
            prompts = [list(ids[200 * index :][:BESIDE]) for index in range(batch)]
            runs[f"decode {batch}"] = _decode(model, prompts, tokens, drafts=False, stages=True)
    except BuildError as error:
        raise RequestError(f"--stages needs compiled kernels: {error}") from error
    return {
        "bytes_per_second": limit,
        "stages": {name: _stages_of(run, limit) for name, run in runs.items()},
    }


def _stages_of(run: _Run, limit: float) -> dict[str, Any]:
    """A run by stage, each a step; what is in no stage is called ``between``."""
    named = {
        stage.name.lower(): {
            "ms": 1e3 * time.seconds / run.steps,
            "waiting_ms": 1e3 * time.waiting / run.steps,
            "runs": time.runs / run.steps,
            "bytes": time.bytes // run.steps,
            "share_of_limit": time.bytes / time.seconds / limit if time.seconds else 0.0,
        }
        for stage, time in run.stages.items()
    }
    total = 1e3 * run.seconds / run.steps
    between = {"ms": total - sum(each["ms"] for each in named.values())}
    read = sum(each["bytes"] for each in named.values())
    everything = {
        "ms": total,
        "waiting_ms": sum(each["waiting_ms"] for each in named.values()),
        "bytes": read,
        "share_of_limit": read * run.steps / run.seconds / limit,
    }
    return named | {"between": between, "all": everything}


def _batches(model: MoE) -> list[int]:
    most = model.profile.profile.engine.max_batch_size
    return [batch for batch in BATCHES if batch <= most]


def _text(model: MoE, prompt: int, tokens: int) -> tuple[int, list[int]]:
    """Return how many tokens of a prompt fit, and text that is long enough."""
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
    return prompt, ids * -(-(prompt + ROUNDS * 101) // len(ids))  # a long prompt repeats it


def _decoding(
    model: MoE, ids: Sequence[int], batch: int, tokens: int, speculates: bool
) -> dict[str, Any]:
    """Decode alternately without and with drafts; one run with drafts first is a warm-up."""
    prompts = [list(ids[200 * index :][:BESIDE]) for index in range(batch)]
    if speculates:
        _decode(model, prompts, tokens, drafts=True)
    plain, drafted = [], []
    for _ in range(ROUNDS):
        plain.append(_decode(model, prompts, tokens, drafts=False).rate)
        if speculates:
            drafted.append(_decode(model, prompts, tokens, drafts=True).rate)
    rate, with_drafts = median(plain), median(drafted) if drafted else None
    gain = None if with_drafts is None else with_drafts / rate
    figures = {"tokens_per_second": rate, "with_drafts": with_drafts, "gain": gain}
    return {"batch": batch, **figures}


@dataclass(frozen=True)
class _Run:
    """A measured prefill, or the decode steps of some sequences.

    Attributes:
        tokens: read, or decoded by all sequences together.
        steps: passes; 1 for a prompt.
        stages: where the seconds went; empty where that was not asked for.
    """

    tokens: int
    seconds: float
    steps: int = 1
    stages: StageTimes = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _read(model: MoE, prompt: Sequence[int], *, stages: bool = False) -> _Run:
    """Prefill a prompt."""
    with measured_stages() if stages else nullcontext(dict) as times:
        start = time.perf_counter()
        model.generate([list(prompt)], SamplingParams(max_new_tokens=1))
        return _Run(len(prompt), time.perf_counter() - start, stages=times())


def _decode(
    model: MoE, prompts: Sequence[list[int]], tokens: int, *, drafts: bool, stages: bool = False
) -> _Run:
    """The steps in which all sequences decode."""
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
    with measured_stages() if stages else nullcontext(dict) as times:
        start, count, steps = time.perf_counter(), 0, 0
        while len(engine.scheduler.running) == len(prompts):
            count += _step(engine)
            steps += 1
        run = _Run(count, time.perf_counter() - start, steps, times())
    while not engine.idle:
        _step(engine)
    return run


def _step(engine: Engine) -> int:
    """Run a step; returns its number of new tokens. Raises the error of a failed sequence."""
    events = engine.step()
    for _, event in events:
        if isinstance(event, Exception):
            raise event
    return len(events)


def _measured(profile: LoadedProfile) -> LoadedProfile:
    """The profile of a measurement: it reads repeated prompts again, and drafts by mode ``auto``
    unless the user sets the mode."""
    settings: dict[str, Any] = {"memory.prefix_tokens": 0}
    if profile.origins["speculation.mode"] == "default" and not any(
        "speculation.mode" in one.needs for one in methods_on(profile.profile)
    ):
        settings["speculation.mode"] = "auto"
    return load_profile(profile, settings, overrides_origin="moe bench")


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
    for name, stages in found.get("stages", {}).items():
        _show_stages(name, stages, found["bytes_per_second"], console)
    console.print(found["speculation"]["why"])
    if found["speculation"]["figures"] is not None:
        _show_drafts(found["speculation"]["figures"], console)


def _show_stages(
    name: str, stages: dict[str, dict[str, float]], limit: float, console: Console
) -> None:
    """A row a stage, the longest first; then what is in none, and the sum."""
    title = f"{name}: a step, by stage; memory reads {limit / 1e9:.1f} GB/s"
    table = Table("", "ms", "waiting", "MB", "GB/s", "of limit", title=title, title_justify="left")
    last = ("between", "all")
    for stage in [*sorted(stages.keys() - last, key=lambda each: -stages[each]["ms"]), *last]:
        row = stages[stage]
        cells = [f"{row['ms']:.3f}"]
        if "bytes" in row:
            share, read = row["share_of_limit"], row["bytes"] / 1e6
            cells.append(f"{row['waiting_ms']:.3f}")
            if read:
                cells += [f"{read:.1f}", f"{share * limit / 1e9:.1f}", f"{share:.0%}"]
        table.add_row(stage.replace("_", " "), *cells)
    console.print(table)


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
