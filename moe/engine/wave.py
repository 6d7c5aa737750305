"""Prompts that wait, and how they become waves: prompts that are read together.

- ``whole``: whole prompts, all layers in one step.
- ``chunked``: a token budget a step, shared with decoding; prompts are cut to fill it
  (Sarathi-Serve: decodes never wait, chunks re-read the experts).
- ``layered``: whole prompts, but one group of layers a step, so each expert is read once a wave
  (arXiv 2510.08055; `moe.engine.stages` cuts the groups); the wave sleeps in its lane in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.engine.prefill import Mode
from moe.engine.sequence import RunningSequence
from moe.engine.stages import Pauses
from moe.errors import RequestError
from moe.kv import SequenceCache
from moe.sampling.logprobs import Token, score
from moe.settings import PrefillSettings


@dataclass(eq=False)
class Group:
    """Sequences that continue one prompt; the prompt is read once for all of them.

    Attributes:
        sequences: ``n`` samples; one, if it was preempted after its first token. What it has
            generated is not read with the prompt, but by later steps, as it was the first time.
        num_read: tokens of `token_ids` that earlier waves have read.
        cache: state of the prompt while it is being read.
        prompt_logprobs: what is known so far of the prompt's tokens; None where nobody asked.
    """

    sequences: list[RunningSequence]
    num_read: int = 0
    cache: SequenceCache | None = None
    prompt_logprobs: list[Token | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """What is to be read as a prompt."""
        return self.sequences[0].prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and those generated already."""
        first = self.sequences[0]
        return len(first.prompt_token_ids) + len(first.token_ids)

    @property
    def num_kv(self) -> int:
        """Tokens of memory that the sequences hold once their prompt has been read."""
        return self.num_tokens * len(self.sequences)

    @property
    def turn(self) -> tuple[int, int]:
        """Its place in the queue, the same for all of its sequences."""
        return self.sequences[0].turn

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it any more."""
        return all(sequence.cancelled for sequence in self.sequences)

    def check_fits(self, kv_tokens: float, max_batch_size: int) -> None:
        """Raises `RequestError` if it could never run, whatever else finishes first."""
        num_samples = len(self.sequences)
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in self.sequences)
        needed = max(longest, self.num_kv + num_samples)
        if needed > kv_tokens:
            raise RequestError(
                f"the request needs memory for {needed} tokens and there is room for {kv_tokens} "
                "(memory.kv_tokens, memory.kv_gib); shorten it, ask for fewer samples or make room"
            )
        if num_samples > max_batch_size:
            raise RequestError(
                f"n is {num_samples} and engine.max_batch_size is {max_batch_size}; "
                "ask for fewer samples or raise engine.max_batch_size"
            )

    def score(self, logits_TV: Tensor) -> None:
        """Take in the logits of the next T tokens of a prompt whose log probabilities are wanted.

        Row i tells of the token after it; the last row of the prompt tells of a new one.
        """
        count = self.sequences[0].sampler.params.prompt_logprobs
        assert self.prompt_logprobs is not None
        assert count is not None
        self.prompt_logprobs = self.prompt_logprobs or [None]
        start = len(self.prompt_logprobs)
        following = self.token_ids[start : start + len(logits_TV)]
        self.prompt_logprobs += score(following, logits_TV[: len(following)], count)

    def forget(self) -> None:
        """Give up what has been read."""
        self.num_read, self.cache = 0, None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []


@dataclass(frozen=True)
class Piece:
    """Tokens of a group's prompt that one wave reads.

    Attributes:
        token_ids: the tokens; they begin at ``group.num_read``.
        is_last: the prompt ends with them, so the next token can be sampled.
    """

    group: Group
    token_ids: list[int]
    is_last: bool

    @property
    def span(self) -> range:
        """The positions of the tokens."""
        return range(self.group.num_read, self.group.num_read + len(self.token_ids))


@dataclass(eq=False)
class Wave:
    """Prompts that are read together, in order of their turns.

    Attributes:
        pieces: what is read.
        pauses: MoE layers before whose experts it sleeps until the next step.
        stage: what runs in this step: up to the pause of this index, or to the end.
    """

    pieces: list[Piece]
    pauses: tuple[int, ...] = ()
    stage: int = 0

    @property
    def num_stages(self) -> int:
        """Steps that the wave takes."""
        return len(self.pauses) + 1

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


class WaveDraft:
    """A wave in the making.

    Args:
        prefill: how many tokens a wave has.
        mode: how its prompts are read.
        num_decoding: running sequences, which share the budget of ``chunked``.
        can_cut: a prompt may be read in several waves.

    Attributes:
        pieces: what it reads so far.
    """

    def __init__(
        self, prefill: PrefillSettings, mode: Mode, num_decoding: int, *, can_cut: bool
    ) -> None:
        self.pieces: list[Piece] = []
        self._mode = mode
        self._can_cut = can_cut
        self._num_left = prefill.wave_tokens
        if mode == "chunked":
            self._num_left = max(prefill.chunk_tokens - num_decoding, 1)
        # Every token whose log probability is wanted costs a row of logits over the vocabulary.
        self._num_scored_left = prefill.chunk_tokens

    def take(self, group: Group) -> bool:
        """Add what fits of a prompt; False: it has to wait for the next wave."""
        scored = group.prompt_logprobs is not None
        limit = min(self._num_left, self._num_scored_left) if scored else self._num_left
        token_ids = group.token_ids[group.num_read :]
        too_long = len(token_ids) > limit
        cut = too_long and self._can_cut and (self._mode != "whole" or scored)
        fills_up = limit > 0 and cut and self._mode == "chunked"
        if too_long and self.pieces and not fills_up:
            return False
        if cut:
            token_ids = token_ids[:limit]
        self.pieces.append(Piece(group, token_ids, is_last=not cut))
        self._num_left -= len(token_ids)
        self._num_scored_left -= len(token_ids) if scored else 0
        return True

    def wave(self, pauses: Pauses) -> Wave:
        """The finished wave; a layered one takes a step for each group of layers."""
        if self._mode != "layered":
            return Wave(self.pieces)
        return Wave(self.pieces, pauses([piece.span for piece in self.pieces]))


@dataclass(frozen=True)
class Step:
    """Who takes part in a step: running sequences by one token each, and a stage of a wave.

    Attributes:
        spare_tokens: tokens that keys and values have room for, beyond those.
        halves: on several ranks, compute one half while rows of the other travel
            (`moe.parallel.halves`).
    """

    decode: list[RunningSequence]
    wave: Wave | None
    spare_tokens: float = 0
    halves: bool = False
