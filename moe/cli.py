"""The ``moe`` command. ``python -m moe`` is the same.

Heavy modules are imported by the subcommand that needs them, so that ``moe --version`` and usage
errors do not wait for torch. Text goes to stdout; summaries, notices and errors go to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe import __version__
from moe.errors import MoEError, ProfileError, RequestError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except MoEError as error:
        print(f"moe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe", description="Run Mixture-of-Experts language models larger than memory."
    )
    parser.add_argument("--version", action="version", version=f"moe {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt")
    _add_generate(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model; /reset, /stats and /exit inside")
    _add_model(chat, required=True)
    _add_sampling(chat)
    chat.set_defaults(run=_chat)

    serve = commands.add_parser("serve", help="answer OpenAI's HTTP API until stopped")
    _add_serve(serve)
    serve.set_defaults(run=_serve)

    convert = commands.add_parser("convert", help="write a model as a store, which loads at once")
    _add_convert(convert)
    convert.set_defaults(run=_convert)

    doctor = commands.add_parser("doctor", help="check this machine: what works, what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=False)
    parser.add_argument(
        "--prompt", metavar="TEXT|-|@FILE", help="the prompt; - reads stdin, @FILE reads a file"
    )
    parser.add_argument(
        "--batch", metavar="FILE", help="requests, one JSON object a line (OpenAI's batch format)"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="answers of the batch; those there are not done again"
    )
    _add_sampling(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print each setting and its origin, and stop"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    _add_sampling(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send; better set as MOE_API_KEY, as other users see command lines",
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model directory or Hugging Face hub id")
    parser.add_argument("out", help="directory of the store, made here")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(2, 4, 8, 16),
        default=8,
        help="of experts; fewer can be chosen when loading; 16: whole (%(default)s)",
    )
    for name, what in (("trunk", "other linear layers"), ("head", "the output head")):
        parser.add_argument(
            f"--{name}-bits",
            type=int,
            choices=(4, 8, 16),
            default=8,
            help=f"of {what} (%(default)s)",
        )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64),
        default=64,
        help="weights that share a scale (%(default)s)",
    )


def _add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "model", nargs=None if required else "?", help="model directory or Hugging Face hub id"
    )
    parser.add_argument("--profile", metavar="NAME|FILE", help="serving profile (default: default)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override one setting of the profile, as in --set engine.max_batch_size=8",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--seed", type=int, metavar="S")


def load_settings(options: argparse.Namespace) -> Any:
    """The profile that a command line asks for; sampling options are settings like any other."""
    from moe.profile import load_profile
    from moe.profile_sources import parse_assignments

    overrides = parse_assignments(options.settings)
    for name in ("max_new_tokens", "temperature", "seed"):
        if getattr(options, name) is not None:
            overrides[f"generation.{name}"] = getattr(options, name)
    return load_profile(options.profile, overrides)


def read_prompt(argument: str | None) -> str:
    """The text that ``--prompt`` names."""
    if argument is None:
        raise RequestError("no prompt was given; write --prompt TEXT, --prompt - or --prompt @FILE")
    if argument == "-":
        return sys.stdin.read()
    if argument.startswith("@"):
        try:
            return Path(argument[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read the prompt file {argument[1:]}: {error}") from error
    return argument


def _generate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if options.print_config:
        from moe.profile import print_config

        print(print_config(profile))
        return 0
    if options.model is None:
        raise ProfileError("no model was given; write moe generate MODEL --prompt TEXT")
    if options.batch is not None or options.out is not None:
        return _batch(options, profile)
    prompt = read_prompt(options.prompt)
    from moe.terminal import generate

    return generate(options.model, profile, prompt, as_json=options.json)


def _batch(options: argparse.Namespace, profile: Any) -> int:
    if options.batch is None or options.out is None:
        raise RequestError("--batch and --out belong together: give both files")
    if options.prompt is not None or options.json:
        raise RequestError("--batch takes its prompts from the file; leave out --prompt and --json")
    from moe.terminal import batch

    return batch(options.model, profile, Path(options.batch), Path(options.out))


def _chat(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    from moe.terminal import chat

    return chat(options.model, profile)


def _serve(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    from moe.server.serve import serve

    return serve(options.model, profile, options.host, options.port, options.api_key)


def _convert(options: argparse.Namespace) -> int:
    from moe.convert import convert
    from moe.settings import ModelSettings

    settings = ModelSettings(
        expert_bits=options.bits,
        trunk_bits=options.trunk_bits,
        head_bits=options.head_bits,
        group_size=options.group_size,
    )
    print(convert(options.model, options.out, settings, progress=True))
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from moe.doctor import main as doctor

    return doctor()
