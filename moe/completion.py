"""Results of a call: a `StreamEvent` for each new token, or whole `Completion` objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from moe.engine.engine import StepLoop
from moe.engine.prefill_batch import SequenceGroup
from moe.model_lock import ModelLock
from moe.sampling.batch import Token
from moe.sequence import Delta, FinishReason, RunningSequence


@dataclass(frozen=True)
class StreamEvent:
    """One new token of one sequence.

    Attributes:
        prompt: index of the prompt in the batch.
        sample: index among the ``n`` samples of that prompt.
        delta: the token, the text that became final with it, and the finish reason if it ended.
        prompt_token_ids: token ids of the prompt, the same list in every event of it.
    """

    prompt: int
    sample: int
    delta: Delta
    prompt_token_ids: list[int]


@dataclass
class Completion:
    """A continuation of a prompt.

    Attributes:
        prompt: index of the prompt in the batch.
        sample: index among the ``n`` samples of that prompt.
        text: the new text, without the stop string that ended it.
        tokens: every token generated, the one that ended it included, with log probabilities
            where asked for.
        finish_reason: ``stop`` or ``length``.
        prompt_logprobs: the prompt's tokens with their log probabilities, where asked for; None
            stands for the first token, which follows nothing.
    """

    prompt: int
    sample: int
    prompt_token_ids: list[int]
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[Token | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens.append(delta.token)
        self.finish_reason = delta.finish_reason
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


def collect(events: Iterable[StreamEvent]) -> list[Completion]:
    """Join the events of every sequence, in order of prompts and samples."""
    completions: dict[tuple[int, int], Completion] = {}
    for event in events:
        place = (event.prompt, event.sample)
        if place not in completions:
            completions[place] = Completion(*place, event.prompt_token_ids)
        completions[place].add(event.delta)
    return [completions[place] for place in sorted(completions)]


def places_of(groups: Sequence[SequenceGroup]) -> dict[RunningSequence, tuple[int, int]]:
    """Return the place of each sequence: index of its prompt, and of the sample of that prompt."""
    return {
        sequence: (prompt, sample)
        for prompt, group in enumerate(groups)
        for sample, sequence in enumerate(group.sequences)
    }


def stream_events(
    engine: StepLoop,
    groups: Sequence[SequenceGroup],
    lock: ModelLock,
    check_open: Callable[[], None],
) -> Generator[StreamEvent, None, None]:
    """Step until these groups have ended; closing the iterator cancels what still runs.

    Args:
        lock: taken for each step.
        check_open: raises if the model was closed. The reference also keeps the model, and so the
            files of its experts, open for as long as there is a stream.
    """
    places = places_of(groups)
    try:
        while not engine.idle:
            check_open()
            with lock():
                events = engine.step()
            for sequence, outcome in events:
                if isinstance(outcome, Exception):
                    raise outcome
                yield StreamEvent(*places[sequence], outcome, sequence.prompt_token_ids)
    finally:  # greenlets of a sleeping prefill are not garbage-collected
        if not sys.is_finalizing():  # when the program ends, torch is half gone
            with lock():
                for group in groups:
                    engine.cancel(group)
