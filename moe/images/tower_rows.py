"""`TowerRows`: what a model's towers made of pictures, kept from one prompt to the next.

A chat sends its pictures again with every turn. The rows that a tower makes of a picture depend on
its pixels after the processor, and on nothing of the text: so they are kept by these, picture by
picture where a tower gives the same rows for a picture alone as beside another.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe.describe.probe import TOLERANCE, difference

_METHOD = "get_image_features"  # transformers' name, in every class that has towers
KEPT_BYTES = 256 << 20
"""Most bytes of rows that are kept, in the machine's memory: some ten photos of a large model."""

_Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call


class TowerRows:
    """Calls the towers of a model, or gives what they made of the same pictures before.

    The first call with several pictures, which `enable_images` makes at load, encodes them together
    and one by one. Where that gives the same rows, every later call encodes only the pictures that
    are not kept, each alone: the rows of a picture are then the same bits beside any others. Else
    the pictures of a call are kept together.

    Not safe for several threads: `ImageReader` reads one prompt at a time.

    Args:
        model: the whole multimodal model.
        most_bytes: of rows that are kept; those that were asked for last stay.

    Attributes:
        encoded: pictures that a tower encoded; sets of pictures where they are kept together.
        reused: those whose rows were kept.
        kept_bytes: bytes of the rows that are kept.
    """

    def __init__(self, model: nn.Module, most_bytes: int = KEPT_BYTES) -> None:
        self.encoded = self.reused = self.kept_bytes = 0
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, tuple[Any, torch.device, int]] = OrderedDict()
        for name, module in model.named_modules():
            if hasattr(module, _METHOD) and not _is_around(module):
                setattr(module, _METHOD, self._remembering(name, getattr(module, _METHOD)))

    def figures(self) -> dict[str, int]:
        """The counters, ready for JSON."""
        return {"encoded": self.encoded, "reused": self.reused, "kept_bytes": self.kept_bytes}

    def reset(self) -> None:
        """Count from here on."""
        self.encoded = self.reused = 0

    def _remembering(self, name: str, encode: Callable[..., Any]) -> Callable[..., Any]:
        alone: bool | None = None  # not known before the first call with several pictures

        def rows(*given: Any, **named: Any) -> Any:
            nonlocal alone
            call: _Given = given, named
            parts = None if alone is False else _by_picture(call)
            if parts is None or len(parts) < 2:
                return self._of(name, encode, call)
            if alone:
                return _joined([self._of(name, encode, part) for part in parts])
            together = self._of(name, encode, call)
            try:
                apart = [self._of(name, encode, part) for part in parts]
                alone = _same(together, _joined(apart))
            except Exception:  # towers are many programs: this one reads no picture alone
                alone = False
            return together

        return rows

    def _of(self, name: str, encode: Callable[..., Any], call: _Given) -> Any:
        """Return a tower's output for the pictures of a call, from what is kept if it is there."""
        given, named = call
        digest = hashlib.blake2b(name.encode(), digest_size=16)
        for part in _content((given, sorted(named.items()))):
            digest.update(part)
        key = digest.digest()
        if key in self._kept:
            self.reused += 1
            self._kept.move_to_end(key)
            kept, device, _ = self._kept[key]
            return _moved(kept, device)
        found = encode(*given, **named)
        self.encoded += 1
        tensors = list(_tensors(found))
        device = tensors[0].device if tensors else torch.device("cpu")
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._kept[key] = _moved(found, torch.device("cpu")), device, nbytes
        self.kept_bytes += nbytes
        while self.kept_bytes > self._most_bytes:
            self.kept_bytes -= self._kept.popitem(last=False)[1][2]
        return found


def _is_around(module: nn.Module) -> bool:
    """Return whether a part of a module has towers, which it calls."""
    return any(hasattr(part, _METHOD) for part in module.modules() if part is not module)


def _by_picture(call: _Given) -> list[_Given] | None:
    """The calls for each picture alone; None where arguments do not show which part is whose.

    Processors give a tensor with a row a picture, or all patches in a row with a grid ``(n, 3)`` of
    integers, whose products are the pictures' patches.
    """
    given, named = call
    tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
    if not tensors or any(tensor.ndim == 0 for tensor in tensors):
        return None
    grids = [each for each in tensors if each.ndim == 2 and each.shape[1] == 3 and not _real(each)]
    sizes = grids[0].prod(1).tolist() if grids else [1] * len(tensors[0])
    splits = {sum(sizes): sizes, len(sizes): [1] * len(sizes)}
    if any(len(tensor) not in splits for tensor in tensors):
        return None

    def part(value: Any, index: int) -> Any:
        return value.split(splits[len(value)])[index] if isinstance(value, Tensor) else value

    return [
        (tuple(part(v, index) for v in given), {k: part(v, index) for k, v in named.items()})
        for index in range(len(sizes))
    ]


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _joined(parts: Sequence[Any]) -> Any:
    """Join a tower's outputs for single pictures into its output for all: a tensor has rows, a
    tuple has pictures, and a list has layers. `_same` shows whether a tower keeps to that."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, tuple):
        return tuple(each for part in parts for each in part)
    if isinstance(first, list):
        return [_joined(layer) for layer in zip(*parts, strict=True)]
    if isinstance(first, Mapping):
        entries = [_entries(part) for part in parts]
        return _like(first, {key: _joined([part[key] for part in entries]) for key in entries[0]})
    return first


def _same(one: Any, other: Any) -> bool:
    """Return whether two results have the same tensors, but for rounding."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        return difference(one, other) <= TOLERANCE.get(one.dtype, 0.0)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping):
        ours, theirs = _entries(one), _entries(other)
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    return bool(one == other)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)([_moved(each, device) for each in value])
    if isinstance(value, Mapping):
        return _like(value, {key: _moved(each, device) for key, each in _entries(value).items()})
    return value


def _entries(value: Any) -> dict[str, Any]:
    """All of a mapping. transformers' `ModelOutput` has what is set late only as an attribute."""
    return {**value, **(vars(value) if is_dataclass(value) else {})}


def _like(example: Any, entries: dict[str, Any]) -> Any:
    """A mapping of an example's class with these `_entries`."""
    made: Any = type(example)
    names = [each.name for each in fields(example)] if is_dataclass(example) else None
    if names is None:
        return made(entries)
    whole = made(**{name: entries.pop(name) for name in names})
    for key, value in entries.items():
        setattr(whole, key, value)
    return whole


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(_entries(value).values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _content(value: Any) -> Iterator[bytes]:
    """All that tells one set of arguments from another."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, list | tuple):
        yield f"{len(value)} ".encode()
        for each in value:
            yield from _content(each)
    else:
        yield f"{value!r} ".encode()
