"""The ``moe`` command. ``python -m moe`` is the same.

Heavy modules are imported by the subcommand that needs them, so that ``moe --version`` and usage
errors do not wait for torch. Text goes to stdout; summaries, notices and errors go to stderr.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe import __version__
from moe.commands import arguments, subcommands
from moe.commands.subcommands import importing, load_settings
from moe.errors import MoEError, ProfileError, RankLostError, RequestError
from offload.errors import OffloadError

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    _take_any_text()
    options = build_parser().parse_args(argv)
    try:
        if options.run not in (_generate, _chat, _serve):
            _refuse_ranks()
        code: int = options.run(options)
    except MoEError as error:
        print(f"moe: {error}", file=sys.stderr)
        return 2
    except (OffloadError, RankLostError) as error:
        print(f"moe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"moe: interrupted{stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:  # a full disk, a file that may not be read
        print(f"moe: {error}", file=sys.stderr)
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe", description="Run Mixture-of-Experts language models larger than memory."
    )
    parser.add_argument("--version", action="version", version=f"moe {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers say it, here too
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, what: str, add_arguments: AddArguments, run: Run) -> None:
        about = f"{what[0].upper()}{what[1:]}."
        command = subparsers.add_parser(name, help=what, description=about)
        add_arguments(command)
        command.set_defaults(run=run)

    add("generate", "continue a prompt", arguments.add_generate, _generate)
    chat = "talk to a model; /reset, /stats and /exit inside"
    add("chat", chat, arguments.add_chat, _chat)
    serve = "answer OpenAI's and Anthropic's clients over HTTP until stopped"
    add("serve", serve, arguments.add_serve, _serve)
    convert = "write a model as a store, which loads at once"
    add("convert", convert, arguments.add_convert, subcommands.convert)
    calibrate = "learn from a text which experts will be needed, for a model that offloads"
    add("calibrate", calibrate, arguments.add_calibrate, subcommands.calibrate)
    plan = "what a model takes, and how fast it will be"
    add("plan", plan, arguments.add_plan, subcommands.plan)
    evaluate = "how well a model predicts a text"
    add("eval", evaluate, arguments.add_eval, subcommands.evaluate)
    trace = "how a model routes the tokens of a text"
    add("trace", trace, arguments.add_trace, subcommands.trace)
    inspect = "what a store holds: the bits of its experts"
    add("inspect", inspect, arguments.add_inspect, subcommands.inspect_store)
    bench = "how fast a model is here, and what drafts gain"
    add("bench", bench, arguments.add_bench, subcommands.bench)
    doctor = "check this machine: what works, what is missing"
    add("doctor", doctor, lambda _: None, subcommands.doctor)
    return parser


def _take_any_text() -> None:
    """No encoding of a terminal or pipe ends a command.

    Bytes that are no text become lone surrogates, as in arguments, which prompts refuse with their
    place; characters that cannot be shown are escaped.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


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


def _refuse_ranks() -> None:
    from moe.parallel.launch import Launch

    if Launch.from_environment(os.environ):
        raise ProfileError(
            "only moe generate, chat and serve run on several ranks; leave the launcher out"
        )


def read_prompt(argument: str | None) -> str:
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
        return Path(argument[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the {what} file {argument[1:]}: {error}") from error


def _generate(options: argparse.Namespace) -> int:
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
    prompt = read_prompt(options.prompt)
    structure = None
    if options.json_schema is not None:
        from moe.sampling.structure import Structure

        structure = Structure.json_schema(_text_of(options.json_schema, "schema"))
    with importing():
        from moe.commands.terminal import generate

    return generate(options.model, profile, prompt, structure, as_json=options.json)


def _batch(options: argparse.Namespace, profile: Any) -> int:
    if options.batch is None or options.out is None:
        raise RequestError("--batch and --out belong together: give both files")
    if options.prompt is not None or options.json or options.json_schema is not None:
        raise RequestError(
            "--batch takes its prompts and what is asked of them from the file; leave out "
            "--prompt, --json and --json-schema"
        )
    with importing():
        from moe.commands.terminal import batch

    return batch(options.model, profile, Path(options.batch), Path(options.out))


def _chat(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _follows(options.model, profile):
        return 0
    system = None if options.system is None else _text_of(options.system, "system")
    with importing():
        from moe.commands.chat import chat

    return chat(options.model, profile, system)


def _serve(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _follows(options.model, profile):
        return 0
    with importing():
        from moe.server.serve import serve

    listens = (options.host, options.port, options.api_key)
    return serve(options.model, profile, *listens, options.served_model_name)
