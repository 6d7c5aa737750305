"""The subcommands of ``moe``; each returns the exit code.

``generate``, ``chat`` and ``serve`` also run as one of several ranks. Each subcommand imports the
heavy modules that it needs, so that ``moe --version`` and usage errors do not wait for torch.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from moe.errors import CheckpointError, ProfileError, RequestError


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process by the signal itself during slow imports.

    As a `KeyboardInterrupt` it could get lost in the import of an extension module, or become an
    ``ImportError``. The garbage collector rests: it would look through all that is imported again
    and again, for a sixth of the time. If this process is new, it never looks at these objects
    later either: a collection while loading takes milliseconds in place of a third of a second.
    """
    is_new = "torch" not in sys.modules
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = ours and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
        if is_new:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extension modules report what is alive at the end
    finally:
        gc.enable()
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def load_settings(options: argparse.Namespace) -> Any:
    """The profile of a command line. Sampling options and allowed origins override its keys."""
    from moe.settings import GenerationSettings
    from moe.settings.profile import load_profile, parse_assignments

    overrides = parse_assignments(options.settings)
    for name in GenerationSettings.model_fields:
        if getattr(options, name, None) is not None:
            overrides[f"generation.{name}"] = getattr(options, name)
    if getattr(options, "allowed_origins", None) is not None:
        overrides["server.allowed_origins"] = options.allowed_origins
    if getattr(options, "no_proof_cache", False):
        overrides["model.proof_cache"] = False
    if getattr(options, "image", None):
        overrides["model.images"] = True
    return load_profile(options.profile, overrides)


def run_model(options: argparse.Namespace) -> int:
    from moe.server.listener import bind
    from moe.settings.profile import parse_assignments

    overrides = parse_assignments(options.settings)
    _check(options.model)
    with nullcontext() if options.dry_run else bind(options.host, options.port) as listener:
        with importing():
            from moe.commands.run.command import run

        return run(
            options.model,
            overrides,
            listener=listener,
            yes=options.yes,
            api_key=options.api_key,
            server=_server_options(options),
        )


def _server_options(options: argparse.Namespace) -> dict[str, Any]:
    from moe.server.log import write_log

    names = ("api_key_file", "ssl_certfile", "ssl_keyfile")
    log = write_log(options.log_level, options.log_file, options.log_format)
    return {name: getattr(options, name) for name in names} | {"log": log}


def convert(options: argparse.Namespace) -> int:
    if options.verify == (options.out is not None):
        raise CheckpointError(
            "give a model and the directory of its store, or --verify and one store"
        )
    if options.verify:
        return _verify(Path(options.model))
    _check(options.model)
    with importing():
        from moe.commands.convert.bit_allocation import BitBudget
        from moe.commands.convert.convert import convert as run
        from moe.settings import ModelSettings

    settings = ModelSettings(
        expert_bits=options.bits,
        trunk_bits=options.trunk_bits,
        head_bits=options.head_bits,
        group_size=options.group_size,
    )
    budget = None
    if options.target_bits is not None or options.target_gib is not None:
        budget = BitBudget(options.target_bits, options.target_gib)
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


def _verify(directory: Path) -> int:
    with importing():
        from experts.store import Store, StoreError

    try:
        with Store.open(directory) as store:
            store.verify()
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    print(f"{directory}: every byte is as it was written")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    _check(options.model)
    with importing():
        from moe.commands.evaluate.command import run

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
    _check(options.model)
    with importing():
        from moe.commands.trace.command import run

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
        from moe.commands.convert.inspect_store import run

    return run(Path(options.store), None if options.image is None else Path(options.image))


def calibrate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    _check(options.model)
    with importing():
        from moe.commands.calibrate.calibrate import calibrate as run

    out = None if options.out is None else Path(options.out)
    text = Path(options.text)
    return run(options.model, profile, text, options.tokens, out, compression=options.compression)


