"""The arguments of each subcommand of ``moe``."""

from __future__ import annotations

import argparse


def add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    _add_sampling(parser)
    parser.add_argument(
        "--system", metavar="TEXT|@FILE", help="what the model is told before the conversation"
    )


def add_generate(parser: argparse.ArgumentParser) -> None:
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
        "--json-schema", metavar="JSON|@FILE", help="the text has to be JSON of this schema"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text before this; may be given several times",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print each setting and its origin, and stop"
    )


def add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    _add_sampling(parser)
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="what clients call the model, one name or several (its directory's name or hub id)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send; better set as MOE_API_KEY, as other users see command lines",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="web pages that may ask from a browser, as https://example.org; '*': all (none)",
    )


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model directory, GGUF file or hub id")
    parser.add_argument("out", help="directory of the store, made here")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(2, 3, 4, 8, 16),
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
    parser.add_argument(
        "--calibration",
        metavar="DIR",
        help="left by moe calibrate --compression: experts lose less at every precision",
    )
    parser.add_argument(
        "--repair-routers",
        action="store_true",
        help="fit routers to what compressed experts give them; wants --calibration",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--target-bits",
        type=float,
        metavar="B",
        help="mean bits of an expert weight, scales included; each expert gets those it deserves",
    )
    budget.add_argument(
        "--target-gib", type=float, metavar="G", help="the same as GiB of all experts together"
    )


def add_eval(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    parser.add_argument("--text", metavar="FILE", required=True, help="what to read")
    parser.add_argument("--tokens", type=int, metavar="N", help="of it at most (default: all)")
    parser.add_argument(
        "--against", metavar="MODEL", help="the original, to compare with; both are loaded"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_trace(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    parser.add_argument("--text", metavar="FILE", required=True, help="what to read")
    parser.add_argument(
        "--tokens", type=int, default=20_000, metavar="N", help="of it at most (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where to leave plots, numbers and an HTML report"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of a store")
    parser.add_argument("--image", metavar="FILE.png", help="draw the bits of every expert")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    parser.add_argument(
        "--text", metavar="FILE", required=True, help="of the kind that the model will be used for"
    )
    parser.add_argument(
        "--tokens", type=int, default=50_000, metavar="N", help="of it to read (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where to leave it (default: moe-calibration in the model's)"
    )
    parser.add_argument(
        "--compression",
        type=int,
        nargs="?",
        const=2048,
        metavar="TOKENS",
        help="also measure what fewer bits cost, for moe convert --calibration: each layer on so "
        "many of the tokens, for each of its bits (%(const)s; fewer are faster)",
    )


def add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=512, metavar="N", help="to read (%(default)s)")
    add("--new-tokens", type=int, default=64, metavar="N", help="to decode (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def add_plan(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, required=True)
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="compare 1 to N ranks, and N replicas")
    add("--nodes", type=int, default=1, metavar="M", help="machines that they are on (default: 1)")
    speed = "GB/s,MICROSECONDS"
    add("--link", metavar=speed, help="between ranks of a machine (default: measured)")
    add("--network", metavar=speed, help="between machines (default: 1.25,50)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "model", nargs=None if required else "?", help="model directory, GGUF file or hub id"
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
    """The profile's ``generation`` section: what a request gets when it does not say."""
    add = parser.add_argument
    own = "the model's own, else "
    add("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (auto)")
    add("--temperature", type=float, metavar="T", help=f"0: the likeliest token ({own}0)")
    add("--top-p", type=float, metavar="P", help=f"the likeliest of this probability ({own}1)")
    add("--top-k", type=int, metavar="K", help=f"so many of the likeliest; 0: all ({own}0)")
    add("--seed", type=int, metavar="S", help="draws the same tokens again (a new one each time)")
