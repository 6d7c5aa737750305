"""What users and their scripts hold on to: names, commands, options, keys, routes and metrics.

tests/data/public_surface.json pins the list. A change here is a change for users: it needs a line
in CHANGELOG.md, and `python -m tests.test_public_surface` writes the list anew.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import moe
from moe.cli import build_parser
from moe.hooks import methods
from moe.server.app import create_app
from moe.settings import ServerSettings
from moe.settings.profile import KEYS

ROOT = Path(__file__).parents[1]
PINNED = Path(__file__).parent / "data" / "public_surface.json"


def options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(
        name for action in parser._actions for name in action.option_strings or [action.dest]
    )


def commands() -> dict[str, list[str]]:
    """Options and arguments by command; those of ``moe`` itself by the empty name."""
    parser = build_parser()
    (subparsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {"": options(parser)} | {
        name: options(command) for name, command in sorted(subparsers.choices.items())
    }


def routes() -> list[str]:
    guard: Any = create_app(Mock(), ["m"], ServerSettings())
    while not hasattr(guard, "routes"):
        guard = guard.app if hasattr(guard, "app") else guard._app
    return sorted(
        f"{method} {route.path}"
        for route in every_route(guard.routes)
        for method in sorted(route.methods - {"HEAD"})
    )


def every_route(routes: list[Any]) -> list[Any]:
    found = []
    for route in routes:
        inside = getattr(route, "original_router", None)
        found += every_route(inside.routes) if inside is not None else [route]
    return found


def metrics() -> list[str]:
    source = (ROOT / "moe" / "server" / "metrics.py").read_text()
    return sorted(set(re.findall(r'"(moe_[a-z_]+)"', source)))


def surface() -> dict[str, Any]:
    return {
        "moe": sorted(moe.__all__),
        "MoE": sorted(name for name in dir(moe.MoE) if not name.startswith("_")),
        "SamplingParams": sorted(moe.SamplingParams.__dataclass_fields__),
        "commands": commands(),
        "keys": sorted(key for key in KEYS.leaves if not key.startswith("methods.")),
        "methods": {
            method.name: sorted(
                [f"{key}: {name}" for key, names in method.choices.items() for name in names]
                + list(method.settings.model_fields if method.settings is not None else ())
            )
            for method in methods()
        },
        "routes": routes(),
        "metrics": metrics(),
    }


def test_documents_name_only_settings_and_options_that_exist() -> None:
    root = Path(moe.__file__).parents[1]
    of_status = {"model.reasoning", "model.sampling", "model.tools", "offload.reader.reason"}
    keys = {*KEYS.leaves, *KEYS.sections, *of_status}
    known, found, wrong = commands(), 0, []
    for file in (root / "README.md", *root.glob("docs/*.md")):
        text = file.read_text()
        for key in re.findall(r"`([a-z]+\.[a-z_.]+)[`=]", text):
            found += key in keys
            if key.partition(".")[0] in KEYS.sections and key not in keys:
                wrong.append(f"{file.name}: {key}")
        for command, rest in re.findall(r"\bmoe ([a-z]+)\b([^`|;#\n]*)", text):
            for option in re.findall(r"--[a-z-]+", rest) if command in known else ():
                found += 1
                if option not in known[command]:
                    wrong.append(f"{file.name}: moe {command} {option}")
    assert not wrong
    assert found > 100


def test_the_public_surface_is_what_it_was() -> None:
    pinned = json.loads(PINNED.read_text())
    for part, now in surface().items():
        assert now == pinned[part], part


if __name__ == "__main__":
    PINNED.write_text(json.dumps(surface(), indent=1) + "\n")
