"""The arguments of each subcommand of ``moe``.

Options stand in named groups. Help texts say units, and in brackets the default of what has one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

MODEL = "model directory, GGUF file or hub id (org/name, or org/name:QUANT for a GGUF file there)"
PROOFS = "prove anew what the model may do, try disks anew, and keep nothing of it"
SET = "override one setting of the profile, as in --set engine.max_batch_size=8; may be given again"
SHORT: dict[str, tuple[str, str, str]] = {
    "--context": ("model.context_length", "TOKENS", "most tokens of a sequence; 32k is 32768"),
    "--memory": ("memory.device_gib", "GIB", "memory to fill: the GPU's, else main memory"),
    "--threads": ("threads", "N", "CPU threads"),
    "--bits": ("model.expert_bits", "BITS", "bits of expert weights: 2, 3, 4, 8 or 16"),
    "--batch": ("engine.max_batch_size", "N", "most sequences that are decoded together"),
    "--device": ("device", "DEVICE", "cpu, cuda or cuda:N"),
}
"""Options for the settings that are changed most often: key, placeholder and meaning of each."""
REVISION = "branch, tag or commit of a model on the hub (default: its main branch)"


def add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument_group("conversation").add_argument
    system = "system message that leads the conversation (default: none)"
    add("--system", metavar="TEXT|@FILE", help=system)
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="PNG, JPEG or WebP file that the first message shows; may be given several times "
        "(sets model.images)",
    )
    _add_sampling(parser)


def add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add: Callable[..., object] = parser.add_argument_group("prompt").add_argument
    prompt = "the prompt; - reads stdin, @FILE reads a file; needed without --batch-file"
    add("--prompt", metavar="TEXT|-|@FILE", help=prompt)
    add = parser.add_argument_group("many prompts, from a file").add_argument
    requests = "requests, one JSON object a line (OpenAI's batch format)"
    add("--batch-file", metavar="FILE", help=requests)
    add(
        "--out",
        metavar="FILE",
        help="answers of the batch; lines answered there are skipped, failed ones run again",
    )
    add = _add_sampling(parser)
    schema = "the text must be JSON that follows this schema (default: any text)"
    add("--json-schema", metavar="JSON|@FILE", help=schema)
    stop = "end the text before this; may be given several times"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of the text")


def add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = _add_listening(parser)
    add(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="name, or names, by which clients ask for the model (default: directory or hub id)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins of web pages that may use it, as https://example.org; '*': all (default: "
        "none)",
    )
    _add_sampling(parser, "answers to requests that do not say it themselves")


def add_top(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "url",
        nargs="?",
        default="127.0.0.1:8000",
        metavar="HOST:PORT|URL",
        help="address of the server (default: %(default)s)",
    )
    add("--api-key", metavar="KEY", help="key of the server (default: MOE_API_KEY)")
    add("--once", action="store_true", help="print one screen, and stop")


def add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--revision", metavar="R", help=REVISION)
    _add_settings(parser)
    add = parser.add_argument_group("what to do").add_argument
    add("--dry-run", action="store_true", help="say what would be done, and stop")
    add("--yes", action="store_true", help="convert without asking, where that is needed")
    _add_listening(parser)


def add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("out", nargs="?", metavar="STORE", help="directory of the store; must not exist")
    add("--revision", metavar="R", help=REVISION)
    add("--verify", action="store_true", help="read all of the store MODEL, compare checksums")
    add = parser.add_argument_group("precision, the same for all experts").add_argument
    add(
        "--bits",
        type=int,
        choices=(2, 3, 4, 8, 16),
        default=8,
        help="bits of an expert weight; a profile may read fewer; 16: not quantised (default: "
        "%(default)s)",
    )
    for name, what in (("trunk", "other linear layers"), ("head", "the output head")):
        bits = f"bits of a weight of {what} (default: %(default)s)"
        add(f"--{name}-bits", type=int, choices=(4, 8, 16), default=8, help=bits)
    group = "weights that share a scale (default: %(default)s)"
    add("--group-size", type=int, choices=(32, 64), default=64, help=group)
    chosen = parser.add_argument_group("precision, chosen for each expert")
    add = chosen.add_argument
    calibration = "of moe calibrate --compression; experts then lose less at every precision"
    add("--calibration", metavar="DIR", help=calibration)
    repair = "fit routers to the outputs of compressed experts; needs --calibration"
    add("--repair-routers", action="store_true", help=repair)
    budget = chosen.add_mutually_exclusive_group()
    bits = "mean bits of an expert weight, scales included; chosen for each expert by its loss"
    budget.add_argument("--target-bits", type=float, metavar="B", help=bits)
    gib = "the same as GiB of all experts together"
    budget.add_argument("--target-gib", type=float, metavar="G", help=gib)


def add_eval(parser: argparse.ArgumentParser) -> None:
    _add_text(parser, "the text to read", tokens=None)
    against = "the original model to compare with; both are loaded"
    parser.add_argument("--against", metavar="MODEL", help=against)
    _add_json(parser)


def add_trace(parser: argparse.ArgumentParser) -> None:
    _add_text(parser, "the text to read", tokens=20_000)
    out = "directory for plots, numbers and an HTML report"
    parser.add_argument("--out", metavar="DIR", help=out)
    _add_json(parser)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory of a store")
    parser.add_argument("--image", metavar="FILE.png", help="draw the bits of every expert")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_text(parser, "a text of the kind that the model will be used for", tokens=50_000)
    out = "directory for the calibration (default: moe-calibration in the model's)"
    parser.add_argument("--out", metavar="DIR", help=out)
    parser.add_argument(
        "--compression",
        type=int,
        nargs="?",
        const=2048,
        metavar="TOKENS",
        help="also measure what fewer bits cost, for moe convert --calibration, by reading TOKENS "
        "tokens for each layer and precision (default: not; TOKENS left out: %(const)s)",
    )


def add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument_group("what to measure").add_argument
    add(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens to read (default: %(default)s)",
    )
    add(
        "--new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens to decode (default: %(default)s)",
    )
    where = "where the time of a prompt and of decode steps goes, stage by stage"
    add("--stages", action="store_true", help=where)
    _add_json(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument_group("several ranks").add_argument
    ranks = "compare 1 to N ranks, and N replicas (default: one rank)"
    add("--ranks", type=int, metavar="N", help=ranks)
    add("--nodes", type=int, default=1, metavar="M", help="machines of the ranks (default: 1)")
    speed = "GB/s,MICROSECONDS"
    add("--link", metavar=speed, help="between ranks of a machine (default: measured)")
    add("--network", metavar=speed, help="between machines (default: 1.25,50)")
    _add_json(parser)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    now = "compile the CPU kernels now, if the first run would do it"
    parser.add_argument("--compile", action="store_true", help=now)
    parser.add_argument(
        "--forget", action="store_true", help="remove what loads have proven and kept, and stop"
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    word = "list settings whose name or meaning has this word (default: all)"
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help=word)
    _add_profile(parser)


def add_methods(parser: argparse.ArgumentParser) -> None:
    name = "print all about this method (default: list all)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    _add_profile(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--revision", metavar="R", help=REVISION)
    add("--no-proof-cache", action="store_true", help=PROOFS)
    _add_profile(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("settings").add_argument
    add("--profile", metavar="NAME|FILE", help="serving profile (default: default)")
    _add_settings(parser, add)


def _add_settings(
    parser: argparse.ArgumentParser, add: Callable[..., object] | None = None
) -> None:
    """Add the options that go before a profile: `SHORT`, and ``--set``."""
    add = add or parser.add_argument_group("settings").add_argument
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=SET)
    for option, (key, metavar, meaning) in SHORT.items():
        add(
            option,
            action=_Setting,
            dest="settings",
            metavar=metavar,
            help=f"{meaning} (sets {key})",
        )


class _Setting(argparse.Action):
    """Appends ``KEY=VALUE`` of the key that the option is short for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        key, text = SHORT[option_string][0], str(value)
        if re.fullmatch(r"\d+[kK]", text):
            text = str(int(text[:-1]) * 1024)
        namespace.settings = [*namespace.settings, f"{key}={text}"]


