"""Loads a `Profile` from its sources, and remembers where each value came from.

The tree itself, with each key's default and meaning, is `moe.settings.Profile`.
Precedence: command line (or keyword) > environment ``MOE_...`` > profile file > default.

    loaded = load_profile("default", {"engine.max_batch_size": 8})
    loaded.profile.engine.max_batch_size   # 8
    print(print_config(loaded))            # every key, its value and its origin
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from moe.errors import ProfileError
from moe.hooks import moved_keys
from moe.settings import Profile

__all__ = ["KEYS", "LoadedProfile", "load_profile", "print_settings", "value_of"]

MAX_FILE_BYTES = 64 * 1024
ENVIRONMENT_PREFIX = "MOE_"

# Variables with our prefix that are not profile keys: the code that needs them reads them before
# any profile exists. MOE_REPO tells scripts outside of a checkout which one to try. Every other
# variable with the prefix is refused as a misspelling.
OTHER_VARIABLES = frozenset(
    {"MOE_API_KEY", "MOE_CPU_KERNEL", "MOE_LAUNCH_SECRET", "MOE_PROOF_CACHE", "MOE_REPO"}
)


@dataclass(frozen=True)
class LoadedProfile:
    """A profile and its `origins`: for each dotted key the source that set it.

    A source is ``default``, a file's name, ``environment MOE_...`` or ``command line``.
    """

    profile: Profile
    origins: Mapping[str, str]


def load_profile(
    source: str | Path | Mapping[str, Any] | Profile | LoadedProfile | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides_origin: str = "command line",
) -> LoadedProfile:
    """Merge the sources of a profile in the order of precedence.

    Args:
        source: a name (``configs/NAME.yaml``), a path (has a separator or ends in .yaml or .yml),
            a mapping or `Profile` instead of a file, a `LoadedProfile` (the environment is then
            not read again), or None for the defaults.
        overrides: dotted keys, nested mappings or both.
        environ: None: ``os.environ``.
        overrides_origin: the origin of the overridden values.

    Raises:
        ProfileError: names the source, the key, the rule and the value.
    """
    settings: dict[str, tuple[Any, str]] = {}
    if isinstance(source, LoadedProfile):
        settings = {
            key: (value_of(source.profile, key), source.origins[key]) for key in KEYS.leaves
        }
    else:
        settings |= _from_source(source)
        settings |= _from_environment(os.environ if environ is None else environ)
    changed = _flatten(overrides or {}, overrides_origin)
    settings |= {key: (value, overrides_origin) for key, value in changed.items()}
    origins = {key: settings[key][1] if key in settings else "default" for key in KEYS.leaves}
    return LoadedProfile(_validate(settings), origins)


def value_of(profile: Profile, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = profile
    for name in key.split("."):
        value = getattr(value, name)
    return value


def as_yaml(value: Any) -> str:
    """A value as ``--set`` reads it."""
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def print_settings(loaded: LoadedProfile, word: str = "") -> str:
    """Each setting whose name or meaning has ``word``: its meaning in comments, then the line
    ``key = value  # origin``. Values are YAML, as ``--set`` reads them.

    Raises:
        ProfileError: no setting has the word.
    """
    found = []
    for key in KEYS.leaves:
        field = field_of(key)
        meaning = " ".join((field.description or "").split())
        if word.lower() not in f"{key} {meaning}".lower():
            continue
        value, origin = as_yaml(value_of(loaded.profile, key)), loaded.origins[key]
        usual = as_yaml(field.get_default(call_default_factory=True))
        about = origin if value == usual else f"{origin}; default: {usual}"
        lines = textwrap.wrap(meaning, 98, initial_indent="# ", subsequent_indent="# ")
        found.append("\n".join([*lines, f"{key} = {value}  # {about}"]))
    if not found:
        raise ProfileError(
            f"no setting has {word!r} in its name or meaning{suggestion(word, KEYS.leaves)}"
        )
    return "\n\n".join(found)


def field_of(key: str) -> FieldInfo:
    """The field of a dotted key."""
    tree: type[BaseModel] = Profile
    *sections, name = key.split(".")
    for section in sections:
        inner = section_of(tree.model_fields[section])
        assert inner is not None
        tree = inner
    return tree.model_fields[name]


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field's section; None for a field that holds a value."""
    kind = field.annotation
    # Python 3.10 takes `list[str]` for a class.
    if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return None


@dataclass(frozen=True)
class ProfileKeys:
    """The dotted names of a settings tree: ``leaves`` hold values, ``sections`` hold other keys."""

    leaves: tuple[str, ...]
    sections: frozenset[str]

    @classmethod
    def of(cls, tree: type[BaseModel]) -> ProfileKeys:
        leaves: list[str] = []
        sections: set[str] = set()
        for name, field in tree.model_fields.items():
            if section := section_of(field):
                below = cls.of(section)
                leaves += [f"{name}.{key}" for key in below.leaves]
                sections |= {name, *(f"{name}.{key}" for key in below.sections)}
            else:
                leaves.append(name)
        return cls(tuple(leaves), frozenset(sections))


KEYS = ProfileKeys.of(Profile)