def plan(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    _check(options.model)
    if options.ranks is not None:
        with importing():
            from moe.commands.plan.rank_command import run as run_ranks

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
        raise ProfileError("--nodes, --link and --network describe several ranks; add --ranks N")
    with importing():
        from moe.commands.plan.command import run

    said = [] if options.profile is None else ["--profile", options.profile]
    said += [word for setting in options.settings for word in ("--set", setting)]
    return run(options.model, profile, said, as_json=options.json)


def bench(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    _check(options.model)
    with importing():
        from moe.commands.bench import run

    sizes = {"prompt": options.prompt_tokens, "tokens": options.new_tokens}
    return run(options.model, profile, **sizes, stages=options.stages, as_json=options.json)


def doctor(options: argparse.Namespace) -> int:
    if options.forget:
        with importing():
            from moe.cache_dir.files import directory_name, forget

        print(f"forgot {forget()} proofs and trials in {directory_name()}")
        return 0
    with importing():
        from moe.commands.doctor import main as doctor

    return doctor(compiles=options.compile)


def settings(options: argparse.Namespace) -> int:
    from moe.settings.profile import print_settings

    print(print_settings(load_settings(options), options.word))
    return 0


def methods(options: argparse.Namespace) -> int:
    from moe.commands.methods import run

    return run(load_settings(options).profile, options.name)


def generate(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _worked(options.model, profile):
        return 0
    if options.batch_file is not None or options.out is not None:
        return _batch(options, profile)
    prompt = _prompt_of(options.prompt)
    asked = {"stop": options.stop} if options.stop else {}
    if options.json_schema is not None:
        from moe.sampling.params import Structure

        asked["structure"] = Structure.json_schema(_text_of(options.json_schema, "schema"))
    with importing():
        from moe.commands import terminal

    return terminal.generate(options.model, profile, prompt, asked, as_json=options.json)


def chat(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _worked(options.model, profile):
        return 0
    system = None if options.system is None else _text_of(options.system, "system")
    with importing():
        from moe.commands.chat import chat as run

    return run(options.model, profile, system, options.image)


def serve(options: argparse.Namespace) -> int:
    profile = load_settings(options)
    if _worked(options.model, profile):
        return 0
    from moe.server.listener import bind

    with bind(options.host, options.port) as listener:
        with importing():
            from moe.server.serve import serve as run

        return run(
            options.model,
            profile,
            listener,
            options.api_key,
            options.served_model_name,
            **_server_options(options),
        )


def top(options: argparse.Namespace) -> int:
    from moe.commands.top import top as run

    return run(options.url, options.api_key, once=options.once)


def _batch(options: argparse.Namespace, profile: Any) -> int:
    if options.batch_file is None or options.out is None:
        raise RequestError("--batch-file and --out belong together: give both files")
    if options.prompt is not None or options.json or options.json_schema or options.stop:
        raise RequestError(
            "--batch-file takes prompts and their parameters from the file; leave out --prompt, "
            "--json, --json-schema and --stop"
        )
    with importing():
        from moe.commands.batch import batch

    return batch(options.model, profile, Path(options.batch_file), Path(options.out))


def _worked(model: str, profile: Any) -> bool:
    """Run this process as a worker rank until rank 0 stops; False if it is not a worker.

    A process without ranks only checks the model; ranks find the same fault together.

    Raises:
        MoEError: the model cannot be loaded, or the ranks do not come together.
        RankLostError: rank 0 is lost.
    """
    from moe.parallel.launch import (
        end_with_parent,
        required_launch,
        shield_from_launcher,
        stop_with_launcher,
    )

    launch = required_launch(profile.profile)
    if launch is None:
        _check(model)
        return False
    end_with_parent()
    if launch.rank == 0:  # launchers turn a terminal's SIGINT, sent to all, into SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_with_launcher()
        return False
    with importing():
        from moe.model import MoE

    if profile.profile.parallel.on_rank_loss == "continue":
        shield_from_launcher(launch)

    with closing(MoE.from_pretrained(model, profile)) as loaded:
        # A launcher signals all ranks: rank 0 finishes what it has begun, then stops the others.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        loaded.serve_rank()
    return True


def _check(model: str) -> None:
    """Refuse a model for what its name and small files say, before torch is imported."""
    from moe.loading.local import check_model

    check_model(model)


def _prompt_of(argument: str | None) -> str:
    """The text given by ``--prompt``."""
    if argument is None:
        raise RequestError("no prompt was given; write --prompt TEXT, --prompt - or --prompt @FILE")
    if argument == "-":
        return sys.stdin.read()
    return _text_of(argument, "prompt")


def _text_of(argument: str, what: str) -> str:
    """The argument itself, or the content of the file after an @."""
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_bytes().decode()  # "\r\n" is two characters, as on stdin
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the {what} file {argument[1:]}: {error}") from error
