"""What a lane brings to an MoE layer, who serves it there, and torch's modes while it sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from experts.dispatch import Failure
from routing import Phase, Routing


@dataclass(eq=False)
class Visit:
    """Tokens at an MoE layer.

    Attributes:
        layer: index of the MoE layer, counted over MoE layers only.
        hidden_states: ``(T, H)``, the rows to run through experts.
        routing: T rows of expert ids and weights.
        phase: what the tokens are read for; set by the lane that brings them.
        received: ``(T,)`` float32, mean attention to each token from itself and later ones of the
            pass; None where nobody asked or it is not known.
        lost: rows that got zeros because an expert could not be had or run, and why.
    """

    layer: int
    hidden_states: Tensor
    routing: Routing
    phase: Phase = "prefill"
    received: Tensor | None = None
    lost: dict[int, Failure] = field(default_factory=dict)


ExpertsRunner = Callable[[int, Sequence[Visit]], Sequence[Tensor | Exception]]
"""Runs one MoE layer for all visits: ``(layer, visits) -> rows of each visit, (T_i, H)``, or why
one of several cannot be served."""


class GradMode(NamedTuple):
    """The thread-local modes of torch that a sleeping lane must not leak to others."""

    grad: bool
    inference: bool

    @classmethod
    def current(cls) -> GradMode:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield
