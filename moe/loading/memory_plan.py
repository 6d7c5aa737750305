"""The memory plan that `moe.memory.budget` works out: uses of memory, and places of experts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moe.kv.ledger import window_tokens
from moe.kv.visibility import RowVisibility
from moe.loading.progress import size_text
from offload.offloaded import HOST

GIB = 2**30
RESERVE = "reserve"
"""Name of the line that is for everything that has no line of its own."""
_LEAST_FOR_REQUESTS = 64 * 2**20
ANY_LENGTH = 2**32
"""Tokens of the longest sequence of a model whose layers all have windows."""


@dataclass(frozen=True)
class PlanLine:
    """One use of memory: its name, its bytes and where the figure comes from."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Offloadable:
    """Experts that can be read one by one.

    Attributes:
        experts: how many, of all layers.
        slot_bytes: memory of one.
        least: the fewest that must be in memory at once.
        fixed_bytes: of what always stays in memory: biases.
        most: the most that are wanted in memory at once, by a rank that others share the experts
            with; None for all.
    """

    experts: int
    slot_bytes: int
    least: int
    fixed_bytes: int = 0
    most: int | None = None


@dataclass(frozen=True)
class PlannedTier:
    """A place where experts are: its name, how many it has room for, and their bytes."""

    name: str
    experts: int
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a model will take.

    Attributes:
        lines: every use of memory.
        place: what is filled: ``memory``, or the name of a CUDA device.
        available_bytes: what was free; None where that cannot be read.
        kv_tokens: tokens of keys and values in all layers that may be held at once.
        kv_bytes_per_token: bytes of each.
        read_tokens: most tokens that a pass reads of one prompt; None: all of it.
        kv_windows: of the layers that keep no more than so many last tokens of a sequence, the
            bytes of a token.
        kv_policy: which keys and values sequences keep behind their prompts; None: all.
        prefix_tokens: of kv_tokens, the most that the prefix cache holds.
        wave_tokens: most prompt tokens of a prefill batch.
        tiers: where experts are, the fastest place first; empty where all are in memory.
        host_bytes: of main memory that experts may have beside those on a GPU; None on a CPU.
        notice: what became of weights that were quantised already, if any were.
    """

    lines: tuple[PlanLine, ...]
    place: str
    available_bytes: int | None
    kv_tokens: int
    kv_bytes_per_token: int
    tiers: tuple[PlannedTier, ...] = ()
    host_bytes: int | None = None
    notice: str = ""
    prefix_tokens: int = 0
    wave_tokens: int = 0
    read_tokens: int | None = None
    kv_windows: Mapping[int, int] = field(default_factory=dict)
    kv_policy: RowVisibility | None = None

    def kv_bytes(self, length: int, reading: int = 0, held: int | None = None) -> int:
        """Bytes of keys and values of a sequence.

        Args:
            reading: tokens of the passes that read its prompt, see `window_tokens`; 0: it has been
                read, so that `kv_policy` holds.
            held: tokens that it has in the layers which see all; None: as many as it keeps.
        """
        if held is None:
            held = length if reading or self.kv_policy is None else self.kv_policy.held(length)
        whole = self.kv_bytes_per_token - sum(self.kv_windows.values())
        return held * whole + sum(
            size * window_tokens(window, length, reading)
            for window, size in self.kv_windows.items()
        )

    def longest_sequence(self, kv_tokens: int, prompt: int | None = None) -> int:
        """The most tokens that one sequence may have, prompt included, where memory has room for so
        many tokens in all layers.

        Args:
            prompt: its tokens; None: as long as the sequence.
        """
        policy = self.kv_policy
        if not self.kv_windows and (policy is None or prompt is None):
            return kv_tokens

        def most_bytes(length: int) -> int:
            part = length if self.read_tokens is None else self.read_tokens
            held = length
            if policy is not None and prompt is not None:
                held = policy.most_held(min(prompt, length), length)
            return self.kv_bytes(length, min(part, length), held)

        room, most = kv_tokens * self.kv_bytes_per_token, kv_tokens
        while most < ANY_LENGTH and most_bytes(most) <= room:
            most = min(2 * most, ANY_LENGTH)
        return bisect_right(range(most + 1), room, lo=kv_tokens, key=most_bytes) - 1

    def in_buffers(self, per_token: int) -> MemoryPlan:
        """The same plan with keys and values in buffers, which keep all tokens in all layers: their
        memory then has room for another number of tokens."""
        tokens, prefixes = (
            max(number * self.kv_bytes_per_token // per_token, 1 if number else 0)
            for number in (self.kv_tokens, self.prefix_tokens)
        )
        return replace(
            self, kv_tokens=tokens, prefix_tokens=prefixes, kv_bytes_per_token=per_token,
            kv_windows={}, kv_policy=None,
        )  # fmt: skip

    @property
    def expert_slots(self) -> int | None:
        """The number of experts that are in memory at once; None: all of them."""
        return self.tiers[0].experts if self.tiers else None

    def experts_beside(self, kv_tokens: int) -> int:
        """Return how many experts would be in memory beside so many tokens of keys and values; of a
        plan with experts on disk. Negative: so many tokens do not fit."""
        near, size = self.tiers[0], {line.name: line.bytes for line in self.lines}
        room = near.bytes + size["keys and values"] - kv_tokens * self.kv_bytes_per_token
        return min(room * near.experts // near.bytes, self.tiers[-1].experts)

    @property
    def request_bytes(self) -> int:
        """Bytes of the reserve that are for bodies and answers of the server's requests."""
        reserve = sum(line.bytes for line in self.lines if line.name == RESERVE)
        return max(reserve // 2, _LEAST_FOR_REQUESTS)

    @property
    def needed_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def host_needed_bytes(self) -> int:
        """Bytes of main memory that experts take beside a GPU."""
        return sum(tier.bytes for tier in self.tiers if tier.name == HOST)

    @property
    def fits(self) -> bool:
        if self.host_bytes is not None and self.host_needed_bytes > self.host_bytes:
            return False
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        rows = [f"{line.name:<{width}} {size_text(line.bytes)}  {line.how}" for line in self.lines]
        free = (
            "an unknown number" if self.available_bytes is None else size_text(self.available_bytes)
        )
        total = f"{'in all':<{width}} {size_text(self.needed_bytes)}  of {free.strip()} available"
        tiers = [
            f"{tier.name + ':':<{width + 2}} {size_text(tier.bytes)}  {tier.experts} experts"
            for tier in self.tiers[1:]
        ]
        lines = [f"{self.place}:", *(f"  {row}" for row in [*rows, total]), *tiers]
        return "\n".join([*lines, *filter(None, [self.notice])])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        policy = None if self.kv_policy is None else str(self.kv_policy)
        counted = {"needed_bytes": self.needed_bytes, "fits": self.fits}
        return asdict(self) | counted | {"kv_policy": policy}
