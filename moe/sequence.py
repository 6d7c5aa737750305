"""One sequence being generated: its tokens, its text so far, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moe.errors import RequestError
from moe.kv.cache import SequenceCache
from moe.network.prompt_rows import PromptRows
from moe.sampling.batch import Token
from moe.sampling.sampler import Sampler
from moe.text.detokenize import IncrementalDecoder, StopStrings

FinishReason = Literal["stop", "length"]

MAX_PRIORITY = 100


def check_priority(priority: int) -> None:
    """Raises `RequestError` unless it is a whole number in [-100, 100]."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be a whole number in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got "
            f"{priority!r}; lower numbers go first"
        )


@dataclass(frozen=True)
class Delta:
    """The addition of one step to a sequence.

    Attributes:
        token: the sampled token, with its log probability where asked for.
        text: text that became final; may be empty, and may span earlier tokens.
        finish_reason: set on the last delta of a sequence.
        prompt_logprobs: on the first delta of a sequence, where asked for: the prompt's tokens with
            their log probabilities; None stands for the first token, which follows nothing.
        stop: the stop string that ended the sequence; None: none did.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    token: Token
    text: str
    finish_reason: FinishReason | None
    prompt_logprobs: list[Token | None] | None = None
    stop: str | None = None
    num_cached_tokens: int = 0


class RunningSequence:
    """Samples, decodes and ends one sequence.

    Args:
        prompt_token_ids: the prompt.
        sampler: draws the next token.
        decoder: turns token ids into final text; None for a model without tokenizer.
        stop_strings: text ends before the earliest of them.
        stop_token_ids: a token of these ends the sequence; it counts, and adds no text.
        max_new_tokens: tokens to generate at most.
        salt: prompts share known prefixes within one salt only.
        priority: lower numbers go first.
        token_ids: tokens generated so far, if another rank began the sequence; this object owns
            the list.
        rows: what the text model is given for the prompt beside token ids (images).
        is_over: told each new text, says whether the sequence ends with it; None: it never does.

    Attributes:
        rows: as given.
        sampler: as given.
        queue_key: order among all sequences; those with a smaller key go first.
        num_cached_tokens: tokens of the prompt found in the prefix cache.
        first_scheduled_ns: Unix time at which its prompt was first taken from the queue; 0 before.
        token_ids: tokens generated so far.
        cache: the sequence's state while it decodes; None before its prompt has been read.
        cancelled: the caller no longer wants it.
        held_logits_V: (V,) of the next token, while what its structure allows is not known.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        sampler: Sampler,
        decoder: IncrementalDecoder | None,
        stop_strings: StopStrings,
        stop_token_ids: Collection[int],
        max_new_tokens: int,
        salt: str = "",
        priority: int = 0,
        token_ids: list[int] | None = None,
        rows: PromptRows | None = None,
        is_over: Callable[[str], bool] | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.rows = rows
        self.max_new_tokens = max_new_tokens
        self.salt = salt
        self.priority = priority
        self.queue_key = (0, 0)
        self.num_cached_tokens = 0
        self.first_scheduled_ns = 0
        self.token_ids = [] if token_ids is None else token_ids
        self.finish_reason: FinishReason | None = None
        self.cache: SequenceCache | None = None
        self.cancelled = False
        self.held_logits_V: Tensor | None = None
        self.sampler = sampler
        self._is_expired = False
        self._prompt_logprobs: list[Token | None] | None = None
        self._decoder = decoder
        self._stop_strings = stop_strings
        self._stop_token_ids = frozenset(stop_token_ids)
        self._is_over = is_over

    @property
    def prompt_keys(self) -> list[int] | None:
        """Keys of the prompt's tokens in the prefix cache: ids, or contents with images; None: the
        prompt is not kept there."""
        if self.rows is None:
            return self.prompt_token_ids
        return None if self.rows.whole else self.rows.keys

    @property
    def capacity(self) -> int:
        """Tokens of state this sequence can come to hold; its last token is never read back."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    @property
    def ends_next(self) -> bool:
        """The next token is the last, whatever it is."""
        return self._is_expired or len(self.token_ids) + 1 >= self.max_new_tokens

    def last_tokens(self, count: int) -> list[int]:
        """At most ``count`` tokens from the end of the sequence, prompt included."""
        return [*self.prompt_token_ids[-count:], *self.token_ids[-count:]][-count:]

    def enqueue(self, step: int, number: int) -> None:
        """Take a place in the scheduler's queue: by step, then by order of arrival."""
        self.queue_key = (step, number)

    def leave_queue(self) -> None:
        """Its prompt is read from now on."""
        self.first_scheduled_ns = self.first_scheduled_ns or time.time_ns()

    def reuse_prefix(self, num_tokens: int) -> None:
        """Note how many tokens of the prompt the prefix cache had."""
        if not self.token_ids:  # a preempted sequence keeps the count of its first time
            self.num_cached_tokens = num_tokens

    def attach(self, cache: SequenceCache) -> None:
        """Decode with this state."""
        self.cache = cache

    def release(self) -> None:
        """Give up the state: the sequence has ended, or its prompt will be read again."""
        self.cache = None

    def cancel(self) -> None:
        """Mark the sequence as no longer wanted."""
        self.cancelled = True

    def keep_prompt_logprobs(self, tokens: list[Token | None] | None) -> None:
        """Keep the prompt's log probabilities for the first `Delta`."""
        self._prompt_logprobs = tokens

    def take_prompt_logprobs(self) -> list[Token | None] | None:
        """The prompt's log probabilities, once; None the second time."""
        tokens, self._prompt_logprobs = self._prompt_logprobs, None
        return tokens

    def expire(self) -> None:
        """The time is up: the next token is the last."""
        self._is_expired = True

    def hold(self, logits_V: Tensor | None) -> None:
        """Keep the ``(V,)`` logits of the next token for a later step; None: no longer."""
        self.held_logits_V = None if logits_V is None else logits_V.clone()

    def append_token(self, token: Token) -> Delta:
        """Append the next token, which may end the sequence."""
        assert self.finish_reason is None
        is_full = self.ends_next
        self.token_ids.append(token.id)
        is_end = token.id in self._stop_token_ids or token.id in self._stop_strings.tokens
        if is_end or token.is_last:
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = "length"
        text = self._new_text(token.id, is_end)
        return Delta(
            token,
            text,
            self.finish_reason,
            self.take_prompt_logprobs(),
            self._stop_strings.matched,
            self.num_cached_tokens,
        )

    def _new_text(self, token_id: int, is_end: bool) -> str:
        if self._decoder is None:
            return ""
        piece = "" if is_end else self._decoder.push(token_id)
        if self.finish_reason is not None:
            piece += self._decoder.finish()
        # As in vLLM, stop strings are looked for behind the least length only.
        too_short = len(self.token_ids) <= self.sampler.params.min_tokens
        text = piece if too_short else self._stop_strings.push(piece)
        if self._stop_strings.matched is not None:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            text += self._stop_strings.finish(token_id)
        if self._is_over is not None and self._is_over(text):
            self.finish_reason = "stop"
        return text
