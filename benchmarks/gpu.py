"""Does it run on a GPU, and how fast? Three parts of a few minutes each.

    python -m benchmarks.gpu [--part 1] [--out DIR] [--minutes 5]    # or: make gpu
    python -m benchmarks.gpu --part 1 --stand-in                     # tiny, on a CPU: any typos?

Part 1: the machine, tests marked `gpu`, logical ranks on one device, a layer of experts. Part 2: a
random model of Qwen3-30B-A3B's shape at 16, 8 and 4 bits, and transformers'. Part 3: experts in
host memory, drafts, the sampler, a long context. Each step (`benchmarks.gpu_steps`) runs in a
process of its own with a limit of time, so one that fails or hangs costs no other. Results are
saved after each step, and steps that are done are not run again: the same command resumes a run
that was cut off. The results are `DATE-gpu.json` and a page, `DATE-gpu.md`.

Part 1 mostly compiles, which pytest-xdist spreads over the cores. The models of parts 2 and 3 are
written once, half a minute each: run both with the same `--stores`. If there are fifteen minutes in
all, run parts 2 and 3, then part 1.

Without `--part` all three run, whatever becomes of each. The exit code is 1 if a step has failed,
else 4 if steps are left that the minutes did not allow: run the same command again. The first line
says what the machine lacks; then the code is 3, and nothing has run. What to bring along is listed
in `benchmarks/gpu_wheels.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from packaging.requirements import Requirement

from benchmarks.common import environment, print_json

ROOT = Path(__file__).parents[1]
WHEELS = Path(__file__).with_name("gpu_wheels.txt")
OUT = ROOT / "docs" / "results"
LACKING, FAILED, LEFT = 3, 1, 4
TAIL = 2000
"""Characters of a failed step's output that are kept."""

STEPS: dict[int, dict[str, float]] = {
    1: {
        "machine": 30, "kernel_tests": 120, "decode_tests": 60, "offload_tests": 45,
        "ranks": 45, "experts": 60, "tiles": 90,
    },
    2: {"model_4": 100, "model_16": 90, "ahead": 50, "transformers": 40, "model_8": 80},
    3: {"offload": 150, "drafts": 90, "sampler": 60, "long_context": 60},
}  # fmt: skip
"""Of each part, the steps in their order, and the seconds that each may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=STEPS, help="one of the three; all")
    parser.add_argument("--step", help="one step in this process; its results are the last line")
    parser.add_argument("--out", type=Path, default=OUT, help="where results are and go")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no step of a part beyond")
    parser.add_argument(
        "--stores", type=Path, help="where models are written, and stay for the next run"
    )
    parser.add_argument("--stand-in", action="store_true", help="tiny shapes on a CPU")
    given = parser.parse_args()
    lacking = missing(WHEELS.read_text().splitlines(), stand_in=given.stand_in)
    print(f"missing: {', '.join(lacking)}" if lacking else "missing: nothing", flush=True)
    if lacking:
        print_json({"missing": lacking})
        return LACKING
    if given.step is not None:
        from benchmarks.gpu_steps import run_step

        with _stores(given.stores) as stores:
            print_json(run_step(given.step, stores, stand_in=given.stand_in))
        return 0
    codes, seconds = list[int](), 60 * given.minutes
    for part in STEPS if given.part is None else [given.part]:
        with _stores(given.stores) as stores:
            codes.append(run_part(part, given.out, seconds, stores, stand_in=given.stand_in))
    return FAILED if FAILED in codes else max(codes)


@contextmanager
def _stores(folder: Path | None) -> Iterator[Path]:
    """The folder of models; a temporary one, in main memory where the system has that, if none is
    given."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as own:
        yield Path(own)


