"""``moe methods``: the published methods of this installation, with price and state."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from rich.table import Table

from moe.commands.console import stdout_console
from moe.errors import ProfileError
from moe.hooks import Method, methods
from moe.settings import Profile
from moe.settings.profile import as_yaml, suggestion, value_of


def run(profile: Profile, name: str | None) -> int:
    """Print all methods, or what one of them is. Returns the exit code.

    Raises:
        ProfileError: there is no method of that name.
    """
    if name is None:
        stdout_console().print(table(profile))
        return 0
    known = {method.name: method for method in methods()}
    if name not in known:
        near = suggestion(name, known)
        raise ProfileError(f"unknown method {name!r} (known: {', '.join(known)}){near}")
    print(description(known[name], profile))
    return 0


def table(profile: Profile) -> Table:
    """A row for each method."""
    made = Table("method", "state", "switched on by", "what it does", "price")
    for method in methods():
        state = "on" if method.on_by(profile) else "by model" if method.serves else "off"
        made.add_row(method.name, state, "\n".join(_switches(method)), method.about, method.price)
    return made


def description(method: Method, profile: Profile) -> str:
    """A method's own words, and its keys with the values of a profile."""
    module: Any = importlib.import_module(method.module)
    lines = [inspect.getdoc(module) or "", ""]
    lines += [f"on by: {', '.join(_switches(method))}"]
    for key, field in (method.settings.model_fields if method.settings else {}).items():
        full = f"methods.{method.name}.{key}"
        about = " ".join((field.description or "").split())
        lines.append(f"{full} = {as_yaml(value_of(profile, full))}  # {about}")
    return "\n".join(lines)


def _switches(method: Method) -> list[str]:
    """``key: value`` of each setting that switches it on."""
    own = [f"methods.{method.name}.{method.switch}"] if method.switch else []
    own += ["a model of its kind"] if method.serves else []
    return [*own, *(f"{key}: {value}" for key in method.choices for value in method.choices[key])]
