"""`KVAccount`: how much memory a sequence's keys and values take, now and at most.

The unit is a token in all layers, so that one number serves every model. Three things change the
sum: sequences that continue one prompt share its blocks; where layers have windows, a sequence
gives up what lies behind them (`Windows`); and a lossy policy leaves only some blocks behind a
prompt (`RowVisibility`). A GPU gives memory out by whole blocks. There every count is rounded up.
"""

from __future__ import annotations

from moe.engine.prefill_batch import SequenceGroup
from moe.kv.ledger import BlockLedger, Windows
from moe.kv.prefix_cache import PrefixCache
from moe.sequence import RunningSequence


class KVAccount:
    """Counts tokens of memory.

    Args:
        longest_part: most tokens of a prompt that one batch reads; None: all of it.
        pool: of the blocks that samples of one prompt share; None: each has a copy.

    Attributes:
        pool: as given.
        unit: tokens that memory is given out by.
    """

    def __init__(self, longest_part: int | None = None, pool: BlockLedger | None = None) -> None:
        self._longest_part, self.pool = longest_part, pool
        self._block_tokens = 0 if pool is None else pool.block_tokens
        self.unit = pool.block_tokens if pool is not None and pool.counts_blocks else 1
        self._windows = Windows() if pool is None else pool.windows
        self._policy = None if pool is None else pool.policy

    def running(self, sequence: RunningSequence) -> int:
        """Return the tokens that a running sequence holds, without blocks that count for others.

        A sequence that was preempted has tokens to read again: those that it will keep count.
        """
        tokens, cache = len(sequence.prompt_token_ids) + len(sequence.token_ids) - 1, sequence.cache
        if cache is None:
            return self._whole(tokens)
        unread = tokens - cache.length
        if unread <= 0:
            return self._whole(tokens) - cache.shared_tokens
        kept = self._windows.held_tokens(tokens) - self._windows.held_tokens(cache.length)
        if self._policy is not None:
            most = self._policy.most_held(len(sequence.prompt_token_ids), tokens)
            kept = min(kept, max(most - cache.length + cache.dropped_tokens, 0))
        return self._whole(tokens - max(unread - kept, 0)) - cache.shared_tokens

    def growth(self, sequence: RunningSequence, tokens: int) -> int:
        """Return the tokens that a running sequence takes for so many tokens more."""
        held = len(sequence.prompt_token_ids) + len(sequence.token_ids) - 1
        return self._whole(held + tokens) - self._whole(held)

    def half_read(self, group: SequenceGroup) -> int:
        """Return the tokens of the part of a waiting prompt that has been read."""
        return self._whole(group.num_held)

    def to_come(self, group: SequenceGroup) -> int:
        """Return what a group takes beside `SequenceGroup.num_held` until its prompt has been
        read."""
        ends = (self.unit - 1) * len(group.sequences)  # a part of a block for each
        dropped = 0 if group.keeps_all else group.num_dropped
        return max(self._when_read(group) + ends - group.num_read + dropped, 0)

    def most(self, group: SequenceGroup) -> int:
        """The most that a group ever holds, its new tokens included."""
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in group.sequences)
        longest = self._left_by_policy(group, longest)
        return max(
            self._left_by_windows(group, longest), self._when_read(group) + len(group.sequences)
        )

    def keeps_all(
        self, group: SequenceGroup, prefixes: PrefixCache | None, kv_tokens: float
    ) -> bool:
        """Return whether a prompt keeps what is behind windows until it has been read, as the
        prefix cache has room for all of it. A longer one does not, so that memory admits what it
        holds; nor one that with its samples would not fit into ``kv_tokens`` then."""
        if not self._windows.of_layer:
            return True
        if prefixes is None or group.sequences[0].prompt_keys is None:
            return False
        whole = group.num_kv(self._block_tokens) + len(group.sequences)
        return group.num_tokens <= prefixes.max_tokens and whole <= kv_tokens

    def will_be_kept(self, group: SequenceGroup, prefixes: PrefixCache) -> bool:
        """Return whether the prefix cache takes a prompt once it has been read."""
        most = len(group.token_ids)
        if not group.keeps_all:
            most = self._left_by_windows(group, most)
        return most <= prefixes.max_tokens

    def _when_read(self, group: SequenceGroup) -> int:
        """Return what the sequences of a group hold at most when their prompt has been read."""
        most = self._left_by_policy(group, group.num_tokens)
        if not group.keeps_all:
            most = self._left_by_windows(group, most)
        return group.num_kv(self._block_tokens) - (group.num_tokens - most)

    def _left_by_policy(self, group: SequenceGroup, length: int) -> int:
        """Return what a sequence that grows to ``length`` tokens holds at most under the policy."""
        if self._policy is None:
            return length
        return self._policy.most_held(len(group.token_ids), length)

    def _left_by_windows(self, group: SequenceGroup, length: int) -> int:
        """Return what it holds at most if it gives up what is behind windows: while a part of a
        prompt is read, that part counts in all layers."""
        reading = len(group.token_ids)
        if self._longest_part is not None and (group.rows is None or not group.rows.whole):
            reading = min(reading, self._longest_part)
        return self._windows.held_tokens(length, reading)

    def _whole(self, tokens: int) -> int:
        """Rounded up to whole units."""
        return -(-tokens // self.unit) * self.unit
