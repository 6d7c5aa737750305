"""Modules that see one sequence at a time in packed passes: recurrent layers, sparse attention, and
rotary tables that depend on the length of a sequence (longrope, dynamic NTK).

Recurrent modules (delta rules, state spaces, short convolutions) keep states in the model's cache,
sparse attention keeps the keys of its indexer there (`moe.describe.stateful` finds them).
`serve_packed` lets them serve packed passes. A prompt goes through such a module by itself, in
parts that end where recurrent states are kept. A decode pass goes through it one token after the
other, in recurrent modules those of all sequences as a batch: so a token gets the same states
whether it is drafted or not, and the states after each token are kept until drafts are verified.
Rotary tables are computed as if no other sequence had been read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe.network.attention import MaskRule, current_pass
from moe.network.own_cache import OwnLayer
from moe.network.packed_pass import PackedCache
from moe.settings.device import to_device

# Names that transformers' `dynamic_rope_update` gives what a rotary module keeps.
_ORIGINAL, _FREQUENCIES, _LENGTH = "original_inv_freq", "inv_freq", "max_seq_len_cached"


@dataclass(frozen=True)
class StatefulModules:
    """Modules that see one sequence at a time.

    Attributes:
        recurrent: keep states of a fixed size; tokens of several sequences may run as a batch.
        attention: attend by an indexer's choice, or by positions that they compute themselves.
        rotary: their tables depend on the length of the sequence.
        own_layers: in which some of `attention` keep more than keys.
        position_dims: see `moe.network.own_cache.OwnCache`.
        distances: arguments by which `attention` is given the distance of each query from each key,
            where the model computes them for all layers; each sequence gets its own.
    """

    recurrent: list[nn.Module] = field(default_factory=list)
    attention: list[nn.Module] = field(default_factory=list)
    rotary: list[nn.Module] = field(default_factory=list)
    own_layers: Mapping[int, OwnLayer] = field(default_factory=dict)
    position_dims: int = 0
    distances: frozenset[str] = frozenset()


def serve_packed(modules: StatefulModules) -> None:
    """Let these modules serve packed passes from now on; other passes stay as they are."""
    for module in modules.recurrent:
        module.forward = partial(_forward, module.forward, together=True)
    for module in modules.attention:
        module.forward = partial(
            _forward, module.forward, together=False, distances=modules.distances
        )
    for module in modules.rotary:
        module.forward = partial(_forward, partial(_afresh, module, module.forward), together=False)


def depends_on_length(module: nn.Module) -> bool:
    """It is a rotary module that chooses its frequencies by the longest position that it is given
    (transformers' ``dynamic_rope_update``)."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def _afresh(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``own`` without what a rotary module has kept of the lengths that it was given before."""
    for name, frequencies in list(module.named_buffers(recurse=False)):
        if name.endswith(_ORIGINAL):
            kept = name.removesuffix(_ORIGINAL) + _FREQUENCIES
            setattr(module, kept, frequencies.clone())
    for name in [name for name in vars(module) if name.endswith(_LENGTH)]:
        setattr(module, name, getattr(module, "original_max_seq_len", getattr(module, name)))
    return own(*args, **kwargs)


def _forward(
    own: Callable[..., Any],
    *args: Any,
    together: bool,
    distances: Set[str] = frozenset(),
    **kwargs: Any,
) -> Any:
    """
    Args:
        together: tokens of several sequences run as a batch in decode passes.
        distances: see `StatefulModules`.
    """
    cache = current_pass.get(None)
    if cache is None or cache.is_running:  # the latter: a module inside another one of these
        return own(*args, **kwargs)
    device = next(each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    outputs, order = [], list[int]()
    starts = [sum(cache.sizes[:index]) for index in range(len(cache.sizes))]
    for running, token, size in _calls(cache, together):
        rows = [starts[index] + token + at for index in running for at in range(size)]
        with cache.running(running, token, size):
            chosen = _Rows(cache, _index(rows, device), len(rows), len(running), device)
            given = {name: chosen.of(kwargs[name]) for name in kwargs.keys() - distances}
            given |= {name: cache.distances(device) for name in kwargs.keys() & distances}
            output = own(*map(chosen.of, args), **given)
        outputs.append(_as_row(output, len(running), size))
        order += rows
    if len(outputs) == 1:
        return output if len(running) == 1 else outputs[0]
    joined = _joined(outputs)
    return joined if order == sorted(order) else _ordered(joined, _index(np.argsort(order), device))


def _calls(cache: PackedCache, together: bool) -> Iterator[tuple[list[int], int, int]]:
    """Yield each call of a module: the sequences, the first token of each, and how many tokens."""
    if not cache.decoding:
        for index, size in enumerate(cache.sizes):
            edges = [0, *(at for at in cache.snapshots[index] if at < size), size]
            yield from (([index], begin, end - begin) for begin, end in pairwise(edges))
        return
    for token in range(max(cache.sizes)):
        running = [index for index, size in enumerate(cache.sizes) if size > token]
        yield from ((own, token, 1) for own in ([running] if together else [[i] for i in running]))


def _index(rows: Sequence[int] | np.ndarray, device: torch.device) -> slice | Tensor:
    """Return an index that chooses rows without a wait for the device, as a list would."""
    first, end = int(rows[0]), int(rows[0]) + len(rows)
    if np.array_equal(rows, range(first, end)):
        return slice(first, end)
    return to_device(np.asarray(rows), device)


@dataclass(frozen=True)
class _Rows:
    """Arguments of a call: some rows of what is packed, ``count`` of them."""

    cache: PackedCache
    rows: slice | Tensor
    count: int
    batch: int
    device: torch.device

    def of(self, value: Any) -> Any:
        """An argument for these rows only: ``(1, T, ...)`` tensors are cut, as a sequence or a
        batch."""
        total = sum(self.cache.sizes)
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
            chosen = value if self.count == total else value[:, self.rows]
            return chosen.transpose(0, 1) if self.batch > 1 else chosen
        rows = self.cache.table_rows
        if isinstance(value, Tensor) and self.batch == 1 and value.shape[:2] == (1, rows):
            return self.cache.running_table(value)
        if isinstance(value, MaskRule) and self.batch == 1:
            return self.cache.mask(value, self.count, self.device)
        if isinstance(value, tuple | list):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        return value


def _as_row(output: Any, batch: int, size: int) -> Any:
    """Outputs for ``(batch, size, ...)`` tokens as one row; None for tensors that are no such."""
    if isinstance(output, Tensor):
        if output.shape[:2] != (batch, size):
            return None
        return output.transpose(0, 1) if batch > 1 else output
    if isinstance(output, tuple):
        return tuple(_as_row(each, batch, size) for each in output)
    return output


def _joined(outputs: Sequence[Any]) -> Any:
    if any(output is None for output in outputs):
        return None
    if isinstance(outputs[0], Tensor):
        return torch.cat(_level(outputs), 1)
    if isinstance(outputs[0], tuple):
        return tuple(_joined(each) for each in zip(*outputs, strict=True))
    return outputs[0]


def _level(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Give outputs equal last dimensions, by repeating the first entry: where a history is short,
    an indexer has chosen fewer keys."""
    most = max(output.shape[-1] for output in outputs)
    return [
        torch.cat([each, each[..., :1].expand(*each.shape[:-1], most - each.shape[-1])], -1)
        if each.shape[-1] < most and not each.is_floating_point()
        else each
        for each in outputs
    ]


def _ordered(output: Any, order: slice | Tensor) -> Any:
    if isinstance(output, Tensor):
        return output[:, order]
    return tuple(_ordered(each, order) for each in output) if isinstance(output, tuple) else output
