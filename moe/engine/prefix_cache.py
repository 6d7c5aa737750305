"""The prefix cache: keys and values of prompts, kept for requests that begin with the same tokens.

When a sequence ends, the cache keeps a copy of its prompt's keys and values (it lists their blocks,
where they are in blocks). When memory is wanted, it evicts the least recently used entry of the
salt that holds most: a flood of prompts under one salt costs that salt. It keeps those of answers
only with `memory.reuse_answers`: decode steps round differently from a prefill pass, and otherwise
a hit must not change an answer. A request's longest cached
prefix is found by a hash over every block of tokens and all blocks before it; then the tokens
themselves are compared, so a collision costs a miss and never a wrong answer. Prefixes are shared
only among requests of the same salt, which keeps tenants apart.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe.network.kv_cache import KVCache

BLOCK = 16
"""Tokens of a block; a prefix ends at the end of a block."""


@dataclass(eq=False)
class _Entry:
    salt: str
    token_ids: list[int]
    kv: KVCache
    hashes: list[bytes]


class PrefixCache:
    """Keys and values of prompts, found by their first tokens.

    Args:
        max_tokens: most tokens of memory held.
        recurrent: sequences have recurrent states.

    Attributes:
        num_tokens: tokens of memory held.
        hit_tokens: tokens that requests did not have to read again, so far.
        asked_tokens: tokens of all requests that asked, so far.
        evictions: entries freed to make room, so far.
    """

    def __init__(self, max_tokens: int, *, recurrent: bool = False) -> None:
        self.max_tokens = max_tokens
        self._recurrent = recurrent
        self.num_tokens = 0
        self.hit_tokens = 0
        self.asked_tokens = 0
        self.evictions = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._index: dict[bytes, _Entry] = {}
        self._by_salt: Counter[str] = Counter()  # tokens held

    def add(self, salt: str, token_ids: Sequence[int], kv: KVCache) -> None:
        """Keep the state of a prompt; ``kv`` begins with it, and stays the caller's."""
        ids = list(token_ids[: kv.longest_fork(len(token_ids))])
        hashes = _block_hashes(salt, ids)
        if not hashes or len(ids) > self.max_tokens:
            return
        known = self._index.get(hashes[-1])
        if known is not None and not (kv.recurrent and len(known.token_ids) < len(ids)):
            return
        entry = _Entry(salt, ids, kv.fork(len(ids), len(ids)), hashes)
        self._entries[id(entry)] = entry
        self._count(entry, +1)
        for digest in hashes:
            known = self._index.get(digest)
            if known is not None and known.hashes[-1] == digest:  # the new entry covers it
                del self._entries[id(known)]
                self._count(known, -1)
            self._index[digest] = entry
        while self.num_tokens > self.max_tokens:
            self.evict()

    def match(self, salt: str, token_ids: Sequence[int], capacity: int) -> KVCache | None:
        """A copy of the longest cached proper prefix, or None.

        At least one token is left to be read: the pass over it gives the next token.
        """
        self.asked_tokens += len(token_ids)
        entry, length = self._longest(salt, token_ids)
        if entry is None:
            return None
        self._entries.move_to_end(id(entry))
        self.hit_tokens += length
        return entry.kv.fork(capacity, length)

    def snapshots(self, salt: str, token_ids: Sequence[int]) -> list[int]:
        """Positions of a prompt, in order, where its recurrent states are worth keeping."""
        if not self._recurrent:
            return []
        before_end = max(len(token_ids) - BLOCK, 0)
        return sorted({self._parting(salt, token_ids), before_end} - {0, len(token_ids)})

    def _parting(self, salt: str, token_ids: Sequence[int]) -> int:
        """Where a prompt parts from the cached prompt that is the most like it, or 0."""
        hashes = _block_hashes(salt, token_ids)
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

    def _longest(self, salt: str, token_ids: Sequence[int]) -> tuple[_Entry | None, int]:
        ids = list(token_ids[:-1])
        hashes = _block_hashes(salt, ids)
        best: tuple[_Entry | None, int] = None, 0
        for blocks in range(len(hashes), 0, -1):
            entry, length = self._index.get(hashes[blocks - 1]), blocks * BLOCK
            if entry is None or entry.salt != salt or entry.token_ids[:length] != ids[:length]:
                continue
            if not entry.kv.recurrent:
                return max(best, (entry, length), key=lambda found: found[1])
            length = entry.kv.longest_fork(_common(entry.token_ids, ids))
            if length > best[1]:
                best = entry, length
        return best

    def evict(self) -> bool:
        """Free the oldest entry of the salt that holds most; False if there is none."""
        if not self._entries:
            return False
        salt = max(self._by_salt, key=self._by_salt.__getitem__)
        entry = next(entry for entry in self._entries.values() if entry.salt == salt)
        del self._entries[id(entry)]
        self._count(entry, -1)
        self.evictions += 1
        for digest in entry.hashes:
            if self._index.get(digest) is entry:
                del self._index[digest]
        return True

    def _count(self, entry: _Entry, sign: int) -> None:
        tokens = sign * entry.kv.held_tokens
        self.num_tokens += tokens
        self._by_salt[entry.salt] += tokens
        if not self._by_salt[entry.salt]:
            del self._by_salt[entry.salt]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of first tokens that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _block_hashes(salt: str, token_ids: Sequence[int]) -> list[bytes]:
    """For each whole block, the hash of everything up to its end."""
    running = hashlib.blake2b(salt.encode(), digest_size=16)
    ids = np.asarray(token_ids, dtype=np.int64)
    hashes = []
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        running.update(ids[end - BLOCK : end].tobytes())
        hashes.append(running.digest())
    return hashes
