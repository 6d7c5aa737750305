"""Subcommands of ``moe`` that run a model, on one rank or as one of several: each returns the exit
code.

Heavy modules are imported by the one that needs them.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from moe.commands.subcommands import importing, load_settings
from moe.errors import ProfileError, RequestError


def generate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if options.print_config:
        from moe.profile import print_config

        print(print_config(profile))
        return 0
    if options.model is None:
        raise ProfileError("no model was given; write moe generate MODEL --prompt TEXT")
    if _follows(options.model, profile):
        return 0
    if options.batch is not None or options.out is not None:
        return _batch(options, profile)
    prompt = _prompt_of(options.prompt)
    asked = {"stop": options.stop} if options.stop else {}
    if options.json_schema is not None:
        from moe.sampling.structure import Structure

        asked["structure"] = Structure.json_schema(_text_of(options.json_schema, "schema"))
    with importing():
        from moe.commands import terminal

    return terminal.generate(options.model, profile, prompt, asked, as_json=options.json)


def chat(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _follows(options.model, profile):
        return 0
    system = None if options.system is None else _text_of(options.system, "system")
    with importing():
        from moe.commands.chat import chat as run

    return run(options.model, profile, system)


def serve(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _follows(options.model, profile):
        return 0
    with importing():
        from moe.server.serve import serve as run

    listens = (options.host, options.port, options.api_key)
    return run(options.model, profile, *listens, options.served_model_name)


def _batch(options: argparse.Namespace, profile: Any) -> int:
    if options.batch is None or options.out is None:
        raise RequestError("--batch and --out belong together: give both files")
    if options.prompt is not None or options.json or options.json_schema or options.stop:
        raise RequestError(
            "--batch takes its prompts and what is asked of them from the file; leave out "
            "--prompt, --json, --json-schema and --stop"
        )
    with importing():
        from moe.commands.terminal import batch

    return batch(options.model, profile, Path(options.batch), Path(options.out))


def _follows(model: str, profile: Any) -> bool:
    """Whether this process is not the first rank of a launch; its part is done then."""
    from moe.parallel.launch import end_with_parent, wanted_launch
    from moe.parallel.shelter import sheltered

    launch = wanted_launch(profile.profile)
    if launch is None:
        return False
    end_with_parent()
    if launch.rank == 0:  # launchers make SIGTERM of the SIGINT that a terminal sends to everybody
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return False
    if profile.profile.parallel.on_rank_loss == "continue":
        sheltered(launch)
    from moe.parallel.follow import follow

    follow(model, profile)
    return True


def _prompt_of(argument: str | None) -> str:
    """The text that ``--prompt`` names."""
    if argument is None:
        raise RequestError("no prompt was given; write --prompt TEXT, --prompt - or --prompt @FILE")
    if argument == "-":
        return sys.stdin.read()
    return _text_of(argument, "prompt")


def _text_of(argument: str, what: str) -> str:
    """An argument that is a text, or @ and the name of a file that has it."""
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_bytes().decode()  # "\r\n" is two characters, as on stdin
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the {what} file {argument[1:]}: {error}") from error
