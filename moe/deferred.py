"""Modules of other packages that are imported when they are first used, not before.

transformers imports what few models need each time that a network is built: torch's compiler, its
sharded tensors, scipy's optimisers; and torch imports sympy for each operation on the meta device,
whose sizes could be symbols. They take three times as long as all the rest. `defer` puts a
`DeferredModule` in their places. The first use of anything that is not listed here imports the
module in its own place, and nobody sees a difference but the time.

Names that transformers takes out of such a module while it is imported itself are listed: they
become stand-ins. Nothing is an instance of a class whose module has never run, so the stand-in of a
class can answer `isinstance` without it. Decorators for the compiler take effect when it comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any


def _equal(one: int | Sequence[int], other: int | Sequence[int]) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return one == other
    return [*one] == [*other]


PLAIN: Mapping[str, tuple[type, Callable[..., int]]] = {
    "expect_true": (bool, bool),
    "guard_or_false": (bool, bool),
    "guard_or_true": (bool, bool),
    "guard_size_oblivious": (bool, bool),
    "statically_known_true": (bool, bool),
    "sym_and": (bool, lambda *each: all(each)),
    "sym_or": (bool, lambda *each: any(each)),
    "sym_eq": (int, _equal),
    "is_nested_int": (int, lambda _: False),
    "has_guarding_hint": (int, lambda _: True),
    "guarding_hint_or_throw": (int, int),
}
"""Functions about sizes that may be symbols, which each operation on the meta device asks: the type
of numbers that are none, and what they return for these."""
DEFERRED: Mapping[str, Sequence[str]] = {
    "torch._dynamo": (),
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "torch.distributed.tensor": (
        *("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    ),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.placement_types": ("Shard", "_StridedShard"),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "torch.distributed.checkpoint.hf_storage": (
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
    ),
    "torch.distributed.checkpoint": (),
    "torch.nn.attention.flex_attention": (
        "BlockMask",
        "create_block_mask",
        "flex_attention",
        "AuxRequest",
    ),
    "torch.fx.experimental.symbolic_shapes": (*PLAIN,),
    "sympy": ("Basic",),
    "scipy.optimize": ("linear_sum_assignment",),
    "transformers.models": (),
}
"""Modules, and the names in them that others take while they are imported."""
FOLDERS = ("transformers.models",)
"""Packages that do not run for the sake of their parts: this one looks for names in 2,000 files."""
COMPILER = "torch._dynamo"
MARKS = ("allow_in_graph", "assume_constant_result")
"""Its decorators that return the function they are given."""
VALUES = ("Partial", "Replicate", "Shard")
"""Classes of which transformers makes constants: they are made when one is looked at."""

_lock = RLock()


def defer() -> None:
    """Defer the modules of `DEFERRED` that are not imported yet, in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class DeferredModule(ModuleType):
    """A module that has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # asked for by the machinery of imports
            raise AttributeError(name)
        own = self.__name__
        if own == COMPILER and name in MARKS:
            return _mark(self, name)
        if own == COMPILER and name == "disable":
            return partial(_disable, self)
        if name in DEFERRED[own]:
            made = _StandIn(name, (), {"__module__": own})
            setattr(self, name, made)
            return made
        return getattr(run(self), name)


def run(module: Any) -> Any:
    """Import a deferred module in its own place; any other is returned as it is."""
    with _lock:
        if not isinstance(module, DeferredModule):
            return module
        name, marks = module.__name__, module.__dict__.pop("_marks", [])
        parent = name.rpartition(".")[0]
        if parent in sys.modules:
            run(sys.modules[parent])
        spec = _found(name)
        assert spec is not None
        assert spec.loader is not None
        for key in [key for key, value in vars(module).items() if isinstance(value, _StandIn)]:
            delattr(module, key)
        plain: Any = module
        plain.__class__ = ModuleType
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(module)
        for mark, function in marks:
            getattr(module, mark)(function)
        return sys.modules[name]  # a module may have put another in its place


def _mark(module: ModuleType, name: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        if isinstance(module, DeferredModule):
            module.__dict__.setdefault("_marks", []).append((name, function))
            return function
        return getattr(module, name)(function)

    return mark


def _disable(
    module: ModuleType, function: Any = None, recursive: bool = True, **options: Any
) -> Any:
    """`torch._dynamo.disable`: keeps the compiler, once it is there, from a function."""
    if function is None:
        return partial(_disable, module, recursive=recursive, **options)
    if not isinstance(function, FunctionType):
        return run(module).disable(function, recursive, **options)
    disabled: list[Any] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(module, DeferredModule):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(module.disable(function, recursive, **options))
        return disabled[0](*args, **kwargs)

    return call


class _Value:
    """An object that is made when it is first looked at."""

    def __init__(self, make: Callable[[], Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __getattribute__(self, name: str) -> Any:
        return getattr(_made(self), name)

    def __eq__(self, other: object) -> bool:
        return bool(_made(self) == (_made(other) if type(other) is _Value else other))

    def __hash__(self) -> int:
        return hash(_made(self))

    def __repr__(self) -> str:
        return repr(_made(self))


def _made(value: _Value) -> Any:
    own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    if "_value" not in own:
        own["_value"] = own["_make"]()
    return own["_value"]


class _StandIn(type):
    """A class or function of a deferred module."""

    def __new__(mcs, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(mcs, name, bases, names)
        real = tuple(_real(base) if isinstance(base, _StandIn) else base for base in bases)
        return type(real[0])(name, real, names)  # a class that is derived from it

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ in PLAIN and not kwargs:
            kind, answer = PLAIN[cls.__name__]
            if _all_are(kind, args) or (answer is _equal and _all_hold(kind, args)):
                return answer(*args)
        if cls.__name__ in VALUES and _waits(cls):
            return _Value(lambda: _real(cls)(*args, **kwargs))
        return _real(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(_real(cls), name)

    def __instancecheck__(cls, value: object) -> bool:
        return not _waits(cls) and isinstance(value, _real(cls))

    def __subclasscheck__(cls, other: type) -> bool:
        return other is cls or (not _waits(cls) and issubclass(other, _real(cls)))


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return bool(values) and all(type(value) is kind for value in values)


def _all_hold(kind: type, values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, tuple | list) and all(type(item) is kind for item in value)
        for value in values
    )


def _waits(stand_in: _StandIn) -> bool:
    return isinstance(sys.modules[stand_in.__module__], DeferredModule)


def _real(stand_in: _StandIn) -> Any:
    return getattr(run(sys.modules[stand_in.__module__]), stand_in.__name__)


def _found(name: str) -> ModuleSpec | None:
    """Find a module by everything else that finds modules."""
    package = name.rpartition(".")[0]
    path = sys.modules[package].__path__ if package else None
    others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
    return next(filter(None, (finder.find_spec(name, path) for finder in others)), None)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `DEFERRED`, and runs one before a part of it that is not listed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        parent = sys.modules.get(package)
        waits = isinstance(parent, DeferredModule)
        if name in DEFERRED and (waits or package not in DEFERRED):
            found = _found(name)
            if found is None:
                return None
            spec = ModuleSpec(name, self, origin=found.origin)
            spec.submodule_search_locations = found.submodule_search_locations
            return spec
        if parent is not None and waits and package not in FOLDERS:
            run(parent)
            if name in sys.modules:
                return ModuleSpec(name, _Found())
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Found(Loader):
    """The specification of a module that its package has imported."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass
