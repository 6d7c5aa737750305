"""Experts that do not dispatch through transformers' registry, served as if they did.

Some architectures hold the experts of a block as stacked parameters and call them in a way of their
own. `StackedExperts` takes the place of those parameters and dispatches through the registry; small
callables (fronts) stand where the block finds its experts and translate its calls. A front gets ids
and weights in one of two ways:

- The block hands rows, ids and weights to its experts: `ListedFront` reorders them.
- The block hands rows alone, arranged as its router said: one copy of all rows for each expert, or
  sorted by expert. `RouterFront` keeps what the router said, and tells the block that every token
  goes to one expert with weight 1. So the experts get each row once, and `RowsFront` serves them.

`moe.network.adopt` finds out what applies to a block and proves it.
Legend: T tokens, H hidden, K slots a token, E experts, F width of an expert, G = 2F or F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from routing.routing import UNUSED

BOTH = -1
"""A gate's place if one function makes both halves of the first projection one."""

Outputs = tuple[Any, ...]
"""Outputs of a router."""


@dataclass(frozen=True)
class Origin:
    """A parameter of the architecture that is a part of one of `StackedExperts`.

    Attributes:
        name: below the block.
        shape: in checkpoints.
        swapped: each expert's matrix is the transpose of what `StackedExperts` holds.
    """

    name: str
    shape: torch.Size
    swapped: bool

    def part(self, tensor: Tensor, num_experts: int) -> Tensor:
        """``(E, X, Y)`` view of the parameter."""
        parts = tensor.view(num_experts, -1, tensor.shape[-1])
        return parts.transpose(1, 2) if self.swapped else parts


class StackedExperts(nn.Module):
    """Experts with the attributes that transformers' own experts modules declare.

    Args:
        config: of the model.
        gate_up: ``(E, G, H)``.
        down: ``(E, H, F)``.
        activation: of the gate, or of the only first projection, or of both halves at once.
        gate_place: which half of a gated first projection is activated, 0 or 1; BOTH: the
            activation takes both halves ``(S, 2F)`` and gives ``(S, F)``; None: not gated.
        interleaved: rows of the halves come in turn.
        origins: of each parameter, in the order in which they are joined along G.
        spare: experts that checkpoints may hold beyond the E that a token can reach.
    """

    def __init__(
        self,
        config: Any,
        gate_up: Tensor,
        down: Tensor,
        activation: Callable[[Tensor], Tensor],
        gate_place: int | None,
        interleaved: bool,
        origins: tuple[Sequence[Origin], Sequence[Origin]],
        spare: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_experts = down.shape[0]
        self.has_gate = gate_place is not None
        self.has_bias = self.has_post_expert_norm = self.is_transposed = False
        self.is_concatenated = not interleaved
        self.act_fn = activation
        self.spare = spare
        self._gate_place = gate_place
        first = "gate_up_proj" if self.has_gate else "up_proj"
        self.origins: dict[str, Sequence[Origin]] = {first: origins[0], "down_proj": origins[1]}
        for name, tensor in ((first, gate_up), ("down_proj", down)):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        run = ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation]
        rows: Tensor = run(self, hidden, top_k_index, top_k_weights)
        return rows

    def _apply_gate(self, rows: Tensor) -> Tensor:
        if self._gate_place == BOTH:
            return self.act_fn(rows)
        halves = rows.chunk(2, -1) if self.is_concatenated else (rows[..., ::2], rows[..., 1::2])
        assert self._gate_place is not None
        return self.act_fn(halves[self._gate_place]) * halves[1 - self._gate_place]


def stacked_origins(
    model: nn.Module,
) -> Iterator[tuple[str, StackedExperts, str, Sequence[Origin]]]:
    """``(block, experts, name, origins)`` of each parameter of the model's `StackedExperts`.

    ``block`` is the prefix of the origins' names, with its dot; ``name`` the parameter's own, of
    the whole model.
    """
    for path, module in model.named_modules():
        if isinstance(module, StackedExperts):
            block = path.rpartition(".")[0]
            for name, origins in module.origins.items():
                yield f"{block}." if block else "", module, f"{path}.{name}", origins