def missing(requirements: Sequence[str], *, stand_in: bool) -> list[str]:
    """Return what the machine lacks: packages in the versions of the list, and a CUDA device."""
    lacking = []
    for line in requirements:
        if not (text := line.partition("#")[0].strip()):
            continue
        wanted = Requirement(text)
        try:
            if version(wanted.name) not in wanted.specifier:
                lacking.append(f"{text} (there is {version(wanted.name)})")
        except PackageNotFoundError:
            lacking.append(text)
    if not stand_in and not torch.cuda.is_available():
        lacking.append("a CUDA device that torch finds")
    return lacking


def run_part(part: int, out: Path, seconds: float, stores: Path, *, stand_in: bool) -> int:
    """Run the steps of a part that are not done yet; returns the exit code."""
    began, results, file = time.monotonic(), *_open(out, stand_in=stand_in)
    for name, limit in STEPS[part].items():
        if "error" not in results["steps"].get(name, {"error": ""}):
            print(f"{name}: done before")
            continue
        left = seconds - (time.monotonic() - began)
        if left < limit / 2:
            print(f"{name}: left for another run, as {left:.0f} s are left of it")
            continue
        found = _in_a_process(name, stores, min(limit, left), stand_in=stand_in)
        results["steps"][name] = found
        print(f"{name}: {found.get('error', 'ok').splitlines()[0]} ({found['seconds']:.0f} s)")
        file.write_text(json.dumps(results, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(results))
    print_json(results)
    own = [results["steps"].get(name) for name in STEPS[part]]
    if any(step is not None and "error" in step for step in own):
        return FAILED
    return LEFT if None in own else 0


def _open(out: Path, *, stand_in: bool) -> tuple[dict[str, Any], Path]:
    """The results to be continued, those of this commit and device; else new ones."""
    device = "stand-in" if stand_in else torch.cuda.get_device_name()
    header = environment() | {"device": device}
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(out.glob("*-gpu.json"), reverse=True):
        known = json.loads(file.read_text())
        same = ("commit", "device")
        if all(known["environment"][key] == header[key] for key in same):
            return known, file
    return {"environment": header, "steps": {}}, out / f"{header['date']}-gpu.json"


def _in_a_process(name: str, stores: Path, limit: float, *, stand_in: bool) -> dict[str, Any]:
    """A step's results, or why there are none under "error"; and its seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--stores", str(stores)]
    command += ["--stand-in"] if stand_in else []
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with its own children, which hold the device
            said = f"longer than {limit:.0f} s\n{process.communicate()[0][-TAIL:]}"
    found: dict[str, Any] = {}
    try:
        if process.returncode == 0:
            found = json.loads(said.splitlines()[-1])
        else:
            found = {"error": _last_line(said), "output": said[-TAIL:]}
    except (ValueError, IndexError):
        found = {"error": "no results in the last line", "output": said[-TAIL:]}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _last_line(said: str) -> str:
    if said.startswith("longer than"):
        return said.splitlines()[0]
    return next((line for line in reversed(said.splitlines()) if line.strip()), "no output")


def page(results: Mapping[str, Any]) -> str:
    """The results for people."""
    header = results["environment"]
    lines = [
        f"# On a GPU: {header['device']}, {header['date']}",
        "",
        f"`python -m benchmarks.gpu --part 1`, `2` and `3` at commit {header['commit']}, "
        f"torch {header['torch']}, CPU {header['cpu']} with {header['cores']} cores. "
        "Steps that failed are listed with their error.",
    ]
    for part, names in STEPS.items():
        lines += ["", f"## Part {part}", ""]
        for name in names:
            found = results["steps"].get(name)
            if found is None:
                lines.append(f"- **{name}**: not run")
            elif "error" in found:
                lines.append(f"- **{name}**: failed after {found['seconds']} s: {found['error']}")
            else:
                lines.append(f"- **{name}** ({found['seconds']} s)")
                lines += _rows(found)
    return "\n".join(lines) + "\n"


def _rows(found: Mapping[str, Any]) -> list[str]:
    return [
        f"  - {key}: {_short(value)}" for key, value in found.items() if key not in ("seconds",)
    ]


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_short(inner) for inner in value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
