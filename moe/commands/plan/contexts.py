"""Tokens of context against experts in memory, and what policies on keys and values would save.

Two tables of `moe plan`: `context_choices` for `memory.kv_tokens`, `policy_prices` for
`memory.kv_policy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rich.table import Table

from moe.commands.plan.decode_speed import Bandwidths, DecodeSizes, Locality, estimate_decode
from moe.errors import ProfileError
from moe.kv.visibility import VISIBILITIES, RowVisibility, visibility
from moe.loading.memory_plan import ANY_LENGTH, GIB, MemoryPlan
from moe.memory.planning import PlannedModel

CONTEXTS = tuple(1024 << doubled for doubled in range(1, 8))
"""Tokens of context that a plan shows beside its own."""
TOKENS = 2048
"""That a policy leaves, if the profile names none."""


@dataclass(frozen=True)
class ContextChoice:
    """Tokens in the KV cache against experts in memory (`memory.kv_tokens` sets the former).

    Attributes:
        kv_tokens: of all sequences.
        kv_bytes: what they take.
        longest: tokens of the longest sequence that they have room for (`MemoryPlan`).
        experts: that are in memory beside them.
        tokens_per_second: of one sequence.
    """

    kv_tokens: int
    kv_bytes: int
    longest: int
    experts: int
    tokens_per_second: float


@dataclass(frozen=True)
class PolicyPrice:
    """Keys and values of one sequence whose prompt has been read, under a policy.

    Attributes:
        context: its tokens.
        policy: as `memory.kv_policy` has it; None: none.
        held_tokens: that it holds in layers which see all tokens.
        held_bytes: of all layers.
        step_bytes: that a decode step reads of them.
        experts: in memory beside them alone; None where all are.
    """

    context: int
    policy: str | None
    held_tokens: int
    held_bytes: int
    step_bytes: int
    experts: int | None


def context_choices(
    planned: PlannedModel, sizes: DecodeSizes, speeds: Bandwidths, locality: Locality
) -> list[ContextChoice]:
    """The plan's own choice of context, and others that fit."""
    plan, slots = planned.memory, planned.memory.expert_slots
    if slots is None or not plan.fits or planned.memory.host_bytes is not None:
        return []
    made = []
    for tokens in sorted({plan.kv_tokens, *CONTEXTS}):
        experts = plan.experts_beside(tokens)
        own = tokens == plan.kv_tokens
        if not own and experts < planned.least_experts:
            continue
        near = replace(sizes, slots=slots if own else experts)
        rate = estimate_decode(near, speeds, locality, 1).tokens_per_second
        size, longest = tokens * plan.kv_bytes_per_token, plan.longest_sequence(tokens)
        longest = min(longest, planned.context_length or longest)
        made.append(ContextChoice(tokens, size, longest, near.slots, rate))
    return made


def policy_prices(planned: PlannedModel) -> list[PolicyPrice]:
    """Price each policy after prompts of some lengths: what it holds and reads; none on a GPU, and
    where keys and values are not in blocks."""
    plan, own = planned.memory, planned.kv.policy
    if plan.place != "memory" or not planned.kv.in_blocks or not plan.fits:
        return []
    if plan.kv_policy is not None and not plan.kv_policy.lossy:
        return []  # the model's own takes the place of all of them
    tokens = TOKENS if own is None else own.tokens
    most = planned.context_length or CONTEXTS[-1]
    lengths = [times * tokens for times in (4, 16, 64) if times * tokens < most]
    policies = [None, *_known_policies(tokens)]
    if own is not None and str(own) not in map(str, policies):
        policies.append(own)
    return [
        policy_price(planned, policy, length)
        for length in [*lengths, most][:3]
        if length > tokens
        for policy in policies
    ]


def _known_policies(tokens: int) -> Iterator[RowVisibility | None]:
    """Yield the policies that need no more than the number of tokens."""
    for name in VISIBILITIES.names():
        with suppress(ProfileError):
            yield visibility(f"{name}:{tokens}")


def policy_price(planned: PlannedModel, policy: RowVisibility | None, length: int) -> PolicyPrice:
    """Price one policy after a prompt of one length."""
    own, bounds = planned.kv.policy, planned.footprint.bounds_bytes
    by_rows = planned.memory.kv_bytes_per_token - (bounds if own is not None and own.bounds else 0)
    chooses = policy is not None and policy.bounds
    each = by_rows + (bounds if chooses else 0)
    plan = replace(planned.memory, kv_policy=policy, kv_bytes_per_token=each)
    held, read = (length, length) if policy is None else (policy.held(length), policy.read(length))
    size, step = plan.kv_bytes(length), plan.kv_bytes(length, held=min(read, length))
    if chooses:  # of the others, the bounds
        step += (length - read) * bounds
    beside = plan.experts_beside(-(-size // each)) if plan.tiers else None
    return PolicyPrice(length, None if policy is None else str(policy), held, size, step, beside)


def context_table(choices: Sequence[ContextChoice], own_tokens: int, total: int) -> Table:
    """For people.

    Args:
        own_tokens: what the plan has chosen.
        total: experts of the model.
    """
    columns = (
        "memory.kv_tokens", "GiB", "longest sequence", "experts in memory", "share", "tokens/s"
    )  # fmt: skip
    table = Table(*columns, box=None, header_style="bold")
    for one in choices:
        own = " (this plan)" if one.kv_tokens == own_tokens else ""
        table.add_row(
            f"{one.kv_tokens:,}{own}",
            _gib(one.kv_bytes),
            f"{one.longest:,}",
            str(one.experts),
            f"{one.experts / total:.0%}",
            f"{one.tokens_per_second:,.1f}",
        )
    return table


def policy_table(prices: Sequence[PolicyPrice]) -> Table:
    """For people."""
    columns = ["behind a prompt of", "memory.kv_policy", "tokens held", "MiB", "MiB read a step"]
    if any(one.experts is not None for one in prices):
        columns.append("experts in memory")
    table = Table(*columns, box=None, header_style="bold")
    for one in prices:
        row = [
            "" if one.policy else f"{one.context:,}",
            one.policy or "null",
            f"{one.held_tokens:,}",
            f"{one.held_bytes / 2**20:,.1f}",
            f"{one.step_bytes / 2**20:,.1f}",
        ]
        table.add_row(*row, *([] if one.experts is None else [str(one.experts)]))
    return table


def kv_sentence(plan: MemoryPlan) -> str:
    """Say what the plan has chosen."""
    text = f"Keys and values: {plan.kv_tokens} tokens."
    if not plan.kv_windows:
        return text
    share = sum(plan.kv_windows.values()) / plan.kv_bytes_per_token
    longest = plan.longest_sequence(plan.kv_tokens)
    length = "any length" if longest >= ANY_LENGTH else f"{longest} tokens"
    return (
        f"{text} Layers with windows have {share:.0%} of a token's bytes and keep their windows "
        f"only, so that a sequence of {length} fits."
    )


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"