class RouterReading(Protocol):
    """Reads from a router's outputs which experts a token visits, with which weights."""

    def read(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """``(T, K)`` expert ids and weights."""
        ...

    def to_one(self, outputs: Outputs) -> Outputs:
        """The outputs for which every token goes to one expert, with weight 1."""
        ...


@dataclass(frozen=True)
class Scores:
    """One output is ``(T, E)`` weights, zero for experts that a token does not visit."""

    place: int
    top_k: int

    @classmethod
    def find(cls, outputs: Outputs, tokens: int, experts: int) -> Iterator[RouterReading]:
        for place, value in enumerate(outputs):
            if _is_float(value) and value.shape == (tokens, experts):
                counts = (value != 0).sum(1)
                top_k = int(counts[0])
                if 0 < top_k < experts and bool((counts == top_k).all()):
                    yield cls(place, top_k)

    def read(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        scores: Tensor = outputs[self.place]
        ids = scores.abs().topk(self.top_k, dim=1).indices
        return ids, scores.gather(1, ids)

    def to_one(self, outputs: Outputs) -> Outputs:
        scores: Tensor = outputs[self.place]
        return _with(outputs, {self.place: scores.new_ones(scores.shape[0], 1)})


@dataclass(frozen=True)
class SortedSlots:
    """Outputs are the slots of all tokens sorted by expert: token and weight of each slot, and how
    many each expert has. A token has ``top_k``."""

    tokens: int
    weights: int
    sizes: int
    top_k: int

    @classmethod
    def find(cls, outputs: Outputs, tokens: int, experts: int) -> Iterator[RouterReading]:
        places = range(len(outputs))
        for sizes in places:
            counts = _integers(outputs[sizes])
            slots = sum(counts)
            if len(counts) != experts or not slots or slots % tokens:
                continue
            flat = [p for p in places if _is_flat(outputs[p], slots)]
            for of in flat:
                if _is_float(outputs[of]) or not _each_as_often(outputs[of], tokens):
                    continue
                gates = [gate for gate in flat if _is_float(outputs[gate])]
                yield from (cls(of, gate, sizes, slots // tokens) for gate in gates)

    def read(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        tokens, weights = outputs[self.tokens], outputs[self.weights]
        ends = torch.as_tensor(outputs[self.sizes], device=tokens.device).cumsum(0)
        slots = torch.arange(len(tokens), device=tokens.device)
        ids = torch.searchsorted(ends, slots, right=True)
        order = tokens.argsort(stable=True)
        return ids[order].view(-1, self.top_k), weights[order].view(-1, self.top_k)

    def to_one(self, outputs: Outputs) -> Outputs:
        tokens, sizes = outputs[self.tokens], outputs[self.sizes]
        slots = tokens.shape[0]
        rows = slots // self.top_k
        single = [rows, *[0] * (len(sizes) - 1)]
        changed: dict[int, Any] = {
            self.sizes: sizes.new_tensor(single) if isinstance(sizes, Tensor) else single
        }
        for place, value in enumerate(outputs):
            if place != self.sizes and _is_flat(value, slots):
                one = value.new_ones(rows)
                changed[place] = one if _is_float(value) else one.cumsum(0) - 1
        return _with(outputs, changed)


READINGS: tuple[Callable[[Outputs, int, int], Iterator[RouterReading]], ...] = (
    Scores.find,
    SortedSlots.find,
)
"""Each finds what the outputs of a router for so many tokens and experts may mean."""


def _with(outputs: Outputs, changed: Mapping[int, Any]) -> Outputs:
    return tuple(changed.get(place, value) for place, value in enumerate(outputs))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_flat(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (size,)


def _integers(value: Any) -> list[int]:
    """A list of integers, or a tensor of them; else an empty one."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.ndim == 1 and not value.is_floating_point() else []
    return value if isinstance(value, list) and all(type(v) is int for v in value) else []


def _each_as_often(value: Tensor, count: int) -> bool:
    """Return whether a tensor of integers holds each of ``range(count)``, one as often as the
    other."""
    if int(value.min()) < 0 or int(value.max()) >= count:
        return False
    return len(set(value.bincount(minlength=count).tolist())) == 1


@dataclass
class RouterLink:
    """Keeps what a block's router has said until its experts are called in the same forward."""

    routing: tuple[Tensor, Tensor] | None = None
    rows: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        assert self.routing is not None, "experts are called once after their router"
        routing, self.routing = self.routing, None
        return routing


@dataclass
class RouterFront:
    """Stands for a router's ``forward``."""

    own: Callable[..., Any]
    reading: RouterReading
    link: RouterLink

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.own(*args, **kwargs)
        several = isinstance(outputs, (tuple, list))
        values = tuple(outputs) if several else (outputs,)
        self.link.routing = self.reading.read(values)
        single = self.reading.to_one(values)
        return single if several else single[0]


@dataclass
class FirstFront:
    """Stands for the first projection where a block applies the activation itself.

    It keeps the rows for `RowsFront`, and returns zeros ``(T, G)`` for the block to work on.
    """

    width: int
    link: RouterLink

    def __call__(self, rows: Tensor, *_: Any, **_kw: Any) -> Tensor:
        self.link.rows = rows
        return rows.new_zeros(1, 1).expand(rows.shape[0], self.width)


def serve(
    experts: StackedExperts, rows: Tensor, ids: Tensor, weights: Tensor, scales_input: bool
) -> Tensor:
    """Sums of experts ``(T, H)`` for rows ``(T, H)``, ids and weights ``(T, K)``.

    Args:
        scales_input: an expert's input is scaled by its weight, not its output.
    """
    if not scales_input:
        output: Tensor = experts(rows, ids, weights)
        return output
    scaled = (rows[:, None] * weights[..., None].to(rows.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights)
    output = experts(scaled, ids.reshape(-1, 1), ones.reshape(-1, 1))
    return output.view(*ids.shape, -1).sum(1)


@dataclass
class RowsFront:
    """Stands for experts that are called with rows alone; ``scales_input``: see `serve`."""

    experts: StackedExperts
    link: RouterLink
    scales_input: bool

    def __call__(self, rows: Tensor, *_: Any, **_kw: Any) -> Tensor:
        if self.link.rows is not None:
            rows, self.link.rows = self.link.rows, None
        return serve(self.experts, rows, *self.link.take(), self.scales_input)


@dataclass
class ListedFront:
    """Stands for experts that are called with rows, ids and weights, in an order of their own.

    Attributes:
        places: position or name of rows, ids and weights in the call.
        scales_input: see `serve`.
        returns_input: experts with ids from E on return their input: they have no weights.
    """

    experts: StackedExperts
    places: tuple[int | str, int | str, int | str]
    scales_input: bool
    returns_input: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        rows, ids, weights = (
            args[place] if isinstance(place, int) else kwargs[place] for place in self.places
        )
        flat = rows.reshape(-1, rows.shape[-1])
        if not self.returns_input:
            return serve(self.experts, flat, ids, weights, self.scales_input).view(rows.shape)
        kept = ids >= self.experts.num_experts
        back = weights.masked_fill(~kept, 0.0).sum(1, keepdim=True)
        ids, weights = ids.masked_fill(kept, UNUSED), weights.masked_fill(kept, 0.0)
        output = serve(self.experts, flat, ids, weights, self.scales_input)
        return (output + flat * back.to(flat.dtype)).view(rows.shape)
