"""The values that drafting, verification and control exchange, and the `Controller` interface.

A `Controller` makes a `Choice` for each sequence of a step: a `Mode` of drafting and a depth. A
`Draft` holds the drafted tokens. After verification a `Round` reports a `Trial` for each sequence;
`Plain` reports steps without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from moe.hooks import Hook
from moe.sampling.batch import Proposal
from moe.sampling.sampler import Guesses
from moe.sequence import RunningSequence
from moe.settings import Profile
from routing import Routing

Source = Literal["elastic", "mtp", "ngram", "recycling"]
BY_PASSES = frozenset[Source]({"elastic", "mtp"})
"""Sources that run a network for each token."""


class DraftRule(Protocol):
    """Leaves out experts of elastic drafts beyond those that are not in memory. It is a value:
    equal rules make equal modes."""

    @property
    def name(self) -> str:
        """For `Mode.name`."""
        ...

    def skips(self, layers: int) -> frozenset[int]:
        """Return the MoE layers, of so many, that run without experts."""
        ...

    def allowed(
        self, routing: Routing, here_E: Tensor | None, num_experts: int, kept: Kept
    ) -> Tensor | None:
        """Return ``(E,)`` bool, the experts that a pass may use at a layer; None for all. Must do
        the same work each time, without waiting for a device.

        Args:
            here_E: experts in memory; None: all are.
            kept: of this layer, what earlier passes of the draft left; empty or zeros in the first.
        """
        ...


Kept = dict[str, Tensor]
"""Tensors of a rule at a layer, at addresses that stay; a new draft begins with zeros."""
DRAFT_RULES = Hook[Callable[[Profile], DraftRule]]("draft_rule")
"""Makes a rule of all elastic drafts of a profile."""


@dataclass(frozen=True)
class Mode:
    """A way to draft.

    Attributes:
        source: elastic: passes of the model with less of its experts. mtp: passes of the
            multi-token-prediction layer that its checkpoint brings. ngram: the tokens that followed
            the last ones earlier in the text. recycling: the model's last prediction of what
            follows a token.
        bits: elastic: most bits of an expert's weights; None for all there are.
        experts: elastic: most experts of a token; None for as many as the model takes.
        rules: elastic: what leaves out further experts.
    """

    source: Source
    bits: int | None = None
    experts: int | None = None
    rules: tuple[DraftRule, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # strings keep their hash; a dataclass would compute it each time

    @cached_property
    def name(self) -> str:
        """For metrics and tables."""
        parts: list[str] = [self.source]
        if self.bits is not None:
            parts.append(f"{self.bits}b")
        if self.experts is not None:
            parts.append(f"top{self.experts}")
        return ":".join([*parts, *(rule.name for rule in self.rules)])


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next in a sequence.

    Attributes:
        mode: how it was made; None without tokens.
        tokens: ids; empty for plain decoding.
        confidence: of each token its probability, as its source states it.
        proposals: of each token the distribution it was drawn from; None if it was not drawn.
    """

    mode: Mode | None = None
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    proposals: tuple[Proposal | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.confidence) == len(self.proposals)

    @property
    def guesses(self) -> Guesses:
        """For verification."""
        return list(zip(self.tokens, self.proposals, strict=True))

    @classmethod
    def sure(cls, mode: Mode, tokens: Sequence[int], confidence: Sequence[float]) -> Draft:
        """A draft of tokens that were not drawn at random."""
        return cls(mode, tuple(tokens), tuple(confidence), (None,) * len(tokens))

    def first(self, depth: int) -> Draft:
        """The same draft, cut to ``depth`` tokens."""
        if depth <= 0:
            return PLAIN
        if depth >= len(self.tokens):
            return self
        tokens, confidence = self.tokens[:depth], self.confidence[:depth]
        return Draft(self.mode, tokens, confidence, self.proposals[:depth])


PLAIN = Draft()


class Choice(NamedTuple):
    """The drafting of a sequence in a step; depth 0 is plain decoding."""

    mode: Mode | None = None
    depth: int = 0


class Trial(NamedTuple):
    """The result of verifying one sequence's draft, which may be empty."""

    sequence: RunningSequence
    mode: Mode | None
    drafted: int
    accepted: int
    confidence: tuple[float, ...] = ()


class Round(NamedTuple):
    """A step with drafts.

    Attributes:
        trials: one for each sequence; fewer if the step failed for some.
        rows: that were verified: drafted tokens, and one more for each sequence.
        draft_rows: rows of each draft pass, in order.
        draft_seconds: time of all drafting, lookups included.
        verify_seconds: time of the rest of the step.
        draft_bytes: bytes of experts that draft passes read.
        alone: no prompt was read in this step.
    """

    trials: Sequence[Trial]
    rows: int
    draft_rows: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    draft_bytes: int
    alone: bool


class Plain(NamedTuple):
    """Some plain steps of one number of sequences.

    Attributes:
        seconds: of each; nan if a prompt was read in it.
        looks: how many of them began with a lookup that led to no draft.
        looking: seconds that these lookups took, in addition to those above.
    """

    batch: int
    seconds: Sequence[float]
    looks: int
    looking: float


@dataclass(frozen=True)
class Stop:
    """Ends drafts whose next token is not likely enough to pay for drafting and verifying it.

    Attributes:
        accepted: how often a drafted token at each position is right if those before it are; the
            last one is that of all further positions.
        price: tokens that a further one has to bring.
    """

    accepted: tuple[float, ...]
    price: float

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Return whether a draft whose tokens have this confidence is worth another pass."""
        chance = self.at(len(confidence))
        for position, each in enumerate(confidence):
            chance *= (each + self.at(position)) / 2
        return chance >= self.price

    def at(self, position: int) -> float:
        """Return how often a token there is right."""
        return self.accepted[min(position, len(self.accepted) - 1)]


NEVER = Stop((1.0,), 0.0)


class Controller(ABC):
    """Decides how, and how far, to draft. The methods that are not abstract suit a controller that
    learns nothing."""

    @abstractmethod
    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice] | None:
        """One choice for each running sequence; None if all decode plainly.

        Args:
            limits: most tokens that each may draft.
            offers: drafts of the model-free modes for each; a choice of such a mode takes the first
                tokens of its offer.
        """

    def stop(self, mode: Mode) -> Stop:
        """When drafts by passes end before their depth in this step."""
        return NEVER

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """Tokens of a finished elastic draft that are worth verifying. Only called for drafts that
        were not drawn: dropping a drawn token would change the distribution of the output."""
        return len(confidence)

    def observe(self, round: Round) -> None:
        """A step with drafts is over."""
        return None

    def rests(self, batch: int) -> int:
        """Return how many of the next steps of ``batch`` sequences decode plainly, without a
        lookup. Called before each step that would look drafts up."""
        return 0

    def rested(self, plain: Plain) -> None:
        """Plain steps are over."""
        return None

    def figures(self) -> dict[str, Any] | None:
        """Return what it has learned, for JSON; None if it does not learn."""
        return None


@dataclass(frozen=True)
class FixedDepth(Controller):
    """Always drafts in one mode, as far as it may; at depth 0 every step is plain."""

    mode: Mode
    depth: int

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice]:
        return [Choice(self.mode, min(self.depth, limit)) for limit in limits]

    def rests(self, batch: int) -> int:
        return 0 if self.depth else 1
