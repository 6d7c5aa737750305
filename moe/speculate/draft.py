"""Drafts as values: how they may be made, what they say, and what became of them.

Everything between those who draft, those who decide how far (`Controller`) and those who verify.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from moe.sampling.sampler import Proposal
from moe.sequence import RunningSequence

Source = Literal["elastic", "ngram", "recycling"]
Core = Literal["all", "seq", "vote"]


@dataclass(frozen=True)
class Mode:
    """A way to draft.

    Attributes:
        source: elastic: passes of the model itself, with less of its experts. ngram: what followed
            the last tokens before. recycling: what the model last thought follows a token.
        bits: elastic: bits of experts at most; None: all there are.
        experts: elastic: experts of a token at most; None: as many as the model takes.
        core: elastic: which of the experts in memory may be used. all: each of them. seq: the first
            `CORE_EXPERTS` of every row of a pass. vote: those that the rows weigh most together.
        share: of a layer's experts that a vote elects.
        skipped: share of the MoE layers, from the middle of the model, whose experts are left out.
    """

    source: Source
    bits: int | None = None
    experts: int | None = None
    core: Core = "all"
    share: float = 1.0
    skipped: float = 0.0

    def __hash__(self) -> int:
        return hash(self.name)  # a string's is kept: of all that is kept by mode in every step

    @cached_property
    def name(self) -> str:
        """For metrics and tables."""
        parts: list[str] = [self.source]
        if self.bits is not None:
            parts.append(f"{self.bits}b")
        if self.experts is not None:
            parts.append(f"top{self.experts}")
        if self.core != "all":
            parts.append("seq" if self.core == "seq" else f"vote{self.share:g}")
        if self.skipped:
            parts.append(f"skip{self.skipped:g}")
        return ":".join(parts)


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next in a sequence.

    Attributes:
        mode: how it was made; None for none.
        tokens: ids; none for plain decoding.
        confidence: of each token, how probable it was to whoever drafted it.
        proposals: of each token, the distribution it was drawn from; None where nothing was left
            to chance.
    """

    mode: Mode | None = None
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    proposals: tuple[Proposal | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.confidence) == len(self.proposals)

    @classmethod
    def sure(cls, mode: Mode, tokens: Sequence[int], confidence: Sequence[float]) -> Draft:
        """A draft that left nothing to chance."""
        return cls(mode, tuple(tokens), tuple(confidence), (None,) * len(tokens))

    def first(self, depth: int) -> Draft:
        """Its first tokens only."""
        if depth <= 0:
            return PLAIN
        if depth >= len(self.tokens):
            return self
        tokens, confidence = self.tokens[:depth], self.confidence[:depth]
        return Draft(self.mode, tokens, confidence, self.proposals[:depth])


PLAIN = Draft()


class Choice(NamedTuple):
    """How a sequence drafts in a step; depth 0 is plain decoding."""

    mode: Mode | None = None
    depth: int = 0


class Trial(NamedTuple):
    """What became of one sequence's draft in a step, also of none."""

    sequence: RunningSequence
    mode: Mode | None
    drafted: int
    accepted: int
    confidence: tuple[float, ...] = ()


class Round(NamedTuple):
    """A step that was not plain.

    Attributes:
        trials: of each sequence; fewer where the step failed for some.
        rows: of the verification: drafted tokens, and one more for each sequence.
        draft_rows: of each elastic draft pass, in their order.
        draft_seconds: of all drafting, looking for drafts included.
        verify_seconds: of the rest of the step.
        draft_bytes: of experts that draft passes read.
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
    """Plain steps of one number of sequences, maybe not all that there were.

    Attributes:
        seconds: of each; nan where a prompt was read in it.
        looks: in so many of them somebody looked for drafts, in vain.
        looking: seconds that these cost for it, beside those above.
    """

    batch: int
    seconds: Sequence[float]
    looks: int
    looking: float


class Controller(ABC):
    """Decides how, and how far, to draft. What is not abstract is of one that learns nothing."""

    @abstractmethod
    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice] | None:
        """One choice for each running sequence; None where all are to be plain.

        Args:
            limits: tokens that each may draft at most.
            offers: what model-free modes have to say for each, where they say anything; a choice of
                such a mode takes the first tokens of its offer.
        """

    def goes_on(self, mode: Mode, confidence: Sequence[float]) -> bool:
        """Whether an elastic draft with such confidence so far is worth another pass."""
        return True

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """Tokens of a finished elastic draft that are worth verifying. Only asked where nothing was
        left to chance: to drop one for what was drawn would change the chances of the others."""
        return len(confidence)

    def observe(self, round: Round) -> None:
        """A step is over that was planned, and not plain."""
        return None

    def rests(self, batch: int) -> int:
        """Steps of so many sequences to come that are plain, without any looking for drafts. Asked
        before each step that would look."""
        return 0

    def rested(self, plain: Plain) -> None:
        """Plain steps are over."""
        return None

    def figures(self) -> dict[str, Any] | None:
        """What it has learnt, for JSON; None where it does not learn."""
        return None


@dataclass(frozen=True)
class FixedDepth(Controller):
    """Always drafts in one mode, and as far as it may; at depth 0 it rests."""

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
