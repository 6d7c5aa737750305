"""``moe plan``: predict memory, placement and decode speed of a model before it is loaded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from moe.cache_dir.proofs import proofs_of
from moe.commands.console import stdout_console
from moe.commands.plan.contexts import (
    ContextChoice,
    PolicyPrice,
    context_choices,
    context_table,
    kv_sentence,
    policy_prices,
    policy_table,
)
from moe.commands.plan.decode_speed import (
    BATCHES,
    Bandwidths,
    DecodeEstimate,
    DecodeSizes,
    Locality,
    estimate_decode,
)
from moe.commands.plan.speeds import DiskSpeed, MachineSpeeds
from moe.commands.plan.traced_routing import known_routing
from moe.errors import DoesNotFitError
from moe.hooks import ModelHook
from moe.loader import expert_backend, routing_policies
from moe.loading.hub import ModelFiles, experts_per_token, reach_model
from moe.loading.local import public_name
from moe.loading.memory_plan import GIB, MemoryPlan
from moe.loading.sources import missing_experts
from moe.memory.planning import PlannedModel, check_fit, planning
from moe.network.seam import experts_modules
from moe.settings import Profile
from moe.settings.device import use_device
from moe.settings.profile import LoadedProfile, load_profile, value_of

SIZES = ModelHook[Callable[[PreTrainedModel, DecodeSizes, Profile], DecodeSizes]]("sizes")
"""Says what steps of a model read that is not autoregressive."""


@dataclass(frozen=True)
class SpeedPlan:
    """The result of `moe plan`.

    Attributes:
        memory: the memory plan.
        misfit: if it does not fit, what to change; else empty.
        sizes: of the model's experts.
        speeds: of this machine.
        measured: ``now``, or the minute in which the oldest of them was measured.
        locality: what is known of the model's routing.
        expected: estimates for some batch sizes.
        resident: estimate for one sequence, if all experts were in device memory.
        contexts: what other numbers of tokens in the KV cache would leave; empty where all experts
            are in memory.
        policies: what policies on keys and values would hold and read.
        prefixes: whether late experts may be read by a prefix, which the estimates do not count.
        download_bytes: what the hub has of it that is not here.
        commands: what to run next.
    """

    memory: MemoryPlan
    misfit: str
    sizes: DecodeSizes
    speeds: Bandwidths
    measured: str
    locality: Locality
    expected: Sequence[DecodeEstimate]
    resident: DecodeEstimate
    contexts: Sequence[ContextChoice]
    policies: Sequence[PolicyPrice]
    prefixes: bool
    download_bytes: int
    commands: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "memory": self.memory.as_dict(),
            "misfit": self.misfit,
            "sizes": asdict(self.sizes),
            "speeds": asdict(self.speeds),
            "measured": self.measured,
            "routing": self.locality.how,
            "expected": [one.as_dict() for one in self.expected],
            "resident": self.resident.as_dict(),
            "contexts": [asdict(one) for one in self.contexts],
            "policies": [asdict(one) for one in self.policies],
            "download_bytes": self.download_bytes,
            "commands": self.commands,
        }


def run(
    name: str | Path, profile: LoadedProfile, said: Sequence[str] = (), *, as_json: bool
) -> int:
    """Print the plan of a model; 0 if it fits, 1 if not.

    Args:
        said: the options of the command line that made the profile.
    """
    made = plan_speed(name, profile, said)
    if as_json:
        print(json.dumps(made.as_dict()))
    else:
        show(made, stdout_console())
    return 1 if made.misfit else 0


def plan_speed(name: str | Path, profile: LoadedProfile, said: Sequence[str] = ()) -> SpeedPlan:
    """Plan a model, and measure this machine for it.

    Args:
        said: as for `run`.

    Raises:
        CheckpointError, UnsupportedModelError, ProfileError: as when loading.
        CalibrationError: the calibration is damaged or another model's.
    """
    settings = profile.profile
    device = use_device(settings)
    check_settings(settings, device)
    with (
        reach_model(name, whole=False) as files,
        proofs_of(files.path, settings, device=device),
        planning(files.path, settings, device, lambda _: None) as planned,
    ):
        sizes, misfit = model_sizes(planned, settings), ""
        try:
            check_fit(planned.memory, settings, planned.why_resident)
        except DoesNotFitError as error:
            misfit = str(error)
    locality = known_routing(files.path, planned, sizes, settings.offload.policy)
    offloads = bool(planned.memory.tiers)
    machine = MachineSpeeds(device, settings.model.proof_cache)
    disk = disk_of(files, sizes, settings.offload.reader, machine) if offloads else None
    speeds = replace(
        machine.steps(expert_bits(planned.network, sizes), disk),
        to_device=machine.to_device() if offloads else None,
        products=machine.products() if sizes.rows > 1 else None,
    )
    all_near = replace(sizes, slots=sizes.total)
    return SpeedPlan(
        planned.memory,
        misfit,
        sizes,
        speeds,
        machine.since or "now",
        locality,
        [estimate_decode(sizes, speeds, locality, batch) for batch in BATCHES],
        estimate_decode(all_near, replace(speeds, disk=None, to_device=None), locality, 1),
        context_choices(planned, sizes, speeds, locality),
        policy_prices(planned),
        missing_experts(settings) is not None,
        0 if files.remote is None else files.remote.nbytes,
        next_commands(str(name), bool(misfit), planned.why_resident, said, profile),
    )


def check_settings(settings: Profile, device: torch.device) -> None:
    """Raise the `ProfileError` of loading for settings that no plan reads.

    A plan ends with a command to run, which must not be refused.
    """
    routing_policies(settings)
    expert_backend(settings, device)


def next_commands(
    name: str, misfit: bool, why_resident: str, said: Sequence[str], profile: LoadedProfile
) -> list[str]:
    """Return commands to run after a plan, with what it was made for; empty for what fits in no
    way."""
    if not misfit:
        return [shlex.join(["moe", "serve", name, *said])]
    if not why_resident:
        return []
    store = f"{public_name(name).rpartition('/')[2].replace(':', '-')}-store"
    serving = ["moe", "serve", store, *_for_offload(said, profile)]
    return [shlex.join(["moe", "convert", name, store]), shlex.join(serving)]


def _for_offload(said: Sequence[str], profile: LoadedProfile) -> list[str]:
    """The options ``said`` with the profile `offload`, or beside another profile with those of its
    settings that this one leaves open."""
    if said[:1] != ["--profile"]:
        return ["--profile", "offload", *said]
    tuned = load_profile("offload", environ={})
    keys = [key for key, origin in tuned.origins.items() if origin != "default"]
    values = {
        key: value_of(tuned.profile, key) for key in keys if profile.origins[key] == "default"
    }
    added = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    return [*said, *(word for setting in added for word in ("--set", setting))]


def model_sizes(planned: PlannedModel, profile: Profile) -> DecodeSizes:
    """Sizes of a model and of its memory plan; the mean if layers differ."""
    network, weights, memory = planned.network, planned.weights.nbytes, planned.memory
    modules = experts_modules(network)
    total = sum(module.num_experts for _, module in modules)
    owned = tuple(f"{name}." for name, _ in modules)
    experts = sum(size for name, size in weights.items() if name.startswith(owned))
    near = memory.expert_slots
    sizes = DecodeSizes(
        layers=len(modules),
        experts=total // len(modules),
        top_k=experts_per_token(planned.config),
        expert_bytes=experts // total,
        trunk_bytes=sum(weights.values()) - experts - _looked_up(network, weights),
        slots=total if near is None else near,
        host_slots=next((tier.experts for tier in memory.tiers if tier.name == "host"), 0),
    )
    refine = SIZES.of(network)
    return sizes if refine is None else refine(network, sizes, profile)


def flops_a_token(network: PreTrainedModel, sizes: DecodeSizes) -> float:
    """Two for each weight that a token meets outside attention, the embedding and the head."""
    experts = sum(p.numel() for _, m in experts_modules(network) for p in m.parameters())
    others = sum(p.numel() for p in network.parameters()) - experts
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    tables = {id(p): p.numel() for module in ends for p in module.parameters()}
    return 2.0 * (others - sum(tables.values()) + experts * sizes.top_k / sizes.experts)


def expert_bits(network: PreTrainedModel, sizes: DecodeSizes) -> float:
    """Return the bits of a weight of an expert, scales included."""
    modules = [module for _, module in experts_modules(network)]
    numbers = sum(p.numel() for module in modules for p in module.parameters())
    return 8 * sizes.expert_bytes * sum(module.num_experts for module in modules) / numbers


def _looked_up(network: PreTrainedModel, weights: Mapping[str, int]) -> int:
    """Bytes of the input embedding, of which a step reads few rows; 0 if it is the head's."""
    table, head = network.get_input_embeddings(), network.get_output_embeddings()
    if network.config.get_text_config().tie_word_embeddings:
        return 0
    names = {id(module): name for name, module in network.named_modules()}
    return 0 if table is head else weights.get(f"{names[id(table)]}.weight", 0)


