"""A sequence that lists blocks of a ledger: what it takes, shares and gives up.

`moe.kv.blocks.BlockKVCache` has rows in them; of another rank's sequences they are only counted
(`moe.parallel.remote.RemoteCache`), by the same code.

Layers that see a window of W last tokens have blocks of their own, which a sequence gives up behind
the window (`Windows`); its tables show zeros there, which no query sees. A sequence whose prompt
will be kept by the prefix cache has them all until it has been read, and so has what the cache
keeps, so that prompts which begin alike can part anywhere (`TableCache.keep_all`). Under a
policy (`moe.kv.visibility`) a sequence gives up blocks of the other layers, too, once its
prompt has been read (`TableCache.prompt_read`); nothing forks from it then. A policy by heads
gives up the rows of some heads of these layers, whose pages are a part of the block: such a part is
listed, shared and given up as a block is, and the tables do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import numpy as np

from kernels.cpu.kv import BLOCK
from moe.kv.cache import KVCache
from moe.kv.ledger import ALL, PART, SLACK, BlockLedger, BlockTable


class TableCache(KVCache):
    """A sequence with block tables.

    Args:
        capacity: tokens the sequence may ever have.
        pool: counts the blocks.

    Attributes:
        blocks: of layers that see all tokens, in order; others may list those at the start too.
    """

    def __init__(self, capacity: int, pool: BlockLedger) -> None:
        super().__init__(capacity)
        self._pool = pool
        self._lists = {group: BlockTable(pool, group) for group in pool.shares}
        self._keeps_all = False
        self.policy = pool.policy
        self._due = False  # the policy gives up some of the prompt
        self.blocks = self._lists[ALL].blocks
        for table in self._lists.values():
            finalize(self, table.release).atexit = False
        self._shared = 0  # blocks at the start that others list too: never written again

    @property
    def block_tokens(self) -> int:
        return BLOCK

    @property
    def fork_tokens(self) -> int:
        return BLOCK

    @property
    def shared_tokens(self) -> int:
        return self._tokens_of([table.unpaid for table in self._lists.values()])

    @property
    def dropped_tokens(self) -> int:
        return self._tokens_of([table.dropped for table in self._lists.values()])

    def _tokens_of(self, blocks: Sequence[int]) -> int:
        """So many blocks of each group, in tokens of all layers."""
        if len(self._lists) == 1:  # of all layers
            return BLOCK * sum(blocks)
        shares = zip(blocks, self._pool.shares.values(), strict=True)
        return int(sum(BLOCK * count * share for count, share in shares))

    @property
    def held_tokens(self) -> int:
        empty = self._lists[ALL].empty_tokens(self.length, BLOCK) if self.counts_blocks else 0
        return super().held_tokens + empty

    @property
    def lent_tokens(self) -> int:
        return self._tokens_of([table.lent for table in self._lists.values()])

    @property
    def sole_tokens(self) -> int:
        return self._lists[ALL].sole_tokens(self.length, BLOCK)

    def keep(self, kept: bool) -> None:
        for table in self._lists.values():
            table.keep(kept)

    @property
    def counts_blocks(self) -> bool:
        return self._pool.counts_blocks

    def keep_all(self, keeps: bool) -> None:
        self._keeps_all = keeps

    @property
    def whole(self) -> bool:
        return not any(table.dropped for table in self._lists.values())

    def longest_fork(self, length: int) -> int:
        found = super().longest_fork(length)
        for window, table in self._lists.items():
            if table.dropped and (window <= ALL or found < table.dropped * BLOCK + window):
                return 0
        return found

    def prompt_read(self) -> None:
        super().prompt_read()
        self._due = self._pool.policy is not None

    def reserve(self, end: int) -> None:
        super().reserve(end)
        if end > len(self.blocks) * BLOCK or self._due:
            for table in self._lists.values():
                if not self._keeps_all:
                    self._drop_unseen(table)
                while end > len(table.blocks) * BLOCK:
                    self._take(table)
            self._due = False
            self.place()

    def _take(self, table: BlockTable) -> None:
        """List a new block behind those of a group. `ALL` comes first."""
        if table.group != PART:
            table.take()
            return
        whole = self.blocks[len(table.blocks)]
        assert whole is not None, "given up whole under a policy by heads"
        table.take(whole)

    def _drop_unseen(self, table: BlockTable) -> None:
        """Give up blocks that no later query of the sequence sees."""
        unseen = self._unseen(table.group)
        if len(unseen) <= table.dropped:
            return
        self.forget(table.group, unseen)
        table.drop(unseen)

    def _unseen(self, window: int) -> np.ndarray:
        """The blocks that no later query of the sequence sees, in the order of giving them up."""
        length = self.length if self._marked < 0 else min(self.length, self._marked)
        if window > ALL:
            return np.arange(max(length - window - SLACK, 0) // BLOCK)
        policy = self._pool.policy
        if policy is None or self._prompt is None or policy.by_heads != (window == PART):
            return np.arange(0)
        return policy.given_up(self._prompt, max(length - SLACK, 0))

    def place(self) -> None:
        """Its tables have new blocks."""

    def forget(self, group: int, blocks: np.ndarray) -> None:
        """It is about to give up these blocks of a group."""

    def share_blocks(self, copy: TableCache, length: int) -> None:
        """Let an empty sequence list the blocks of the first ``length`` tokens, too."""
        whole = length // BLOCK
        for group, table in self._lists.items():
            own = copy._lists[group]
            for block in table.blocks[:whole]:
                own.add(block)
            if length % BLOCK:
                copy._take(own)
        copy._shared, self._shared = whole, max(whole, self._shared)
