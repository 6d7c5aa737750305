"""The prefix cache: keys and values of prompts, kept for requests that begin with the same tokens.

A prompt enters the cache when it has been read, and stays when its sequence ends: the cache lists
the blocks of its keys and values, or copies them where they are in buffers. It keeps those of
answers only with `memory.reuse_answers`: decode steps round differently from a prefill pass, and
otherwise a hit must not change an answer.

When memory is wanted, it evicts an entry of the salt that holds most: a flood of prompts under one
salt costs that salt. Among its entries those go first whose memory no running sequence shares, and
of these the one that is worth least: what reading it again would cost for each token it holds,
above the worth of what was evicted last (GreedyDual-Size). With all experts in memory that is the
least recently used one; from disk a short prefix costs nearly as many experts as a long one.

A request's longest cached prefix is found by a hash over every block of tokens and all blocks
before it; then the tokens themselves are compared, so a collision costs a miss and never a wrong
answer. Prefixes are shared only among requests of the same salt, which keeps tenants apart.

States of recurrent layers cannot be cut: of such a model a prefix ends at a snapshot
(`KVCache.longest_fork`). They are taken where later prompts are likely to part from this one: a
block before its end, as the next turn of a chat parts from it in the marks of the answer; and where
it parts from a prompt that is cached, as all chats with one system prompt do (admission as in
Marconi, arXiv 2411.19379). Where our kernels run a recurrent layer, a hit changes no bits; torch's
own sum a recurrence in the order of a pass.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from kernels.cpu.kv import BLOCK as STORED_TOKENS
from moe.kv.cache import KVCache, SequenceCache
from moe.kv.layout import StoredBlock
from moe.kv.prefix_store import PrefixStore

BLOCK = 16
"""Tokens of a block; a prefix ends at the end of a block."""
_STORED = STORED_TOKENS // BLOCK  # blocks of one that is on disk


@dataclass(eq=False)
class Reservation:
    """Room for a prefix that is on its way, from disk or from another server.

    Attributes:
        tokens: of memory.
        stop: set when the room is wanted for something else: what comes is not taken.
    """

    tokens: int
    stop: Event = field(default_factory=Event)


@dataclass(eq=False)
class _Entry:
    salt: str
    token_ids: list[int]
    kv: KVCache
    hashes: list[bytes]
    worth: float = 0.0


@dataclass(eq=False)
class _Read:
    """Blocks of a prompt that are being read from disk, behind the first ``begin`` tokens; named by
    ``digests``."""

    salt: str
    token_ids: list[int]
    begin: int
    digests: tuple[bytes, ...]
    blocks: Future[list[StoredBlock]]
    room: Reservation


class PrefixCache:
    """Keys and values of prompts, found by their first tokens.

    Args:
        max_tokens: most tokens of memory held.
        recurrent: sequences have recurrent states.
        reread: what reading so many tokens again costs, in any unit.
        store: keeps on disk what is evicted; None: nothing does.
        new_cache: makes the cache of a sequence that begins with what the store has.

    Attributes:
        hit_tokens: tokens that requests did not have to read again, so far.
        asked_tokens: tokens of all requests that asked, so far.
        evictions: entries freed to make room, so far.
        restored_tokens: brought back from the store, so far.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        recurrent: bool = False,
        reread: Callable[[int], float] = float,
        store: PrefixStore | None = None,
        new_cache: Callable[[int], SequenceCache] = KVCache,
    ) -> None:
        self.max_tokens = max_tokens
        self._recurrent = recurrent
        self._reread = reread
        self.store, self._new_cache = store, new_cache
        self._reads: list[_Read] = []
        self._coming: list[Reservation] = []
        self.restored_tokens = 0
        self.hit_tokens = 0
        self.asked_tokens = 0
        self.evictions = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._index: dict[bytes, _Entry] = {}
        self._by_salt: Counter[str] | None = None  # tokens held; None: to be counted
        self._evicted_worth = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of memory held; what running sequences share is counted here, and so is what is on
        its way."""
        return self._held.total() + sum(room.tokens for room in self._coming)

    @property
    def evictable_tokens(self) -> int:
        """The number of `num_tokens` that become free if all is evicted; the others are those of
        running sequences, too."""
        return self.num_tokens - sum(entry.kv.lent_tokens for entry in self._entries.values())

    @property
    def _held(self) -> Counter[str]:
        held = self._by_salt
        if held is None:
            held = Counter()
            for entry in list(self._entries.values()):  # any thread may ask
                held[entry.salt] += entry.kv.held_tokens
            self._by_salt = held
        return held

    def add(self, salt: str, token_ids: Sequence[int], kv: KVCache) -> None:
        """Keep the state of a prompt; ``kv`` begins with it, and stays the caller's."""
        ids = list(token_ids[: kv.longest_fork(len(token_ids))])
        if kv.counts_blocks and not kv.recurrent:  # the rest would take a block of its own
            ids = ids[: len(ids) // STORED_TOKENS * STORED_TOKENS]
        hashes = block_hashes(salt, ids)
        if not hashes or len(ids) - kv.dropped_tokens > self.max_tokens:
            return
        if not kv.recurrent and not kv.longest_fork(len(hashes) * BLOCK):
            return  # none could go on from it
        known = self._index.get(hashes[-1])
        if known is not None and not (kv.recurrent and len(known.token_ids) < len(ids)):
            self._use(known)
            return
        entry = _Entry(salt, ids, kv.fork(len(ids), len(ids)), hashes)
        entry.kv.keep(True)
        self._entries[id(entry)] = entry
        self._use(entry)
        covered: set[_Entry] = set()
        for blocks, digest in enumerate(hashes, 1):
            if not kv.recurrent and entry.kv.longest_fork(blocks * BLOCK) < blocks * BLOCK:
                continue  # it cannot be cut there, and what it continues can
            if (known := self._index.get(digest)) is not None:
                covered.add(known)
            self._index[digest] = entry
        for known in covered:
            if not any(self._index.get(digest) is known for digest in known.hashes):
                self._remove(known)
        self._by_salt = None
        while self.num_tokens > self.max_tokens:
            self.evict()

    def match(
        self,
        salt: str,
        token_ids: Sequence[int],
        capacity: int,
        *,
        again: bool = False,
        hashes: Sequence[bytes] | None = None,
    ) -> KVCache | None:
        """A copy of the longest cached proper prefix, or None.

        At least one token is left to be read: the pass over it gives the next token.

        Args:
            again: the request has asked before, and waits.
            hashes: `block_hashes` of the tokens, if they are known.
        """
        self.asked_tokens += 0 if again else len(token_ids)
        entry, length = self._longest(salt, token_ids, hashes)
        if entry is None:
            return None
        self._use(entry)
        self.hit_tokens += length
        return entry.kv.fork(capacity, length)

    def reserve(self, tokens: int) -> Reservation | None:
        """Make room for a prefix that is on its way; None if it would not fit beside the others.

        The caller must `release` it. Until then, it gives way as entries do.
        """
        if tokens + sum(room.tokens for room in self._coming) > self.max_tokens:
            return None
        room = Reservation(tokens)
        self._coming.insert(0, room)
        while self.num_tokens > self.max_tokens:
            self.evict()
        return room

    def release(self, room: Reservation) -> bool:
        """End a reservation; whether the room was still there."""
        self._coming = [other for other in self._coming if other is not room]
        return not room.stop.is_set()

    def is_being_read(self, salt: str, token_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Return whether what follows the longest cached prefix of a prompt is being read from
        disk, for this prompt or for another: look again later.

        Args:
            hashes: `block_hashes` of the tokens.
        """
        self._take_read()
        if not self._reads:
            return False
        missing, _ = self._missing(token_ids, hashes, self._longest(salt, token_ids, hashes)[1])
        return bool(missing) and any(missing[0] in read.digests for read in self._reads)

    def read_ahead(self, salt: str, token_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Begin to read from disk what is known there of a prompt and not here; False: nothing is,
        or there is no room for it.

        Args:
            hashes: `block_hashes` of the tokens.
        """
        if self.store is None or self._recurrent:
            return False
        entry, length = self._longest(salt, token_ids, hashes)
        missing, begin = self._missing(token_ids, hashes, length)
        size = self.store.num_stored(missing) * STORED_TOKENS
        if entry is not None and begin and len(entry.token_ids) + size > self.max_tokens:
            return False  # it would evict what it goes on from
        room = self.reserve(size) if size else None
        if room is None:
            return False
        ids, missing = list(token_ids[: begin + size]), missing[: size // STORED_TOKENS]
        blocks = self.store.read(missing, ids[begin:])
        self._reads.append(_Read(salt, ids, begin, tuple(missing), blocks, room))
        return True

    def _missing(
        self, token_ids: Sequence[int], hashes: Sequence[bytes], length: int
    ) -> tuple[Sequence[bytes], int]:
        """The hashes of the store's blocks of a prompt behind its first ``length`` tokens, as far
        as the cache has room for such a prefix; and the first token of these blocks."""
        first = length // STORED_TOKENS
        most = min(len(token_ids) - 1, self.max_tokens) // STORED_TOKENS
        return hashes[_STORED - 1 :: _STORED][first:most], first * STORED_TOKENS

    def wait_for_read(self, seconds: float) -> bool:
        """Wait for what is being read from disk; whether something has come."""
        reading = [read.blocks for read in self._reads]
        return bool(reading and wait(reading, seconds, FIRST_COMPLETED).done)

    def _take_read(self) -> None:
        """Add what has come from disk."""
        come = [read for read in self._reads if read.blocks.done()]
        self._reads = [read for read in self._reads if read not in come]
        for read in come:
            wanted = self.release(read.room)
            entry, length = self._longest(read.salt, [*read.token_ids, 0])
            if not wanted or length < read.begin:  # its beginning has been evicted meanwhile
                continue
            size = len(read.token_ids)
            begun = entry.kv.fork(size, read.begin) if entry and read.begin else None
            kv = begun or self._new_cache(size).kv
            for digest, block in zip(read.digests, read.blocks.result(), strict=False):
                if not kv.append_block(block):
                    assert self.store is not None
                    self.store.refuse(digest)
                    break
            self.restored_tokens += kv.length - read.begin
            self.add(read.salt, read.token_ids[: kv.length], kv)

    def close(self) -> None:
        """Save what is kept, the most recently used first, if there is a store."""
        if self.store is not None:
            self.store.finish()
            for entry in reversed(self._entries.values()):
                self._save(self.store, entry, wait=True)

    @staticmethod
    def _save(store: PrefixStore, entry: _Entry, *, wait: bool = False) -> None:
        store.save(entry.kv, entry.hashes[_STORED - 1 :: _STORED], entry.token_ids, wait=wait)

    def snapshots(self, salt: str, token_ids: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Positions of a prompt, in order, where its recurrent states are worth keeping.

        Args:
            hashes: `block_hashes` of the tokens.
        """
        if not self._recurrent:
            return []
        before_end = max(len(token_ids) - BLOCK, 0)
        parting = self._parting(salt, token_ids, hashes)
        return sorted({parting, before_end} - {0, len(token_ids)})

    def _parting(self, salt: str, token_ids: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Return the place where a prompt parts from the cached prompt that is the most like it, or
        0."""
        for digest in reversed(hashes):
            entry = self._index.get(digest)
            if entry is not None and entry.salt == salt:
                return _common(entry.token_ids, token_ids)
        return 0

    def num_cached(self, salt: str, token_ids: Sequence[int]) -> int:
        """Tokens of the longest cached proper prefix."""
        return self._longest(salt, token_ids)[1]

    def copy_of(self, salt: str, token_ids: Sequence[int]) -> KVCache | None:
        """A copy of the state after all of these tokens, if it is kept; not counted as a hit."""
        entry, length = self._longest(salt, [*token_ids, 0])
        known = entry is not None and length == len(token_ids)
        return entry.kv.fork(length, length) if entry is not None and known else None

    def _longest(
        self, salt: str, token_ids: Sequence[int], hashes: Sequence[bytes] | None = None
    ) -> tuple[_Entry | None, int]:
        ids = list(token_ids[:-1])
        if hashes is None:
            hashes = block_hashes(salt, ids)
        best: tuple[_Entry | None, int] = None, 0
        for blocks in range(len(ids) // BLOCK, 0, -1):
            entry, length = self._index.get(hashes[blocks - 1]), blocks * BLOCK
            if entry is None or entry.salt != salt or entry.token_ids[:length] != ids[:length]:
                continue
            if not entry.kv.recurrent:
                if entry.kv.longest_fork(length) == length:
                    return max(best, (entry, length), key=lambda found: found[1])
                continue
            length = entry.kv.longest_fork(_common(entry.token_ids, ids))
            if length > best[1]:
                best = entry, length
        return best

    def evict(self) -> bool:
        """Free the entry that is worth least, or else the room of what is on its way; False if
        there is neither."""
        if not self._entries:
            if self._coming:
                self._coming.pop().stop.set()
                return True
            return False
        salt = max(self._held, key=self._held.__getitem__)
        entries = [entry for entry in self._entries.values() if entry.salt == salt]
        # A running sequence that shares nearly all of an entry would keep its memory.
        alone = [entry for entry in entries if 2 * entry.kv.sole_tokens > entry.kv.length]
        entry = min(alone or entries, key=lambda entry: entry.worth)
        self._evicted_worth = max(self._evicted_worth, entry.worth)
        if self.store is not None:
            self._save(self.store, entry)
        self._remove(entry)
        self.evictions += 1
        return True

    def _use(self, entry: _Entry) -> None:
        self._entries.move_to_end(id(entry))
        size = len(entry.token_ids)
        entry.worth = self._evicted_worth + self._reread(size) / size

    def _remove(self, entry: _Entry) -> None:
        for digest in entry.hashes:
            if self._index.get(digest) is entry:
                del self._index[digest]
        del self._entries[id(entry)]
        entry.kv.keep(False)
        self._by_salt = None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of first tokens that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def block_hashes(salt: str, token_ids: Sequence[int]) -> list[bytes]:
    """For each whole block, the hash of everything up to its end."""
    running = hashlib.blake2b(salt.encode(), digest_size=16)
    ids = np.asarray(token_ids, dtype=np.int64)
    hashes = []
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        running.update(ids[end - BLOCK : end].tobytes())
        hashes.append(running.digest())
    return hashes
