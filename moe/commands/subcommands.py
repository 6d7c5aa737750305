"""Subcommands of ``moe`` that run by themselves, on one rank: each returns the exit code.

Heavy modules are imported by the one that needs them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.errors import ProfileError


@contextmanager
def importing() -> Iterator[None]:
    """Seconds of imports, in which Ctrl-C ends the process by the signal itself.

    As an exception it could get lost in the import of an extension module, or come out as an
    ``ImportError``.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = ours and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def load_settings(options: argparse.Namespace) -> Any:
    """The profile that a command line asks for; sampling options are settings like any other,
    and so are allowed origins."""
    from moe.profile import load_profile
    from moe.profile_sources import parse_assignments
    from moe.settings import GenerationSettings

    overrides = parse_assignments(options.settings)
    for name in GenerationSettings.model_fields:
        if getattr(options, name, None) is not None:
            overrides[f"generation.{name}"] = getattr(options, name)
    if getattr(options, "allowed_origins", None) is not None:
        overrides["server.allowed_origins"] = options.allowed_origins
    return load_profile(options.profile, overrides)


def convert(options: argparse.Namespace) -> int:
    with importing():
        from moe.convert.allotment import Budget
        from moe.convert.convert import convert as run
        from moe.settings import ModelSettings

    settings = ModelSettings(
        expert_bits=options.bits,
        trunk_bits=options.trunk_bits,
        head_bits=options.head_bits,
        group_size=options.group_size,
    )
    budget = None
    if options.target_bits is not None or options.target_gib is not None:
        budget = Budget(options.target_bits, options.target_gib)
    folder = None if options.calibration is None else Path(options.calibration)
    out = run(
        options.model,
        options.out,
        settings,
        calibration=folder,
        budget=budget,
        repair=options.repair_routers,
        progress=sys.stderr.isatty(),
        on_notice=lambda notice: print(f"moe: {notice}", file=sys.stderr),
    )
    print(out)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    with importing():
        from moe.evaluate.command import run

    return run(
        options.model,
        profile,
        Path(options.text),
        tokens=options.tokens,
        against=options.against,
        as_json=options.json,
    )


def trace(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    with importing():
        from moe.tracing.command import run

    return run(
        options.model,
        profile,
        Path(options.text),
        tokens=options.tokens,
        out=None if options.out is None else Path(options.out),
        as_json=options.json,
    )


def inspect_store(options: argparse.Namespace) -> int:
    with importing():
        from moe.convert.inspect_store import run

    return run(Path(options.store), None if options.image is None else Path(options.image))


def calibrate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    with importing():
        from moe.calibrate.calibrate import calibrate as run

    out = None if options.out is None else Path(options.out)
    text = Path(options.text)
    return run(options.model, profile, text, options.tokens, out, compression=options.compression)


def plan(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if options.ranks is not None:
        with importing():
            from moe.plan.rank_command import run as run_ranks

        return run_ranks(
            options.model,
            profile,
            ranks=options.ranks,
            nodes=options.nodes,
            link=options.link,
            network=options.network,
            as_json=options.json,
        )
    if options.nodes != 1 or options.link is not None or options.network is not None:
        raise ProfileError("--nodes, --link and --network are about several ranks; add --ranks N")
    with importing():
        from moe.plan.command import run

    return run(options.model, profile, as_json=options.json)


def bench(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    with importing():
        from moe.commands.bench import run

    sizes = {"prompt": options.prompt_tokens, "tokens": options.new_tokens}
    return run(options.model, profile, **sizes, as_json=options.json)


def doctor(_: argparse.Namespace) -> int:
    with importing():
        from moe.commands.doctor import main as doctor

    return doctor()
