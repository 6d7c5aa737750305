"""Profile: every setting of a run, as one frozen tree, and where each value came from.

The tree itself, with each key's default and meaning, is ``moe/settings/``.
Precedence: command line (or keyword) > environment ``MOE_...`` > profile file > default.

    loaded = load_profile("default", {"engine.max_batch_size": 8})
    loaded.profile.engine.max_batch_size   # 8
    print(print_config(loaded))            # every key, its value and its origin
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from moe.errors import ProfileError
from moe.profile_sources import Keys, flatten, from_environment, read_profile_file
from moe.settings import Profile

__all__ = ["KEYS", "LoadedProfile", "Profile", "load_profile", "print_config", "value_of"]

KEYS = Keys.of(Profile)


@dataclass(frozen=True)
class LoadedProfile:
    """A profile, and for every dotted key the source that decided it: ``default``, a file's name,
    ``environment MOE_...`` or ``command line``."""

    profile: Profile
    origins: Mapping[str, str]


def load_profile(
    source: str | Path | Mapping[str, Any] | Profile | LoadedProfile | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides_origin: str = "command line",
) -> LoadedProfile:
    """Merge the sources of a profile; the module's prologue has the precedence.

    ``source`` is a name (``configs/NAME.yaml``), a path (has a separator or ends in .yaml / .yml),
    a mapping or ``Profile`` in the place of a file, a ``LoadedProfile`` (the environment is then
    not read a second time), or None for the defaults. ``overrides`` have dotted keys, nested
    mappings or both. ``environ`` is ``os.environ`` unless given.
    Raises ``ProfileError`` naming the source, the key, the rule and the value.
    """
    settings: dict[str, tuple[Any, str]] = {}
    if isinstance(source, LoadedProfile):
        settings = {
            key: (value_of(source.profile, key), source.origins[key]) for key in KEYS.leaves
        }
    else:
        settings |= _from_source(source)
        settings |= from_environment(os.environ if environ is None else environ, KEYS)
    changed = flatten(overrides or {}, KEYS, overrides_origin)
    settings |= {key: (value, overrides_origin) for key, value in changed.items()}
    origins = {key: settings[key][1] if key in settings else "default" for key in KEYS.leaves}
    return LoadedProfile(_validate(settings), origins)


def value_of(profile: Profile, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = profile
    for name in key.split("."):
        value = getattr(value, name)
    return value


def print_config(loaded: LoadedProfile) -> str:
    """One line a key, ``key = value  # origin``; the values are YAML, as ``--set`` reads them."""
    lines = [f"{key} = {_as_yaml(value_of(loaded.profile, key))}" for key in KEYS.leaves]
    width = max(map(len, lines))
    return "\n".join(
        f"{line:<{width}}  # {loaded.origins[key]}"
        for key, line in zip(KEYS.leaves, lines, strict=True)
    )


def _from_source(source: str | Path | Mapping[str, Any] | Profile | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Profile):
        tree, label = source.model_dump(exclude_unset=True), "Profile"
    elif isinstance(source, Mapping):
        tree, label = dict(source), "mapping"
    else:
        read, label = read_profile_file(source)
        tree = dict(read)
    return {key: (value, label) for key, value in flatten(tree, KEYS, label).items()}


def _validate(settings: Mapping[str, tuple[Any, str]]) -> Profile:
    tree: dict[str, Any] = {}
    for key, (value, _) in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        rules: dict[tuple[str, str], list[str]] = {}  # several of a key with a choice of types
        for problem in error.errors(include_url=False):
            if not problem["loc"]:  # a rule about several keys, which it names
                rules[problem["msg"], ""] = []
                continue
            where = ".".join(map(str, problem["loc"]))
            key = next(key for key in settings if f"{where}.".startswith(f"{key}."))
            places = [str(part) for part in problem["loc"] if isinstance(part, int)]
            place = f"{settings[key][1]}: {'.'.join([key, *places])}"
            rule = re.sub(r"^(Input|String) should", "must", problem["msg"])
            rules.setdefault((place, reprlib.repr(problem["input"])), []).append(rule)
        lines = [
            f"{place} {' or '.join(said)}; got {value}" if said else place
            for (place, value), said in rules.items()
        ]
        raise ProfileError("\n".join(lines)) from None


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()
