"""Chooses a way to run a model on a machine: a pure function of what the two are.

`choose_run` makes attempts in the order of their worth and takes the first that fits. Each is a
profile, and whether it fits is what the memory plan says that loading makes, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from experts.manifest import Bits
from moe.errors import DoesNotFitError
from moe.loading.memory_plan import MemoryPlan, Offloadable
from moe.loading.progress import size_text
from moe.memory.budget import LEAST_POOL, plan_memory
from moe.memory.footprint import Footprint
from moe.settings.profile import LoadedProfile, load_profile
from offload.capacity import LEAST_SLOTS

WAVE, SHORT_WAVE = 8192, 1024
"""Prompt tokens of a pass: the default, and where memory is scarce."""
CONTEXT = 8192
"""Tokens for which a model with all experts in memory should have room, or its own context."""
SMALL = {"checkpoint": 1 << 30, "GGUF file": 256 << 20}
"""Bytes up to which weights are loaded as they are at each start: that takes a few seconds."""
LIKE_A_STORE = 1.1
"""Weights that take at most so many times the memory of a store of 8 bits are loaded as they are,
too, with their own numbers at their own size. A file of 1 GB takes six seconds at each start."""
TRUNK_BITS: Literal[8] = 8
"""Bits of everything but experts in a store."""


@dataclass(frozen=True)
class RunModel:
    """The memory that a model takes.

    Attributes:
        kind: what its files are.
        weight_bytes: of its weights where they are.
        remote: they are on a hub.
        whole: memory of ``trunk`` and ``experts`` as they are.
        trunk_bytes: memory of the trunk in a store.
        expert_bytes: memory of all experts, by their bits.
        num_experts: of all layers.
        alike: all experts have one shape, so they may stay on disk.
        footprints: what running it takes beside weights, by prompt tokens of a pass.
        logits_size: V of the logits.
        context: most tokens of a sequence; None for no limit.
        store_bits: of the experts of a store; None for other files.
    """

    kind: Literal["checkpoint", "GGUF file", "store"]
    weight_bytes: int
    remote: bool
    whole: Mapping[str, int]
    trunk_bytes: int
    expert_bytes: Mapping[int, int]
    num_experts: int
    alike: bool
    footprints: Mapping[int, Footprint]
    logits_size: int
    context: int | None
    store_bits: Bits | None = None

    @property
    def is_small(self) -> bool:
        """Its weights load in a few seconds."""
        return self.store_bits is None and self.weight_bytes <= SMALL[self.kind]

    @property
    def is_quantized(self) -> bool:
        """Its weights take about as much memory as they would in a store of 8 bits, or less."""
        whole, known = sum(self.whole.values()), 8 in self.expert_bytes
        return known and whole <= LIKE_A_STORE * self.store_bytes(8)

    def store_bytes(self, bits: int) -> int:
        """Disk that a store takes."""
        return self.trunk_bytes + self.expert_bytes[bits]


@dataclass(frozen=True)
class RunMachine:
    """The memory and disk of a machine.

    Attributes:
        memory: bytes for the model; None if unknown.
        disk: free bytes where stores and downloads go.
        stores: bits of this model's stores that are there already.
        place: what `memory` is of.
        host: beside a GPU, bytes of main memory for experts; None on a CPU.
    """

    memory: int | None
    disk: int
    stores: frozenset[int] = frozenset()
    place: str = "memory"
    host: int | None = None


@dataclass(frozen=True)
class RunChoice:
    """A way to run a model.

    Attributes:
        bits: of experts; None: as they are.
        offload: experts stay on disk, behind a cache.
        from_store: it runs from a store in the cache directory.
        convert: that store is to be made.
        settings: of the profile, by key.
        plan: of its memory.
        context: most tokens of a sequence; None for no limit.
        rejected: attempts of more worth, and why they fail, one sentence each.
    """

    bits: Bits | None
    offload: bool
    from_store: bool
    convert: bool
    settings: Mapping[str, Any]
    plan: MemoryPlan
    context: int | None
    rejected: tuple[str, ...]

    @property
    def profile(self) -> str:
        """Name of the profile that `settings` change."""
        return "offload" if self.offload else "default"

    @property
    def how(self) -> str:
        """The choice in words."""
        bits = "experts as they are" if self.bits is None else f"{self.bits}-bit experts"
        if not self.offload:
            return f"{bits}, all in {self.plan.place}"
        slots, total = self.plan.tiers[0].experts, self.plan.tiers[-1].experts
        return f"{bits}, {slots / total:.0%} of them in {self.plan.place}, the others on disk"


@dataclass(frozen=True)
class _Attempt:
    bits: Bits | None
    offload: bool = False
    wave: int = WAVE

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.bits is None else {"model.expert_bits": self.bits}
        if self.wave != WAVE:
            found |= {"prefill.wave_tokens": self.wave, "engine.max_batch_size": 4}
        return found


_AS_IT_IS = _Attempt(None)
# Below 4 bits text gets worse, which nobody should meet without having asked for it.
_ATTEMPTS = (
    _Attempt(8),
    _Attempt(4),
    _Attempt(4, wave=SHORT_WAVE),
    _Attempt(4, offload=True),
    _Attempt(4, offload=True, wave=SHORT_WAVE),
)


def choose_run(model: RunModel, machine: RunMachine) -> RunChoice:
    """The attempt of most worth that fits.

    As the files are where they are small or quantised (or on a GPU); else from a store, all experts
    in memory, at 8 bits or at 4; else at 4 bits from disk. Where the disk has no room for a store,
    weights are quantised while they are loaded.

    Raises:
        DoesNotFitError: none fits; says what each lacks.
    """
    rejected: list[str] = []
    for attempt in _attempts(model, machine):
        made = _try(model, machine, attempt)
        if isinstance(made, RunChoice):
            return replace(made, rejected=tuple(dict.fromkeys(rejected)))
        rejected.append(made)
    reasons = "\n".join(f"  - {reason}" for reason in dict.fromkeys(rejected))
    raise DoesNotFitError(f"the model does not fit on this machine:\n{reasons}")


def _attempts(model: RunModel, machine: RunMachine) -> Iterator[_Attempt]:
    if model.store_bits is None:
        if model.is_small or model.is_quantized or machine.host is not None:
            yield _AS_IT_IS
        yield from _ATTEMPTS
    elif model.store_bits in model.expert_bytes:
        most = model.store_bits
        yield from (
            _Attempt(min(one.bits or most, most), one.offload, one.wave) for one in _ATTEMPTS
        )
    else:  # whole experts
        yield from (replace(one, bits=None) for one in _ATTEMPTS)


def _try(model: RunModel, machine: RunMachine, attempt: _Attempt) -> RunChoice | str:
    """The choice, or why it fails."""
    bits, settings = attempt.bits, attempt.settings
    makes = bits is not None and model.store_bits is None
    convert = makes and bits not in machine.stores
    from_store = makes
    if convert and model.store_bytes(bits or 0) > machine.disk:
        lacks = f"a store of {bits} bits takes {_size(model.store_bytes(bits or 0))} of disk"
        if attempt.offload or (model.remote and model.weight_bytes > machine.disk):
            return f"{lacks}, and {_size(machine.disk)} are free"
        from_store = convert = False
        settings |= {"model.trunk_bits": TRUNK_BITS, "model.head_bits": TRUNK_BITS}
    if bits is None and model.remote and model.weight_bytes > machine.disk:
        return f"the download takes {_size(model.weight_bytes)} of disk"
    if attempt.offload and not model.alike:
        return "its experts have different shapes, so they cannot stay on disk"
    profile = load_profile("offload" if attempt.offload else "default", settings, {})
    plan = _plan(model, machine, attempt, profile)
    what = "as it is" if bits is None else f"at {bits} bits"
    what += "" if attempt.wave == WAVE else ", with short passes over prompts"
    if not plan.fits:
        kept = "with experts on disk" if attempt.offload else f"all in {plan.place}"
        return f"{what}, {kept}, it needs {_size(plan.needed_bytes)}, and {_free(machine)}"
    wanted = min(model.context or CONTEXT, LEAST_POOL if attempt.offload else CONTEXT)
    if plan.kv_tokens < wanted:
        return f"{what}, only {plan.kv_tokens} tokens of context have room, and {_free(machine)}"
    context = model.context
    if context is None or plan.kv_tokens < context:
        context = plan.kv_tokens
        settings |= {"model.context_length": context}
    return RunChoice(bits, attempt.offload, from_store, convert, settings, plan, context, ())


def _plan(
    model: RunModel, machine: RunMachine, attempt: _Attempt, profile: LoadedProfile
) -> MemoryPlan:
    weights, offloadable = dict(model.whole), None
    if attempt.bits is not None:
        experts = model.expert_bytes[attempt.bits]
        weights = {"trunk": model.trunk_bytes, "experts": experts}
    if attempt.offload:
        one = -(-weights["experts"] // model.num_experts)
        offloadable = Offloadable(model.num_experts, one, LEAST_SLOTS)
    return plan_memory(
        weights,
        model.footprints[attempt.wave],
        profile.profile,
        place=machine.place,
        available_bytes=machine.memory,
        context_length=model.context,
        logits_size=model.logits_size,
        offloadable=offloadable,
        host_bytes=machine.host if attempt.offload else None,
    )


def _free(machine: RunMachine) -> str:
    return "unknown memory" if machine.memory is None else f"{_size(machine.memory)} are free"


def _size(number: int) -> str:
    return size_text(number).strip()
