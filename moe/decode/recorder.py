"""The recorder of a decode token: a dispatch mode that sees every operation of torch.

What depends on the token, its position or the sequence's states is a `Value` in a buffer, and each
operation on values is recorded; all else is a constant. Tensors of the whole history are followed
(`moe.decode.history`), and must not be read by what is recorded. Operations on complex numbers, as
some rotary tables are, are recorded as operations on their real and imaginary parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kernels.cpu.program import Space
from moe.decode.history import (
    SPARE,
    Histories,
    HistoryTooShort,
    Indexer,
    Lineage,
    pools_chosen,
    scored_by,
)
from moe.describe.description import NotDescribed, RotaryTable
from moe.describe.parts import same
from moe.kv.layout import LayerKey, StateKey
from moe.network.attention import MaskRule


@dataclass(frozen=True)
class Value:
    """A tensor that varies from token to token.

    Attributes:
        buffer: which memory it lies in.
        meta: its sizes, strides and offset there, on the meta device.
    """

    buffer: int
    meta: Tensor

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Value:
        """The same memory seen through a view."""
        return Value(self.buffer, view(self.meta))


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Attributes:
        name: ``mul``, ``topk``, ... of aten, without the underscore of those in place; ``gated``,
            ``scan``, ``convolve`` of `kernels.recurrence`; or ``projection``, ``attention``,
            ``indexer``, ``experts``.
        args, kwargs: with a `Value` for each tensor that varies; other tensors are constants.
        outputs: what it makes or changes.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]


@dataclass
class DecodeTrace:
    """The trace of one token.

    Attributes:
        inputs: buffers that are given: embedding, token id, position.
        before, after: each recurrent state of the sequence before the token and after it.
        initial: what states of integers hold before the first token, where that is not 0: ids of
            tokens that are none.
        logits: ``(..., V)`` of the token.
        hidden: ``(..., H)``, its final hidden state; None: the token does not have one.
    """

    operations: list[Operation] = field(default_factory=list)
    inputs: dict[int, Space] = field(default_factory=dict)
    before: dict[StateKey, Value] = field(default_factory=dict)
    after: dict[StateKey, Value] = field(default_factory=dict)
    initial: dict[StateKey, int] = field(default_factory=dict)
    logits: Value | None = None
    hidden: Value | None = None


class Recorder(TorchDispatchMode):
    """Records operations on tensors that vary.

    Args:
        known: names of operations to record; others are recorded as what they consist of.
    """

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self.trace = DecodeTrace()
        self._known = known
        self.paused = False
        self.cached: dict[LayerKey, tuple[Tensor, ...]] = {}
        self.read: dict[LayerKey, tuple[Tensor, Tensor]] = {}
        self.histories = Histories()
        self.rules: dict[int, tuple[MaskRule, Tensor]] = {}
        self.rates: dict[LayerKey, int] = {}  # of caches of entries
        self.joined: list[Sequence[Tensor]] = []  # what was concatenated
        self.tables: list[RotaryTable] = []  # of all tokens
        self._choices: dict[LayerKey, tuple[Indexer, Tensor]] = {}
        self._buffers: dict[int, int] = {}
        self._bases: list[Tensor] = []
        self._kept: list[Tensor] = []  # so that no memory is given out twice

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run operations without recording them."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def give(self, tensor: Tensor, space: Space) -> None:
        """A tensor that a step is given."""
        self.trace.inputs[self._new(tensor)] = space

    def value(self, tensor: Tensor) -> Value | Tensor:
        """The value of a tensor; a constant is itself."""
        if self.histories.has((tensor,)):
            raise NotDescribed("something else than attention reads a whole history")
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor
        base = self._bases[buffer]
        if base.dtype.itemsize != tensor.dtype.itemsize or tensor.is_complex():
            raise NotDescribed(f"memory of {base.dtype} is read as {tensor.dtype}")
        view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Value(buffer, view if view.dtype == tensor.dtype else view.view(tensor.dtype))

    def rule(self, mask: MaskRule | Tensor) -> MaskRule:
        """The rule of an attention, or behind the mask that a module was given in its place."""
        if isinstance(mask, Tensor):
            known = self.rules.get(mask.untyped_storage().data_ptr())
            if known is None:
                raise NotDescribed("a layer changes which keys a token sees")
            return known[0]
        return mask

    def choice_of(self, mask: Any, module: nn.Module) -> tuple[Indexer, Tensor] | None:
        """The indexer behind a mask of the keys that it chose, and their positions ``(most,)``;
        None where an attention's rule stands behind the mask.

        Args:
            module: the attention; the indexer's parameters are among its own.
        """
        if not isinstance(mask, Tensor) or mask.untyped_storage().data_ptr() in self.rules:
            return None
        lineage = self.histories.lineage(mask)
        cache = lineage.caches[0] if len(lineage.caches) == 1 else None
        if cache is None or cache not in self.read or len(self.cached[cache]) != 1:
            return None
        with self.pause():
            rows = self.read[cache][0][0, 0]
            found = pools_chosen(lineage, mask, rows, module, self.tables)
            if found is None:
                return None
            indexer, *queries = found
            positions = torch.zeros(indexer.most, dtype=torch.int64)
        known = self._choices.get(cache)
        if known is None:
            known = self._choices[cache] = indexer, positions
            self.record("indexer", (indexer, *queries, *self.cached[cache]), {}, [positions])
        return known

    def record(self, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        """An operation whose outputs vary."""

        def read(x: Any) -> Any:
            return self.value(x) if isinstance(x, Tensor) else x

        if name == "cat":
            self.joined.append(args[0])
        args, kwargs = tree_map(read, (tuple(args), dict(kwargs)))
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() not in self._buffers:
                self._new(tensor)
        made = [self.value(tensor) for tensor in outputs]
        values = tuple(value for value in made if isinstance(value, Value))
        self.trace.operations.append(Operation(name, args, kwargs, values))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        written = _written(func, args, kwargs)
        if self.histories.has(tensors):
            outputs = func(*args, **kwargs)
            made = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
            last = self.histories.lineage(tensors[0]).last
            if last is not None and _name_of(func) == "slice" and same(outputs, last):
                return last
            self._follow(_name_of(func), tensors, made)
            return outputs
        if not any(map(self.varies, tensors)):
            return func(*args, **kwargs)
        for tensor in written:
            if not self.varies(tensor):  # a constant until now: a copy holds what it was
                self.record("copy", (None, tensor.clone()), {}, [tensor])
        name = _name_of(func)
        form = _real_form(name, args)
        if form is not None and not written:
            with self:
                return form(*args, **kwargs)
        if name not in self._known:
            with self:  # a dispatch mode is off in its own handler
                outputs = func.decompose(*args, **kwargs)
            if outputs is not NotImplemented:
                return outputs
        outputs = func(*args, **kwargs)
        made = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
        if not made:
            raise NotDescribed(f"'{name}' reads a number back from the pass")
        if written or not all(map(self.varies, made)):
            self.record(name, args, kwargs, written or made)
        return outputs

    def _follow(self, name: str, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note what an operation makes of a whole history, and of the token's tensors that it
        meets."""
        met = [x for x in tensors if self.varies(x) and not self.histories.has((x,))]
        lineage = self.histories.joined(name, tensors, met)
        if name == "topk":
            chosen = self._choice(lineage, tensors[0], made[1])
            lineage = lineage._replace(chosen=chosen, scores=tensors[0])
        cache = lineage.caches[0] if len(lineage.caches) == 1 else None
        if name == "cat" and cache in self.rates and cache not in self.cached and len(met) == 1:
            self.cached[cache], self.read[cache] = (met[0],), (made[0][:, None], made[0][:, None])
            lineage = Lineage((cache,))
        self.histories.add(made, lineage)

    def _choice(self, lineage: Lineage, scores: Tensor, indices: Tensor) -> Tensor | None:
        """The positions that an indexer chooses by these scores; None if none is known to."""
        cache, top_k = lineage.caches[0] if len(lineage.caches) == 1 else None, indices.numel()
        if cache is None or cache not in self.read or len(self.cached[cache]) != 1:
            return None
        keys = self.read[cache][0][0, 0]
        found = scored_by(lineage, scores, keys)
        if found is None:
            return None
        if len(keys) < top_k + SPARE:
            raise HistoryTooShort(f"an indexer chooses {top_k} keys or more")
        chosen = indices.reshape(-1).clone()
        indexer = Indexer(cache, top_k, rate=self.rates.get(cache, 1))
        self.record("indexer", (indexer, *found, *self.cached[cache]), {}, [chosen])
        return chosen

    def varies(self, tensor: Tensor) -> bool:
        """Return whether it is a value."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _new(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        buffer = self._buffers[storage.data_ptr()] = len(self._bases)
        size = storage.nbytes() // tensor.dtype.itemsize
        self._bases.append(torch.empty(size, dtype=tensor.dtype, device="meta"))
        self._kept.append(tensor)
        return buffer


class ReadList(list[int]):
    """The numbers of a value that were read back from the pass, and the value itself."""

    def __init__(self, tensor: Tensor, numbers: list[int]) -> None:
        super().__init__(numbers)
        self.tensor = tensor


class ListsRead(TorchFunctionMode):
    """Lets lists of a recorded value's numbers remember the value: how many rows each expert gets.

    The list itself is that of the recorded token. What a model does with it must be known
    (`moe.decode.trace` replaces modules that are called with one), or a proof fails.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor and isinstance(args[0], ReadList):
            return args[0].tensor
        made = func(*args, **kwargs)
        if func is Tensor.tolist and args[0].ndim == 1 and self._recorder.varies(args[0]):
            return ReadList(args[0], made)
        return made


