"""The ledger of blocks: tables list them, and a block is free when no table does.

Memory is counted in tokens of all layers, so that one number serves every model. Layers that see a
window have blocks of their own, which weigh less; so have heads that a policy limits. A block
counts for one of the tables that list it. A table is kept beside its sequence, so that it outlives
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

from kernels.cpu.kv import BLOCK
from moe.kv.layout import LayerKey
from moe.kv.visibility import RowVisibility

ALL = 0
"""The window of layers that see all tokens."""
PART = -1
"""In place of a window: in layers that see all, rows of the heads that a policy by heads limits."""
SLACK = BLOCK
"""Tokens behind a window that a sequence keeps, so that `KVCache.cut` can take back drafts."""


def window_tokens(window: int, length: int, reading: int = 0) -> int:
    """The most tokens that a sequence of this length keeps in layers with a window.

    Args:
        reading: tokens of the passes that read it, beyond a block.
    """
    return min(length, -(-window // BLOCK) * BLOCK + SLACK + BLOCK + reading)


@dataclass(frozen=True)
class Windows:
    """The layers that see no more than their last tokens, and what that saves.

    Attributes:
        of_layer: the window of each such layer.
        token_bytes: of each window, the bytes of a token in its layers.
        shares: the same as parts of a token's bytes in all layers of attention.
    """

    of_layer: Mapping[int, int] = field(default_factory=dict)
    token_bytes: Mapping[int, int] = field(default_factory=dict)
    shares: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, of_layer: Mapping[int, int], layer_bytes: Mapping[int, int]) -> Windows:
        """From the bytes of a token in each layer of attention."""
        sizes = dict.fromkeys(sorted(set(of_layer.values())), 0)
        for layer, window in of_layer.items():
            sizes[window] += layer_bytes[layer]
        total = sum(layer_bytes.values())
        return cls(of_layer, sizes, {window: size / total for window, size in sizes.items()})

    def held_tokens(self, length: int, reading: int = 0) -> int:
        """Memory of a sequence that gives up what is behind windows, in tokens of all layers; see
        `window_tokens`."""
        saved = sum(
            share * (length - window_tokens(window, length, reading))
            for window, share in self.shares.items()
        )
        return length - int(saved)


@dataclass(eq=False)
class KVBlock:
    """64 tokens of one or more sequences, in layers that see equally far; or a `PART` of it.

    Attributes:
        number: by which a `moe.kv.blocks.BlockMemory` knows its rows; 0 where another process has
            them. A part has that of its block.
        holders: the tables that list it, the one that it counts for first.
    """

    number: int = 0
    holders: dict[BlockTable, None] = field(default_factory=dict)


@dataclass(eq=False)
class BlockTable:
    """The blocks of a sequence in layers that see equally far.

    Attributes:
        ledger: counts the blocks.
        group: of layers, see `BlockLedger.shares`.
        blocks: in the order of tokens; None: given up.
        shared: how many of them count for another sequence.
        kept: the prefix cache keeps the sequence: what it lists counts for it.
        dropped: how many it has given up.
    """

    ledger: BlockLedger
    group: int
    blocks: list[KVBlock | None] = field(default_factory=list)
    shared: int = 0
    kept: bool = False
    dropped: int = 0

    @property
    def unpaid(self) -> int:
        """Blocks of the sequence whose memory does not count for it."""
        return self.dropped + self.shared

    @property
    def held(self) -> Iterator[KVBlock]:
        """The blocks that it has not given up."""
        return (block for block in self.blocks if block is not None)

    def take(self, whole: KVBlock | None = None) -> None:
        """List a new block behind the others; see `BlockLedger.take`."""
        self.add(self.ledger.take(self.group, whole))

    def add(self, block: KVBlock | None) -> None:
        """List a block of another sequence behind the others, too; None: it has given that up."""
        if block is None:
            self.dropped += 1
        else:
            self.shared += bool(block.holders)
            block.holders[self] = None
        self.blocks.append(block)

    def keep(self, kept: bool) -> None:
        self.kept = kept
        for block in self.held:
            self._settle(block)

    @property
    def lent(self) -> int:
        """Blocks that count for it, and that sequences which are not kept list too."""
        own = (block for block in self.held if next(iter(block.holders)) is self)
        return sum(not all(holder.kept for holder in block.holders) for block in own)

    def sole_tokens(self, length: int, block_tokens: int) -> int:
        """Return the tokens of a sequence of this length whose memory no other has."""
        others = sum(len(block.holders) > 1 for block in self.held)
        return max(length - block_tokens * others, 0)

    def empty_tokens(self, length: int, block_tokens: int) -> int:
        """Tokens that its blocks have room for behind a sequence of this length."""
        return max(block_tokens * len(self.blocks) - length, 0)

    def release(self) -> None:
        """List no blocks any more; each counts for another sequence that lists it."""
        self.kept = False
        self.drop(range(len(self.blocks)))

    def drop(self, places: Iterable[int]) -> None:
        """List these blocks no more; each counts for another sequence that lists it."""
        for at in places:
            block, self.blocks[at] = self.blocks[at], None
            if block is None:
                continue
            self.dropped += 1
            if len(block.holders) > 1:
                others = [holder for holder in block.holders if holder is not self]
                _count_for(next((holder for holder in others if holder.kept), others[0]), block)
                self.shared -= 1
            del block.holders[self]

    def _settle(self, block: KVBlock) -> None:
        if not next(iter(block.holders)).kept:
            kept = (holder for holder in block.holders if holder.kept)
            if (holder := next(kept, None)) is not None:
                _count_for(holder, block)


def _count_for(table: BlockTable, block: KVBlock) -> None:
    """Let a block count for this one of the tables that list it."""
    before = next(iter(block.holders))
    if before is not table:
        before.shared += 1
        table.shared -= 1
        block.holders = {table: None} | block.holders


class BlockLedger:
    """Counts the blocks of all sequences of a model.

    Args:
        windows: of layers that see no more than so many last tokens; none where `counts_blocks`:
            there, all layers have the same blocks.
        policy: what decode steps attend to, so that sequences give up the rest; None: all.
        counts_blocks: there are only so many blocks, so that sequences count by blocks.

    Attributes:
        shares: of a token's bytes, those of the layers that see so far: `ALL`, and each window; and
            `PART`, if the policy is by heads.
        block_tokens: tokens of a block.
    """

    block_tokens = BLOCK

    def __init__(
        self,
        windows: Windows | None = None,
        policy: RowVisibility | None = None,
        *,
        counts_blocks: bool = False,
    ) -> None:
        self.windows, self.policy = windows or Windows(), policy
        self.counts_blocks = counts_blocks
        assert not (self.windows.of_layer and counts_blocks), "all layers have these blocks"
        whole = 1 - sum(self.windows.shares.values())
        self.shares = {ALL: whole, **self.windows.shares}
        if policy is not None and policy.by_heads:
            assert not any(self.group_of(layer) for layer, _ in policy.heads)
            self.shares |= {ALL: whole * policy.share, PART: whole * (1 - policy.share)}
        self._alive: dict[int, WeakSet[KVBlock]] = {group: WeakSet() for group in self.shares}

    def counting(self) -> BlockLedger:
        """A ledger of the blocks that a pool like this one has in another process."""
        return BlockLedger(self.windows, self.policy, counts_blocks=self.counts_blocks)

    @property
    def held_tokens(self) -> float:
        """Tokens that the blocks in use have room for; a shared block counts once."""
        return sum(BLOCK * self.shares[group] * len(own) for group, own in self._alive.items())

    def group_of(self, layer: LayerKey) -> int:
        """Return how far a layer sees."""
        return self.windows.of_layer.get(layer, ALL) if isinstance(layer, int) else ALL

    def take(self, group: int, whole: KVBlock | None = None) -> KVBlock:
        """A block that no table lists yet.

        Args:
            whole: the block whose `PART` is taken; None: a whole one is.

        Raises:
            MemoryError: all blocks are in use, where there are only so many.
        """
        block = KVBlock()
        self._alive[group].add(block)
        return block
