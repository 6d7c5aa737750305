"""Ranks of one model as processes, which decode a batch and say how fast and what they sent.

`measure` launches them; this file as a module is what each of them runs:
``python -m benchmarks.rank_launch MODEL OUT JSON``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from moe import MoE, SamplingParams

ROOT = Path(__file__).parents[1]
PROFILE = "expert-parallel"
PATIENCE_S = 900


class LaunchError(RuntimeError):
    """A rank ended with an error; its output says why."""


def measure(
    model: Path, ranks: int, settings: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `decode` returns on rank 0 of a launch with these settings.

    Raises:
        LaunchError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        argv = [sys.executable, "-m", "benchmarks.rank_launch", str(model), str(out)]
        argv.append(json.dumps({"settings": dict(settings), **job}))
        common = {**os.environ, "PYTHONPATH": str(ROOT)}
        if ranks > 1:
            common |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                "WORLD_SIZE": str(ranks),
                "LOCAL_SIZE": str(ranks),
            }
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            log = (Path(folder) / f"log{rank}").open("w")
            processes.append(
                subprocess.Popen(argv, env=common | own, cwd=folder, stdout=log, stderr=log)
            )
        deadline = time.monotonic() + PATIENCE_S
        try:
            codes = [process.wait(deadline - time.monotonic()) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            logs = [(Path(folder) / f"log{rank}").read_text()[-2000:] for rank in range(ranks)]
            raise LaunchError(f"ranks ended with {codes}:\n" + "\n".join(logs))
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def decode(model: MoE, batch: int, prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of decode steps, by their median time, and what was sent in all steps."""
    draw = random.Random(0)
    vocabulary = len(model.codec.tokenizer) if model.codec.tokenizer else 1000

    def prompts() -> list[list[int]]:
        return [[draw.randrange(1, vocabulary) for _ in range(prompt)] for _ in range(batch)]

    answers = _answers(model, prompts())
    _step_times(model, prompts(), min(steps, 4))  # warms up
    times = [time for _ in range(rounds) for time in _step_times(model, prompts(), steps)]
    stats = model.stats()
    return {
        "tokens_per_s": batch / median(times),
        "answers": answers,
        "ranks": (stats["parallel"] or {}).get("ranks", []),
        "offload": stats["offload"],
    }


def _answers(model: MoE, prompts: list[list[int]]) -> list[tuple[int, float | None]]:
    """The likeliest next token of each prompt, and its log probability."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=0, ignore_eos=True)
    tokens = [completion.tokens[0] for completion in model.generate(prompts, params)]
    return [(token.id, token.logprob) for token in tokens]


def _step_times(model: MoE, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds between tokens of the first sequence, from when all have begun."""
    params = SamplingParams(temperature=0.0, max_new_tokens=steps + 1, ignore_eos=True)
    begun: set[int] = set()
    came: list[float] = []
    for event in model.stream(prompts, params):
        begun.add(event.prompt)
        if event.prompt == 0 and (came or len(begun) == len(prompts)):
            came.append(time.perf_counter())
    return [after - before for before, after in pairwise(came)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main() -> None:
    path, out, text = sys.argv[1:]
    job = json.loads(text)
    model = MoE.from_pretrained(path, PROFILE, **job.pop("settings"))
    if model.rank:
        model.serve_rank()
    else:
        Path(out).write_text(json.dumps(decode(model, **job)))
    model.close()


if __name__ == "__main__":
    main()
