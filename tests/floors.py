"""The floors of the house: which folder may import which, and the diagram in docs/architecture.md.

Imports go down only. `ROOMS` orders the top folders, `FLOORS` what is inside `moe/`, each from top
to bottom: a room may import the rooms below it. tests/test_house.py holds both to the code.

    python -m tests.floors            prints the diagram, and files and lines of each room
    python -m tests.floors --write    puts it into docs/architecture.md
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"

ROOMS = {
    "moe": "what users touch, and the step loop that runs it",
    "offload": "the expert cache: slots, reads, eviction, prefetch, tiers",
    "experts": "bit planes, the store on disk, placement on ranks, all-to-all",
    "routing": "routing decisions as values, lossy policies, predictors",
    "kernels": "expert arithmetic: C++, Triton, the reference in torch",
    "configs": "serving profiles, one YAML file each",
}
# Rooms that stand beside each other: neither imports the other.
_BESIDE = {"routing": {"kernels", "configs"}, "kernels": {"configs"}}
_ONLY_MOE = {"configs"}

FLOORS = {
    "methods": "published ways that are off by default, one folder each; nothing imports them",
    "cli": "the `moe` command",
    "commands": "its subcommands: bench, calibrate, convert, eval, plan, trace, ...",
    "server": "HTTP: three API dialects as translations of one request",
    "model": "`MoE`: load, generate, stream, logits, stats",
    "expert_map": "which experts are where, and how many tokens went to each",
    "requests": "prompts and parameters -> sequences",
    "parallel": "ranks: launch, membership, coordinator, workers, watchdog",
    "loader": "name and profile -> loaded model",
    "notices": "what fell back while loading, in words",
    "loaded": "what loading leaves: `LoadedModel`, its counters and status",
    "completion": "what a caller gets back",
    "engine": "the step loop: scheduler, prefill batches",
    "speculate": "drafts, their verification, the goodput controller",
    "sequence": "one sequence that is being generated",
    "memory": "the plan: what fits where, before loading",
    "images": "images in prompts: decoding, vision towers, rows for the text model",
    "calibration": "what `moe calibrate` left beside a model",
    "decode": "fused decode steps: compiled, or CUDA graphs",
    "describe": "what a model is, found by probing",
    "loading": "checkpoints, stores, GGUF -> weights in place",
    "text": "tokenizer, chat templates, tool calls",
    "network": "the seam, lanes, attention, MoE layers",
    "kv": "keys and values of sequences: the pool, rows that a token sees, prefixes",
    "sampling": "the next token",
    "cache_dir": "proofs, trials and names of earlier processes of this user",
    "settings": "profiles",
    "hooks": "where the core calls methods, without the name of any",
    "section": "the base of every section of a profile",
    "model_lock": "one step at a time",
    "helpers": "processes for what strangers have made, or what may cost too much",
    "helper_process": "the program of such a process: limits and confines itself",
    "fair_pool": "threads that callers share fairly",
    "machine": "facts about this machine",
    "deferred": "modules of other packages that are imported when they are used",
    "extras": "optional packages, and how to install them",
    "errors": "errors a user can cause",
}


def room_of(module: str) -> str:
    """``moe.engine.scheduler`` -> ``engine``; other packages are one room each."""
    parts = module.split(".")
    return parts[1] if parts[0] == "moe" and len(parts) > 1 else parts[0]


def allowed(room: str) -> set[str]:
    """Rooms that a module of this room may import, its own included.

    Args:
        room: a top folder other than ``moe``, or a room inside ``moe``.
    """
    if room in FLOORS:
        inside = list(FLOORS)
        return {*inside[inside.index(room) :], *ROOMS} - {"moe"}
    order = list(ROOMS)
    return {*order[order.index(room) :]} - _BESIDE.get(room, set()) - (_ONLY_MOE - {room})


def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    files = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    return {_name(file): file for file in files}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str, known: dict[str, Path]) -> Iterator[str]:
    """Our modules that a module imports anywhere: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(known[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full, node.module) if name in known)


def upward() -> list[str]:
    """Imports that go up or across: none may."""
    known = modules()
    return [
        f"{module} imports {target}"
        for module in known
        if module not in ("moe", "moe.__main__")  # the face of the package: lazy names only
        for target in imports(module, known)
        if target not in ("moe", module) and room_of(target) not in allowed(room_of(module))
    ]


def diagram() -> str:
    """Rooms from top to bottom, each with what it holds."""
    rows = []
    for room, what in ROOMS.items():
        rows.append(f"{room + '/':<16}{what}")
        if room == "moe":
            rows += [f"    {name:<12}{text}" for name, text in FLOORS.items()]
    return "\n".join(rows)


def sizes() -> str:
    """Files and lines of each room."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module, file in modules().items():
        for place in {room_of(module), module.split(".")[0]}:
            lines[place] += len(file.read_text().splitlines())
            files[place] += 1
    return "\n".join(f"{place:<14}{files[place]:4}{lines[place]:7}" for place in sorted(files))


_BEGIN, _END = "<!-- python -m tests.floors --write -->\n```text\n", "\n```\n"


def in_page(page: str) -> str:
    """The page with the diagram of today's code."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin, "docs/architecture.md has no place for the diagram"
    assert end, "docs/architecture.md has no place for the diagram"
    return head + begin + diagram() + end + tail


if __name__ == "__main__":
    if "--write" in sys.argv:
        ARCHITECTURE.write_text(in_page(ARCHITECTURE.read_text()))
    else:
        print(diagram(), sizes(), sep="\n\n")
