"""The ``moe`` command. ``python -m moe`` is the same.

`command` is the process, `main` runs one command line inside any process. Heavy modules are
imported by the subcommand that needs them, so that ``moe --version`` and usage errors do not wait
for torch. Text goes to stdout; summaries, notices and errors go to stderr.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from moe import __version__
from moe.cache_dir.exported_names import keep_names
from moe.commands import arguments, subcommands
from moe.commands.printable import printable
from moe.commands.usage import Parser
from moe.deferred import defer
from moe.errors import MoEError, ProfileError, RankLostError
from offload.errors import OffloadError

AddArguments = Callable[[Parser], None]
Run = Callable[[argparse.Namespace], int]

EXAMPLES = {
    "run": "moe run org/name --dry-run",
    "generate": 'moe generate examples/demo-model --prompt "def main():"',
    "chat": "moe chat org/name:Q4_K_M --profile offload",
    "serve": "moe serve STORE --profile offload --set memory.device_gib=8",
    "top": "moe top http://127.0.0.1:8000",
    "convert": "moe convert MODEL STORE --bits 4",
    "calibrate": "moe calibrate STORE --text notes.txt",
    "plan": "moe plan org/name --set model.expert_bits=4",
    "eval": "moe eval STORE --text held_out.txt --against MODEL",
    "trace": "moe trace MODEL --text notes.txt --out TRACE",
    "inspect": "moe inspect STORE --image bits.png",
    "bench": "moe bench STORE --stages",
    "settings": "moe settings kv_bits",
    "methods": "moe methods pesf",
    "doctor": "moe doctor",
}
"""The last line of each command's help."""
_ANYWHERE = (
    subcommands.generate,
    subcommands.chat,
    subcommands.serve,
    subcommands.doctor,  # also where the libraries are absent that the others need
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    _take_any_text()
    options = build_parser().parse_args(argv)
    try:
        _fix_revision(options)
        if options.run not in _ANYWHERE:
            _refuse_ranks()
        code: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except MoEError as error:
        _say(error)
        return 2
    except (OffloadError, RankLostError) as error:
        _say(error)
        return 1
    except KeyboardInterrupt as stop:
        print(f"moe: interrupted{stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:  # a full disk, a file that may not be read
        _say(error)
        return 1
    return code


def _say(error: Exception) -> None:
    print(f"moe: {printable(str(error))}", file=sys.stderr)


def command(run: Callable[[], int] = main) -> NoReturn:
    """Run this process's command line, and end the process at once when it is done.

    The interpreter would take three thousand modules apart first: more than a second of processor
    time. Threads are joined, exit functions run and output is written before, as always.

    Args:
        run: returns the exit code.
    """
    defer()
    keep_names()
    code: int | None = None

    def end() -> None:
        if code is None:  # argparse or an error ended the command: little, or not expected
            return
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
                stream.flush()
        except (OSError, ValueError):  # nobody reads it: the interpreter has its own way to say so
            return
        os._exit(code)

    atexit.register(end)  # the first to be registered is the last to be called
    if isinstance(sys.stdout, io.TextIOWrapper):
        output = io.BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            output, sys.stdout.encoding, sys.stdout.errors, None, sys.stdout.line_buffering
        )
    if isinstance(sys.stderr, io.TextIOWrapper):
        log = _Log(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            log, sys.stderr.encoding, "backslashreplace", None, True, True
        )
    code = run()
    sys.exit(code)


class _Output(io.FileIO):
    """Standard output. An error names it, as the system does not, and is raised once."""

    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:  # of a disk that is full: what waits in buffers is lost
            return len(data)
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed, error.filename = True, "standard output"
            raise


class _Log(io.FileIO):
    """The log of what a process does. A full disk, or a reader that has gone, ends nothing."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="moe", description="Run Mixture-of-Experts language models larger than memory."
    )
    parser.add_argument("--version", action="version", version=f"moe {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers pass it
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, what: str, add_arguments: AddArguments, run: Run) -> None:
        about = f"{what[0].upper()}{what[1:]}."
        epilog = f"Example: {EXAMPLES[name]}"
        command = subparsers.add_parser(name, help=what, description=about, epilog=epilog)
        add_arguments(command)
        command.set_defaults(run=run)

    run = "serve a model with what suits it and this machine; says what it chose and why"
    add("run", run, arguments.add_run, subcommands.run_model)
    add("generate", "continue a prompt", arguments.add_generate, subcommands.generate)
    chat = "talk to a model; /reset, /stats and /exit inside"
    add("chat", chat, arguments.add_chat, subcommands.chat)
    serve = "answer OpenAI's and Anthropic's clients over HTTP until stopped"
    add("serve", serve, arguments.add_serve, subcommands.serve)
    top = "watch the experts of a server at work, in the terminal"
    add("top", top, arguments.add_top, subcommands.top)
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
    settings = "list every setting, its meaning, value and origin"
    add("settings", settings, arguments.add_settings, subcommands.settings)
    methods = "published methods that are off by default: what they do, and their price"
    add("methods", methods, arguments.add_methods, subcommands.methods)
    doctor = "check this machine: what works, what is missing"
    add("doctor", doctor, arguments.add_doctor, subcommands.doctor)
    return parser


def _take_any_text() -> None:
    """Make stdin and stdout accept any bytes and characters, whatever their encoding.

    Bytes that are not valid text become lone surrogates, as in arguments; prompts refuse those with
    their position. Characters that the output cannot encode are escaped.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _fix_revision(options: argparse.Namespace) -> None:
    """Write ``--revision`` into the model's name, which is what everything else passes on."""
    if getattr(options, "revision", None) is not None:
        from moe.loading.remote.names import at_revision

        options.model = at_revision(options.model or "", options.revision)


def _refuse_ranks() -> None:
    from moe.parallel.launch import Launch

    if Launch.from_environment(os.environ):
        raise ProfileError(
            "only moe generate, chat and serve run on several ranks; leave the launcher out"
        )
