"""Recurrent layers of packed passes run on our kernels (`kernels.recurrence`).

transformers' recurrent modules call functions of FLA, causal-conv1d and mamba-ssm where those are
installed, else its own torch functions of the same public names and arguments; both stand as
globals in the modeling file. `use_kernels` puts ours in their place, by those public names: each
only if it equals the function that it replaces on random inputs, on the type of device at hand, and
only for packed passes, as a modeling file serves the whole process. With them a sequence's bits
depend neither on its company nor on how its prompt is cut.

transformers' Mamba scan takes no state and begins each pass anew. Ours goes on from the state that
the module has asked its cache for, so that such prompts can be cut, too.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from kernels.backends import enable_recurrence
from moe.network.attention import current_pass
from moe.network.recurrent_functions import FUNCTIONS, Function, normal_on

_TOLERANCE = 1e-4
"""Largest difference of float32 outputs and states, relative to the largest value."""

_CPU = torch.device("cpu")


@contextmanager
def without_advice() -> Iterator[None]:
    """Without transformers' advice to install the packages whose place our kernels take."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")

    def is_none(record: logging.LogRecord) -> bool:
        return "falling back to its reference" not in record.getMessage()

    logger.addFilter(is_none)
    try:
        yield
    finally:
        logger.removeFilter(is_none)


@dataclass
class _Seam:
    """A function of a modeling file that others may stand for.

    Attributes:
        own: what transformers has there.
        proven: by type of device, those of our functions that equal it there.
        why: by type of device, why there are none, or empty.
    """

    own: Callable[..., Any]
    proven: dict[str, list[Function]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def prove(self, ours: Sequence[Function], device: torch.device) -> None:
        self.proven[device.type], self.why[device.type] = _prove(self.own, ours, device)

    def serving(self, tensors: Iterable[Tensor]) -> Sequence[Function]:
        """Our functions for these; for meta tensors those of any device."""
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"meta"}:
            return next(filter(None, self.proven.values()), ())
        kinds.discard("meta")
        return self.proven.get(kinds.pop(), ()) if len(kinds) == 1 else ()


_seams: dict[tuple[str, str], _Seam] = {}
"""By module and name of each function."""


def use_kernels(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Replace the functions with public names that these modules may call, where ours are equal on
    the modules' devices.

    Returns:
        Of each public name found: empty if it is replaced, else why not.
    """
    found = dict[str, str]()
    for source, device in {(type(module).__module__, _device(module)) for module in modules}:
        reason = enable_recurrence(device)
        names = vars(sys.modules[source])
        for name, own in list(names.items()):
            public = _public_name(own)
            if public is None:
                continue
            if reason:
                found[public] = reason
                continue
            seam = _seams.setdefault((source, name), _Seam(own))
            if device.type not in seam.why:
                seam.prove(FUNCTIONS[public], device)
                if seam.proven[device.type] and names[name] is seam.own:
                    names[name] = _replacement(seam)
            found[public] = seam.why[device.type]
    return found


def _device(module: nn.Module) -> torch.device:
    """Return the device of a module's weights; the CPU if they have no memory, as where passes are
    measured."""
    device = next((weight.device for weight in module.parameters()), _CPU)
    return _CPU if device.type == "meta" else device


def _public_name(function: Any) -> str | None:
    """The name by which others call a function, as transformers' decorator says; None if it is none
    that we know, or there is no decorator."""
    function = inspect.unwrap(function, stop=_is_seam) if inspect.isfunction(function) else None
    if function is None or not _is_seam(function):
        return None
    name = inspect.getclosurevars(function).nonlocals["func_name"]
    return name if name in FUNCTIONS else None


def _is_seam(function: Any) -> bool:
    return "func_name" in getattr(getattr(function, "__code__", None), "co_freevars", ())


def _prove(
    own: Callable[..., Any], ours: Sequence[Function], device: torch.device
) -> tuple[list[Function], str]:
    """The functions that equal ``own`` on their examples; and why there is none."""
    proven, why = list[Function](), ""
    for function in ours:
        gap = 0.0
        try:
            for args, kwargs in function.examples(normal_on(device)):
                theirs = deepcopy((args, kwargs))
                expected = own(*theirs[0], **theirs[1]), theirs
                actual = function.run(*args, **kwargs), (args, kwargs)
                gap = max(gap, _gap(actual, expected))
        except Exception as error:  # it has another form than we know
            why = f"raised {type(error).__name__}: {error}"
            continue
        if gap <= _TOLERANCE:
            proven.append(function)
        else:
            why = f"differs from transformers' own by {gap:.1e}"
    return proven, "" if proven else why


def _gap(actual: Any, expected: Any) -> float:
    """Largest difference of tensors in the same places, relative to the largest value."""
    if isinstance(expected, Tensor):
        size = expected.abs().max().clamp_min(1e-6)
        gap = float((actual - expected).abs().max() / size)
        return gap if actual.shape == expected.shape and gap == gap else float("inf")
    if isinstance(expected, dict):
        return max((_gap(actual[name], expected[name]) for name in expected), default=0.0)
    if isinstance(expected, tuple):
        return max((_gap(*both) for both in zip(actual, expected, strict=True)), default=0.0)
    return 0.0


def _replacement(seam: _Seam) -> Callable[..., Any]:
    @wraps(seam.own)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        joined = any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
        if current_pass.get(None) is not None and not joined:
            for function in seam.serving(tensors):
                done = function.run(*args, **kwargs)
                if done is not NotImplemented:
                    return done
        return seam.own(*args, **kwargs)

    return run