def _name_of(func: Any) -> str:
    """Without the underscore of operations in place; ours are of the namespace ``moe``."""
    name: str = func._schema.name.removeprefix("aten::").removeprefix("moe::")
    return name if name.endswith("__") else name.removesuffix("_")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [value] if isinstance(value, Tensor) else []
    return found


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return _joined(size * angle.cos(), size * angle.sin())


def _mul(a: Any, b: Any) -> Tensor:
    """One of them may be real, or a number."""
    if not _is_complex(a):
        a, b = b, a
    pairs = torch.view_as_real(a)
    if not _is_complex(b):
        scale = b[..., None] if isinstance(b, Tensor) and b.ndim else b
        return torch.view_as_complex((pairs * scale).contiguous())
    others = torch.view_as_real(b)
    real, imaginary, *_ = pairs.unbind(-1)
    other_real, other_imaginary, *_ = others.unbind(-1)
    return _joined(
        real * other_real - imaginary * other_imaginary,
        real * other_imaginary + imaginary * other_real,
    )


def _joined(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


_REAL_FORMS: Mapping[str, Callable[..., Tensor]] = {"polar": _polar, "mul": _mul}
"""By aten's name: the same result, views and real operations only."""


def _real_form(name: str, arguments: Any) -> Callable[..., Tensor] | None:
    """Return a function that computes an operation of these arguments without complex arithmetic;
    None if it has none or needs none."""
    if name == "polar" or any(map(_is_complex, arguments)):
        return _REAL_FORMS.get(name)
    return None