def _add_listening(parser: argparse.ArgumentParser) -> Callable[..., object]:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    key = (
        "what clients must send; better set as MOE_API_KEY, as other users see command lines "
        "(default: MOE_API_KEY, else nothing)"
    )
    add("--api-key", metavar="KEY", help=key)
    keys = "several keys with names and limits, as YAML (default: none)"
    add("--api-key-file", metavar="FILE", help=keys)
    chain = "certificate chain (PEM); HTTPS instead of HTTP (default: HTTP)"
    add("--ssl-certfile", metavar="FILE", help=chain)
    private = "its private key, if it is in another file (default: the same)"
    add("--ssl-keyfile", metavar="FILE", help=private)
    level = "info logs each request, debug also looks at /health and the like (default: info)"
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=level)
    add("--log-file", metavar="FILE", help="append the log to a file (default: stderr)")
    lines = "lines for people, or JSON objects (default: text)"
    add("--log-format", choices=("text", "json"), default="text", help=lines)
    return add


def _add_text(parser: argparse.ArgumentParser, what: str, tokens: int | None) -> None:
    """The model, and the text that it reads."""
    _add_model(parser)
    add = parser.add_argument_group("text").add_argument
    add("--text", metavar="FILE", required=True, help=what)
    most = f"tokens to read at most (default: {'all' if tokens is None else '%(default)s'})"
    add("--tokens", type=int, default=tokens, metavar="N", help=most)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_sampling(parser: argparse.ArgumentParser, title: str = "answers") -> Callable[..., object]:
    """The profile's ``generation`` section: for requests that do not set it themselves."""
    add = parser.add_argument_group(title).add_argument
    own = "default: the model's own, else "
    most = "most tokens of an answer (auto: in chats what fits the context, else 128)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, metavar="T", help=f"0: the most likely token ({own}0)")
    add("--top-p", type=float, metavar="P", help=f"most likely tokens of this mass ({own}1)")
    add("--top-k", type=int, metavar="K", help=f"only the K most likely tokens; 0: all ({own}0)")
    seed = "makes sampling repeatable (default: a new one each time)"
    add("--seed", type=int, metavar="S", help=seed)
    return add
