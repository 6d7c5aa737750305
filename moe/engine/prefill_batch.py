"""The work of a step: `ScheduledStep`, and the prompts in it, which are read in batches.

Sequences that continue one prompt are a `SequenceGroup`. A `PrefillBatch` reads prompts together,
each wholly or by a `PromptChunk`, in one of three modes (``prefill.mode``):

- ``whole``: whole prompts, all layers in one step.
- ``chunked``: a token budget for each step, shared with decoding; prompts are cut to fill it
  (Sarathi-Serve: decodes never wait, but every chunk reads the experts again).
- ``layered``: whole prompts, but one group of layers a step, so each expert is read once a batch
  (arXiv 2510.08055; `moe.engine.prefill_mode` cuts the groups). Between steps the batch sleeps in
  its lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from torch import Tensor

from moe.engine.prefill_mode import ChoosePauses, PrefillMode
from moe.errors import ContextError, RequestError
from moe.kv.cache import SequenceCache
from moe.kv.ledger import SLACK
from moe.kv.prefix_cache import BLOCK, PrefixCache, block_hashes
from moe.network.prompt_rows import PromptRows
from moe.sampling.batch import Token, score
from moe.sequence import RunningSequence
from moe.settings import PrefillSettings


@dataclass(frozen=True)
class ScheduledStep:
    """Who takes part in a step: running sequences by one token each, and a prefill batch.

    Attributes:
        decode: running sequences.
        prefill: runs its current layer group in this step; None if no prompt is read.
        spare_tokens: further tokens that fit in the KV cache.
    """

    decode: list[RunningSequence]
    prefill: PrefillBatch | None
    spare_tokens: float = 0


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that continue one prompt; the prompt is read once for all of them.

    Attributes:
        sequences: ``n`` samples, or one that was preempted after its first token. Its generated
            tokens are not read with the prompt but by later steps, as decode steps read them.
        num_read: tokens of `token_ids` that earlier batches have read.
        cache: state of the prompt while it is being read.
        snapshots: positions of the prompt, in order, where its recurrent states are kept.
        prompt_logprobs: log probabilities of the prompt's tokens so far; None: not asked for.
        looked_up: the prefix cache has looked for the prompt on disk, if it keeps any there.
        counted: the prefix cache has counted that in its statistics.
        keeps_all: until it has been read, the prompt keeps what is behind windows, for the prefix
            cache.
    """

    sequences: list[RunningSequence]
    num_read: int = 0
    cache: SequenceCache | None = None
    snapshots: Sequence[int] = ()
    prompt_logprobs: list[Token | None] | None = None
    looked_up: bool = False
    counted: bool = False
    keeps_all: bool = True

    @property
    def token_ids(self) -> list[int]:
        """The prompt."""
        return self.sequences[0].prompt_token_ids

    @property
    def rows(self) -> PromptRows | None:
        """Arguments of the text model for the prompt beside token ids; None: there are none."""
        return self.sequences[0].rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        first = self.sequences[0]
        return len(first.prompt_token_ids) + len(first.token_ids)

    def num_kv(self, block_tokens: int = 0) -> int:
        """Tokens of memory that the sequences hold once their prompt has been read.

        Args:
            block_tokens: of the blocks that they share of the prompt; 0: each has a copy.
        """
        shared = len(self.token_ids) // block_tokens * block_tokens if block_tokens else 0
        return shared + (self.num_tokens - shared) * len(self.sequences)

    @property
    def num_held(self) -> int:
        """Tokens of memory of the part read so far, without blocks that count for others."""
        return self.num_read - (0 if self.cache is None else self.cache.shared_tokens)

    @property
    def num_dropped(self) -> int:
        """Tokens of memory that the part read so far has given up behind windows."""
        return 0 if self.cache is None else self.cache.dropped_tokens

    @cached_property
    def hashes(self) -> list[bytes]:
        """The hash of each whole block of the prompt; see `block_hashes`."""
        first = self.sequences[0]
        return block_hashes(first.salt, first.prompt_keys or [])

    def is_expected_from(self, other: SequenceGroup) -> bool:
        """Return whether most of what is left to read of the prompt is a prefix that ``other``
        reads."""
        if self.prompt_logprobs is not None or self.hashes[:1] != other.hashes[:1]:
            return False
        pairs = zip(self.hashes, other.hashes, strict=False)
        blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        common = min(blocks * BLOCK, len(self.token_ids) - 1) // BLOCK * BLOCK
        if not other.keeps_all and common < len(other.token_ids) - SLACK:
            return False  # it has given up there what is behind windows
        left = len(self.token_ids) - self.num_read
        return common > self.num_read and 2 * (common - self.num_read) >= left

    @property
    def queue_key(self) -> tuple[int, int]:
        """Place in the queue, the same for all of its sequences."""
        return self.sequences[0].queue_key

    @property
    def cancelled(self) -> bool:
        """All of its sequences are cancelled."""
        return all(sequence.cancelled for sequence in self.sequences)

    def begin(self, cache: SequenceCache) -> None:
        """Read the prompt into this state; it may hold a prefix of the prompt already."""
        self.cache, self.num_read = cache, cache.length
        cache.keep_all(self.keeps_all)

    def look_up(self, prefixes: PrefixCache) -> bool:
        """Begin with the longest prefix of the prompt that is cached, if there is one; False: one
        is being read from disk, look again later."""
        first, hashes = self.sequences[0], self.hashes
        if (keys := first.prompt_keys) is None:
            self.looked_up = True
            return True
        if prefixes.is_being_read(first.salt, keys, hashes):
            return False
        if not self.looked_up:
            self.looked_up = True
            if prefixes.read_ahead(first.salt, keys, hashes):
                return False
        self.snapshots = prefixes.snapshots(first.salt, keys, hashes)
        cached = prefixes.match(first.salt, keys, first.capacity, again=self.counted, hashes=hashes)
        self.counted = True
        if cached is not None:
            self.begin(cached)
            for sequence in self.sequences:
                sequence.reuse_prefix(cached.length)
        return True

    def advance(self, num_tokens: int) -> None:
        """Note that a batch has read the next tokens of the prompt."""
        self.num_read += num_tokens

    def finish(self, caches: Sequence[SequenceCache]) -> None:
        """Give each sequence its state: the whole prompt has been read."""
        self.cache = None
        for sequence, cache in zip(self.sequences, caches, strict=True):
            cache.keep_all(False)
            cache.prompt_read()
            sequence.attach(cache)

    def cancel(self) -> None:
        """Mark all sequences as no longer wanted."""
        for sequence in self.sequences:
            sequence.cancel()

    def release(self) -> None:
        """Discard what has been read and generated from; all of it is read again."""
        self.restart()
        for sequence in self.sequences:
            sequence.release()

    def check_fits(self, needed: int, kv_tokens: float, max_batch_size: int) -> None:
        """Raises `RequestError` if it could never run, whatever else finishes first.

        Args:
            needed: the most tokens of memory that it comes to hold.
        """
        num_samples = len(self.sequences)
        if needed > kv_tokens:
            why = (
                f"the request needs memory for {needed} tokens and there is room for {kv_tokens} "
                "(memory.kv_tokens, memory.kv_gib); shorten it, ask for fewer samples or make room"
            )
            if num_samples > 1:
                raise RequestError(why)
            num_prompt = len(self.sequences[0].prompt_token_ids)
            raise ContextError(why, int(kv_tokens), num_prompt, needed - num_prompt)
        if num_samples > max_batch_size:
            raise RequestError(
                f"n is {num_samples} and engine.max_batch_size is {max_batch_size}; "
                "ask for fewer samples or raise engine.max_batch_size"
            )

    def score(self, logits_TV: Tensor) -> None:
        """Add the log probabilities of the next T tokens of the prompt.

        Row i predicts the token after it; the last row of the prompt predicts the first new token.
        """
        count = self.sequences[0].sampler.params.prompt_logprobs
        assert self.prompt_logprobs is not None
        assert count is not None
        self.prompt_logprobs = self.prompt_logprobs or [None]
        start = len(self.prompt_logprobs)
        following = self.token_ids[start : start + len(logits_TV)]
        self.prompt_logprobs += score(following, logits_TV[: len(following)], count)

    def restart(self) -> None:
        """Discard what has been read; the prompt will be read again from its start."""
        self.num_read, self.cache = 0, None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a group's prompt that one batch reads.

    Attributes:
        token_ids: the tokens; they begin at ``group.num_read``.
        is_last: the prompt ends with them, so the next token can be sampled.
    """

    group: SequenceGroup
    token_ids: list[int]
    is_last: bool

    @property
    def span(self) -> range:
        """The positions of the tokens."""
        return range(self.group.num_read, self.group.num_read + len(self.token_ids))

    @property
    def snapshots(self) -> list[int]:
        """After how many of the tokens recurrent states are kept."""
        start, stop = self.span.start, self.span.stop
        return [at - start for at in self.group.snapshots if start < at <= stop]


@dataclass(eq=False)
class PrefillBatch:
    """Prompts that are read together, in queue order.

    Attributes:
        chunks: what is read.
        pauses: MoE layers before whose experts the batch sleeps until the next step.
        layer_group: what runs in this step: up to the pause of this index, or to the last layer.
    """

    chunks: list[PromptChunk]
    pauses: tuple[int, ...] = ()
    layer_group: int = 0

    @property
    def num_layer_groups(self) -> int:
        """Steps that the batch takes."""
        return len(self.pauses) + 1

    @property
    def is_last_layer_group(self) -> bool:
        return self.layer_group == self.num_layer_groups - 1

    def layers(self, num_layers: int) -> range:
        """The MoE layers of the current layer group, of ``num_layers`` in all."""
        edges = (0, *self.pauses, num_layers)
        return range(edges[self.layer_group], edges[self.layer_group + 1])


class PrefillBatchBuilder:
    """Fills a batch with prompts.

    Args:
        prefill: how many tokens a batch has.
        mode: how its prompts are read.
        num_decoding: running sequences, which share the budget of ``chunked``.
        can_cut: a prompt may be read in several batches.

    Attributes:
        chunks: what the batch reads so far.
    """

    def __init__(
        self, prefill: PrefillSettings, mode: PrefillMode, num_decoding: int, *, can_cut: bool
    ) -> None:
        self.chunks: list[PromptChunk] = []
        self._mode = mode
        self._can_cut = can_cut
        self._num_left = prefill.most_tokens
        if mode == "chunked":
            self._num_left = max(prefill.chunk_tokens - num_decoding, 1)
        # Every token whose log probability is wanted costs a row of logits over the vocabulary.
        self._num_scored_left = prefill.chunk_tokens

    def add(self, group: SequenceGroup) -> bool:
        """Add what fits of a prompt; False: it has to wait for the next batch."""
        scored = group.prompt_logprobs is not None
        limit = min(self._num_left, self._num_scored_left) if scored else self._num_left
        token_ids = group.token_ids[group.num_read :]
        too_long = len(token_ids) > limit
        can_cut = self._can_cut and (group.rows is None or not group.rows.whole)
        cut = too_long and can_cut and (self._mode != "whole" or scored)
        fills_up = limit > 0 and cut and self._mode == "chunked"
        if too_long and self.chunks and not fills_up:
            return False
        if cut:
            token_ids = token_ids[:limit]
        self.chunks.append(PromptChunk(group, token_ids, is_last=not cut))
        self._num_left -= len(token_ids)
        self._num_scored_left -= len(token_ids) if scored else 0
        return True

    def build(self, pauses: ChoosePauses) -> PrefillBatch:
        """The finished batch; a layered one takes a step for each group of layers."""
        if self._mode != "layered":
            return PrefillBatch(self.chunks)
        return PrefillBatch(self.chunks, pauses([chunk.span for chunk in self.chunks]))
