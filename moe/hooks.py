"""Hooks: the places where the core calls a method, without the name of any.

A *method* is one published way of doing something that is off by default, changes answers, or
serves one kind of model. It lives in `moe/methods/NAME`, whose `__init__.py` declares a `Method`
called `METHOD`. `methods` finds the folders that are there, so a method is removed with its folder.
A package of anyone's brings more of them, as entry points of the group ``moe.methods``
(examples/routing_policy). A declaration imports no torch: it names its code as
``"module:attribute"``, and that module is imported when the profile switches the method on.

The core calls what methods bring in three ways:

- A `Hook` is a point of the core that each method which is on may fill::

      ALTER = Hook[Callable[[Profile, Backbone, MoELayers], None]]("alter")
      for alter in ALTER.filled(profile):  # by Method(hooks={"alter": "moe.methods.x.code:alter"})
          alter(profile, backbone, experts)

- A `Registry` is of a setting whose value names what does something. Methods add values::

      BACKENDS = Registry[Callable[[], Backend]]("kernels.backend")
      make = BACKENDS.find(profile.kernels.backend)
      # by Method(choices={"kernels.backend": {"x": "moe.methods.x.code:make"}})

- A `ModelHook` is a point of the core that a method fills for the models that it serves::

      MEASURE = ModelHook[Callable[[PreTrainedModel], Footprint]]("measure")
      measure = MEASURE.of(network) or measure_footprint  # by Method(serves=..., hooks={...})

The room that calls defines the hook, with its type. moe/methods/__init__.py says
how to write a method.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from moe.errors import ProfileError
from moe.section import Settings

__all__ = [
    "Hook",
    "Method",
    "ModelHook",
    "Registry",
    "methods",
    "methods_on",
    "moved_keys",
    "readings",
    "reads_again",
]

T = TypeVar("T")
_PACKAGE = "moe.methods"


@dataclass(frozen=True)
class Method:
    """The declaration of a method.

    Attributes:
        about: its mechanism, in a few words.
        price: which figures it changes, and what for.
        hooks: what it brings, ``"module:attribute"``, by the name of the `Hook`.
        choices: the same by the key of a `Registry` and the value that it adds. The method is on if
            the profile has such a value, or a list of them; what follows a colon is an argument.
        settings: the section ``methods.NAME`` of a profile; None: it has no keys of its own.
        switch: the key of that section which switches the method on, if it is not the default.
        changes_answers: how it changes a model's answers, as what completes "it"; such a method is
            refused while ``lossless: true``. Empty: it changes none.
        needs: other keys of the profile with the only value that the method works with.
        moved: former keys of a profile, each with its key of today.
        readings: how often it reads each token, with keys and values of its own each time. With
            more than one, keys and values are in buffers, and prompts have no images.
        serves: ``"module:attribute"`` of a function that tells a model which the method serves. For
            such a model it fills each `ModelHook`, whatever the profile says. Any key of its
            section that is not the default switches it on in a profile.
        files: tests and benchmarks that are about nothing else, from the root of the repository.
            They go when the method goes.
        name: of its folder or entry point, and of its section. `methods` fills it in.
        module: that declares it. `methods` fills it in.
    """

    about: str
    price: str
    hooks: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: type[Settings] | None = None
    switch: str = ""
    changes_answers: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    readings: int = 1
    serves: str = ""
    files: Sequence[str] = ()
    name: str = ""
    module: str = ""

    @property
    def switches(self) -> tuple[str, ...]:
        """The keys of a profile that switch it on."""
        return (*(f"methods.{self.name}.{key}" for key in self._own_switches), *self.choices)

    @property
    def _own_switches(self) -> tuple[str, ...]:
        every = tuple(self.settings.model_fields) if self.serves and self.settings else ()
        return (self.switch,) if self.switch else every

    def on_by(self, profile: Any) -> str:
        """The key of a `Profile` that switches the method on; empty if none does."""
        for key in self._own_switches:
            default = self.settings.model_fields[key].default if self.settings else None
            if attrgetter(key)(getattr(profile.methods, self.name)) != default:
                return f"methods.{self.name}.{key}"
        for key, values in self.choices.items():
            found = attrgetter(key)(profile)
            texts = found if isinstance(found, tuple) else (found,)
            if any(str(text).partition(":")[0] in values for text in texts):
                return key
        return ""


@cache
def methods() -> tuple[Method, ...]:
    """All methods of this installation: ours, then those of other packages, each by name. Imports
    their declarations, and no torch.

    Raises:
        ProfileError: the declaration of another package is not one, or its name is taken.
    """
    found = {}
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        place = f"{_PACKAGE}.{module.name}"
        declared = importlib.import_module(place).METHOD
        found[module.name] = replace(declared, name=module.name, module=place)
    for entry in sorted(entry_points(group=_PACKAGE), key=attrgetter("name", "value")):
        if not entry.name.isidentifier() or entry.name in found:
            raise ProfileError(
                f"{_brought_by(entry)}: the name of a method must be a Python identifier that no "
                f"other method has (there are: {', '.join(found)}); rename it, or uninstall the "
                "package"
            )
        try:
            declared = entry.load()
        except Exception as error:
            raise ProfileError(
                f"{_brought_by(entry)} cannot be imported ({type(error).__name__}: {error}); mend "
                "the package, or uninstall it"
            ) from error
        if not isinstance(declared, Method):
            raise ProfileError(
                f"{_brought_by(entry)} must be a moe.hooks.Method, and is a "
                f"{type(declared).__name__}; mend the package, or uninstall it"
            )
        found[entry.name] = replace(declared, name=entry.name, module=entry.module)
    return tuple(found.values())


def _brought_by(entry: EntryPoint) -> str:
    """An entry point, for messages."""
    package = entry.dist.name if entry.dist is not None else "a package"
    return f"method {entry.name!r} of {package} ({entry.value})"


def methods_on(profile: Any) -> tuple[Method, ...]:
    """The methods that a `Profile` switches on."""
    return tuple(method for method in methods() if method.on_by(profile))


def readings(profile: Any) -> int:
    """Return how often a pass reads each token by this `Profile`, each time with keys and values of
    its own; 1 without a method that says otherwise."""
    return max((method.readings for method in methods_on(profile)), default=1)


def reads_again(profile: Any) -> str:
    """The key that makes `readings` more than 1."""
    return next(one.on_by(profile) for one in methods_on(profile) if one.readings > 1)


@cache
def moved_keys() -> Mapping[str, str]:
    """Former keys of a profile that are keys of methods today."""
    return {old: new for method in methods() for old, new in method.moved.items()}


@dataclass(frozen=True)
class Hook(Generic[T]):
    """A point of the core that methods may fill; ``T`` is the type of what they bring."""

    name: str

    def filled(self, profile: Any) -> list[T]:
        """Return what the methods that a `Profile` switches on bring, in the order of their
        names."""
        return self._of(methods_on(profile))

    def of_all(self) -> list[T]:
        """Return what all methods bring, on or not, in the order of their names."""
        return self._of(methods())

    def _of(self, among: Sequence[Method]) -> list[T]:
        found = [method for method in among if self.name in method.hooks]
        return [cast(T, _imported(method.hooks[self.name])) for method in found]


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The values that methods add to a setting; ``T`` is the type of what they bring for one.

    Attributes:
        key: of the profile.
    """

    key: str

    def names(self) -> tuple[str, ...]:
        """The values that methods add."""
        return tuple(name for method in methods() for name in method.choices.get(self.key, ()))

    def find(self, name: str) -> T | None:
        """Return what a method brings for this value; None: no method has it."""
        for method in methods():
            if (place := method.choices.get(self.key, {}).get(name)) is not None:
                return cast(T, _imported(place))
        return None


@dataclass(frozen=True)
class ModelHook(Generic[T]):
    """A point of the core that methods fill for the models that they serve; ``T`` is the type of
    what they bring."""

    name: str

    def of(self, model: Any) -> T | None:
        """What the method that serves this model brings; None: the core's own way stays."""
        for method in methods():
            if self.name in method.hooks and method.serves and _imported(method.serves)(model):
                return cast(T, _imported(method.hooks[self.name]))
        return None


def _imported(place: str) -> Any:
    """The object at ``"module:attribute"``."""
    module, _, attribute = place.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))