def disk_of(
    files: ModelFiles, sizes: DecodeSizes, reader: str, machine: MachineSpeeds
) -> DiskSpeed:
    """Return the speed at which experts of a model come from its disk, or from the one where it
    would be."""
    if files.remote is not None:
        return machine.cache_disk(Path(constants.HF_HUB_CACHE), sizes.expert_bytes, reader)
    largest = max(files.path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return machine.disk(largest, sizes.expert_bytes, reader)


def show(made: SpeedPlan, console: Console) -> None:
    """Tables of the plan."""
    memory, sizes = made.memory, made.sizes
    table = Table("in " + memory.place, "GiB", "what it is", box=None, header_style="bold")
    for line in memory.lines:
        table.add_row(line.name, _gib(line.bytes), line.how)
    available = memory.available_bytes
    free = "" if available is None else f"of {_gib(available)} available"
    table.add_row("in all", _gib(memory.needed_bytes), free)
    for tier in memory.tiers[1:]:
        share = tier.experts / sizes.total
        table.add_row(f"on {tier.name}", _gib(tier.bytes), f"{share:.0%} of the experts")
    console.print(table)
    console.print()
    if memory.notice:
        console.print(f"Weights: {memory.notice}.", soft_wrap=True)
    if made.misfit:
        remedies = [line for line in made.misfit.splitlines() if line.startswith("  - ")]
        console.print("It does not fit. What would help:", *remedies, sep="\n", soft_wrap=True)
        if made.commands:
            console.print(_next(made), soft_wrap=True)
        return
    columns = ("sequences", "hits", "MB from disk a token", "tokens/s", "at best", "bound by")
    table = Table(*columns, box=None, header_style="bold")
    for one in made.expected:
        rates = (one.tokens_per_second, one.best_tokens_per_second)
        table.add_row(
            str(one.batch),
            f"{one.hit_ratio:.1%}",
            f"{one.disk_bytes_per_token / 1e6:,.1f}",
            *(f"{rate:,.1f}" for rate in rates),
            one.bound.replace("_", " "),
        )
    console.print(table)
    console.print()
    if made.contexts:
        console.print(context_table(made.contexts, memory.kv_tokens, sizes.total))
        console.print()
    if made.policies:
        console.print(policy_table(made.policies))
        console.print()
    for sentence in sentences(made):
        console.print(sentence, soft_wrap=True)


def sentences(made: SpeedPlan) -> list[str]:
    """The text below the tables."""
    own = made.speeds
    paths = {"memory": own.memory, "disk": own.disk, "to device": own.to_device}
    figures = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in paths.items() if rate)
    if own.products:
        figures += f", products {own.products / 1e9:.0f} GFLOP/s"
    if own.layer_s:
        figures += f"; a layer beside its weights {1e6 * own.beside(1, 1):.0f} us (not measured)"
    found = [
        f"Routing: {made.locality.how}.",
        f"Measured {made.measured}: {figures}. At best: all transfers overlap with other work.",
        kv_sentence(made.memory),
    ]
    if made.sizes.about:
        found.insert(0, made.sizes.about)
    if made.policies:
        found.append(
            "memory.kv_policy changes answers (lossless: false; moe eval prices that), and loading "
            "refuses it for attention that cannot follow it, as latent attention."
        )
    if made.memory.tiers:
        more = (made.sizes.total - made.sizes.slots) * made.sizes.expert_bytes
        rate = made.resident.tokens_per_second
        if made.prefixes:
            found.append("Experts are counted whole: offload.late reads fewer bytes of some.")
        found.append(f"With {_gib(more)} GiB more all experts are in memory: {rate:.1f} tokens/s.")
    return [*found, _next(made)]


def _next(made: SpeedPlan) -> str:
    size = f"{_gib(made.download_bytes)} GiB"
    what = f" (downloads {size})" if made.download_bytes else ""
    if made.download_bytes and len(made.commands) > 1:
        what = f" (reads {size} from the hub and keeps none of it but the store)"
    first, *more = made.commands
    return "Next: " + ", then ".join([f"{first}{what}", *more])


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"