def _from_source(source: str | Path | Mapping[str, Any] | Profile | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Profile):
        tree, label = source.model_dump(exclude_unset=True), "Profile"
    elif isinstance(source, Mapping):
        tree, label = dict(source), "mapping"
    else:
        read, label = _read_file(source)
        tree = dict(read)
    return {key: (value, label) for key, value in _flatten(tree, label).items()}


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
            where = ".".join(map(str, problem["loc"]))
            key = next((own for own in settings if f"{where}.".startswith(f"{own}.")), "")
            if not key:  # a rule about several keys, which it names
                rules[problem["msg"], ""] = []
                continue
            places = [str(part) for part in problem["loc"] if isinstance(part, int)]
            place = f"{settings[key][1]}: {'.'.join([key, *places])}"
            rule = re.sub(r"^(Input|String) should", "must", problem["msg"])
            rule = rule.replace("a valid tuple", "a list, as in [one, two]")
            rules.setdefault((place, reprlib.repr(problem["input"])), []).append(rule)
        lines = [
            f"{place} {' or '.join(wanted)}; got {value}" if wanted else place
            for (place, value), wanted in rules.items()
        ]
        raise ProfileError("\n".join(lines)) from None


# Sources: YAML files, ``MOE_...`` variables and ``key=value`` texts. Each becomes one flat mapping
# of dotted keys to values.


def _flatten(tree: Mapping[Any, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Nested, dotted or mixed keys -> dotted keys: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``.

    Raises ``ProfileError`` naming the source, the key and its nearest valid key.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in KEYS.sections:
            if not isinstance(value, Mapping | None):
                raise ProfileError(f"{source}: {key} is a section: write its keys below it")
            new = _flatten(value or {}, source, f"{key}.")
        elif key in KEYS.leaves:
            new = {key: value}
        elif key in moved_keys():
            raise ProfileError(f"{source}: key {key!r} is {moved_keys()[key]!r} today")
        else:
            valid = KEYS.leaves if "." in key else [*KEYS.leaves, *KEYS.sections]
            raise ProfileError(f"{source}: unknown key {key!r}{suggestion(key, valid)}")
        if twice := flat.keys() & new.keys():
            raise ProfileError(f"{source}: key {min(twice)!r} is given twice")
        flat |= new
    return flat


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """``MOE_ROUTING__POLICIES=[top_k:2]`` -> ``{"routing.policies": (["top_k:2"], origin)}``."""
    names = {_variable(key): key for key in KEYS.leaves}
    moved = {_variable(key): _variable(today) for key, today in moved_keys().items()}
    settings: dict[str, tuple[Any, str]] = {}
    for variable in sorted(environ):
        if variable in names:
            origin = f"environment {variable}"
            settings[names[variable]] = (_parse(environ[variable], origin), origin)
        elif variable in moved:
            raise ProfileError(f"environment: variable {variable!r} is {moved[variable]!r} today")
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
            near = suggestion(variable, [*names, *OTHER_VARIABLES])
            raise ProfileError(f"environment: unknown variable {variable!r}{near}")
    return settings


def _variable(key: str) -> str:
    """``routing.policies`` -> ``MOE_ROUTING__POLICIES``."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """``["engine.max_batch_size=8"]`` -> ``{"engine.max_batch_size": 8}``; values are YAML."""
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ProfileError(f"--set: expected KEY=VALUE; got {assignment!r}")
        parsed[key.strip()] = _parse(text, f"--set {key.strip()}")
    return parsed


def _read_file(name_or_path: str | Path) -> tuple[Mapping[Any, Any], str]:
    """The tree in a profile file, given by name (``configs/NAME.yaml``) or path, and its label.

    Messages show the label.
    """
    text_form = str(name_or_path)
    if isinstance(name_or_path, Path) or re.search(r"[/\\]|\.ya?ml$", text_form):
        file, label = Path(name_or_path), text_form
    else:
        label = f"configs/{text_form}.yaml"
        file = _configs() / f"{text_form}.yaml"
        if text_form not in profile_names():
            near = suggestion(text_form, profile_names())
            known = ", ".join(profile_names())
            raise ProfileError(
                f"unknown profile {text_form!r}{near} (profiles: {known}; a file's name ends in "
                ".yaml or has a /)"
            )
    try:
        with file.expanduser().open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ProfileError(f"profile file {label!r} does not exist") from None
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, an unknown ~user
        why = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"profile file {label[:200]!r} cannot be read: {why}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ProfileError(
            f"{label}: a profile has at most {MAX_FILE_BYTES} bytes; this one has more"
        )
    tree = _parse(content, label)
    if not isinstance(tree, Mapping | None):
        raise ProfileError(f"{label}: the top level must be a mapping of keys to values")
    return tree or {}, label


def profile_names() -> list[str]:
    """Names of the profiles that are installed with the package."""
    return sorted(file.stem for file in _configs().glob("*.yaml"))


def _configs() -> Path:
    return Path(str(resources.files("configs")))


def suggestion(word: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest valid word, or "" if none is near.

    Nearest are keys of which only the section is missing.
    """
    words = list(valid)
    ended = [each for each in words if each.endswith(f".{word}")]
    begun = [each for each in words if "." in word and each.startswith(word)]
    near = ended or begun[:1] or difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses duplicate keys and reads ``1e-3`` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str | bytes, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ProfileError(f"{source}: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ProfileError(f"{source}: not valid YAML: {error}") from None
    except (LookupError, AttributeError):  # PyYAML raises these for `!!bool x`
        raise ProfileError(f"{source}: not valid YAML: its tag does not suit a value") from None
    except RecursionError:
        raise ProfileError(f"{source}: not valid YAML: nested too deeply") from None
