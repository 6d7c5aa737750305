"""``moe plan --ranks N``: would several ranks be faster than one, or than as many replicas?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from experts.placement import Placement, first_placement
from kernels.cpu import choose_kernel
from moe.cache_dir.proofs import proofs_of
from moe.commands.console import stdout_console
from moe.commands.plan.command import check_settings, disk_of, flops_a_token, model_sizes
from moe.commands.plan.decode_speed import BATCHES, Bandwidths, DecodeSizes, Locality
from moe.commands.plan.ranks import (
    LAYERS,
    EngineCosts,
    Machine,
    ModelNeeds,
    PromptNeeds,
    RankAdvice,
    RankForecast,
    RankPlan,
    Traffic,
    loads_of,
    recommend,
    traffic,
    uniform_steps,
)
from moe.commands.plan.speeds import Link, MachineSpeeds, given_link
from moe.commands.plan.traced_routing import TracedRouting, known_routing
from moe.errors import ProfileError, UnsupportedModelError
from moe.hooks import Hook
from moe.loading.hub import reach_model
from moe.loading.memory_plan import GIB
from moe.memory.budget import LEAST_POOL
from moe.memory.planning import PlannedModel, planning
from moe.settings import Profile
from moe.settings.device import use_device
from moe.settings.profile import LoadedProfile

RANK_ADVICE = Hook[Callable[[EngineCosts | None, int], RankAdvice]]("rank_advice")
"""Judges whether so many independent ranks would gain by a method, by what an engine's work costs
on each; None: a model does not fit there."""
MAX_RANKS = 320  # each takes the plan a second and more
NETWORK = Link(1.25e9, 50e-6, "taken, as of 10 Gb/s Ethernet; --network GB/s,microseconds says it")


@dataclass(frozen=True)
class RanksPlan:
    """The result of the command."""

    plans: list[RankPlan]
    machine: Machine
    advice: str
    more: list[RankAdvice]
    assumptions: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "plans": [plan.as_dict() for plan in self.plans],
            "machine": asdict(self.machine),
            "advice": self.advice,
            "assumptions": self.assumptions,
            **{
                one.name: {"advice": one.advice, "simulated": [*one.simulated]} for one in self.more
            },
        }


def run(
    name: str | Path,
    profile: LoadedProfile,
    *,
    ranks: int,
    nodes: int,
    link: str | None,
    network: str | None,
    as_json: bool,
) -> int:
    """Print the plan; 0."""
    given = None if link is None else given_link(link, "--link")
    between = NETWORK if network is None else given_link(network, "--network")
    made = plan_many(name, profile, ranks, nodes, given, between)
    if as_json:
        print(json.dumps(made.as_dict()))
    else:
        show(made, stdout_console())
    return 0


def plan_many(
    name: str | Path,
    profile: LoadedProfile,
    ranks: int,
    nodes: int,
    link: Link | None,
    network: Link,
) -> RanksPlan:
    """Plan a model for 1 to ``ranks`` ranks, and measure this machine for it.

    Raises:
        CheckpointError, UnsupportedModelError, ProfileError: as when loading.
        CalibrationError: the calibration is damaged or another model's.
    """
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ProfileError(
            f"--ranks is {ranks} and --nodes {nodes}: both must be at least 1, and the ranks a "
            "multiple of the nodes"
        )
    if ranks > MAX_RANKS:
        raise ProfileError(
            f"--ranks is {ranks}, and plans are made for {MAX_RANKS} at most; give a smaller number"
        )
    kernels, why = choose_kernel()
    if kernels is None:
        raise ProfileError(f"--ranks needs the compiled CPU kernels: {why}; install a C++ compiler")
    settings = profile.profile
    device = use_device(settings)
    check_settings(settings, device)
    measured = MachineSpeeds(device, settings.model.proof_cache)
    with (
        reach_model(name, whole=False) as files,
        proofs_of(files.path, settings, device=device),
        planning(files.path, settings, device, lambda _: None) as planned,
    ):
        needs = model_needs(planned, settings)
        if (rows := needs.sizes.rows) > 1:
            raise UnsupportedModelError(
                f"--ranks compares decode steps of one token a sequence, and a step of this model "
                f"reads {rows}; plan it without --ranks"
            )
        prompts = PromptNeeds(
            flops_a_token=flops_a_token(planned.network, needs.sizes),
            flops_per_s=measured.products(),
            kv_bytes_a_token=planned.memory.kv_bytes_per_token,
            chunk_tokens=settings.prefill.chunk_tokens,
        )
        available, why_resident = planned.memory.available_bytes, planned.why_resident
    locality = known_routing(files.path, planned, needs.sizes, settings.offload.policy)
    disk = None
    if not why_resident:
        disk = disk_of(files, needs.sizes, settings.offload.reader, measured).bytes_per_s
    link = link or (measured.link() if ranks > 1 else NETWORK)
    machine = Machine(Bandwidths(measured.memory(), disk), available, link, network)
    kind = settings.parallel.placement

    @cache
    def placements(count: int) -> list[Placement]:
        return first_placements(locality, needs.sizes, count, kind, needs.replicas)

    def traffic_of(batch: int, count: int) -> Traffic:
        return expected_traffic(locality, needs.sizes, batch, placements(count))

    forecast = RankForecast(needs, machine, ranks // nodes, locality, traffic_of)
    plans = forecast.plans(ranks, BATCHES)
    advice = f"none of these, the experts do not fit: {why_resident}"
    if (chosen := recommend(plans, BATCHES[-1])) is not None:
        advice = f"{chosen[0].name}: {chosen[1]}"
    costs = forecast.engine_costs(ranks, prompts)
    more = [advise(costs, ranks) for advise in RANK_ADVICE.of_all()]
    assumptions = _assumptions(machine, locality, prompts, more)
    return RanksPlan(plans, machine, advice, more, assumptions)


def model_needs(planned: PlannedModel, settings: Profile) -> ModelNeeds:
    """Return what ranks need to hold a model."""
    sizes, memory = model_sizes(planned, settings), settings.memory
    lines = {line.name: line.bytes for line in planned.memory.lines}
    config = planned.config.get_text_config()
    kv_bytes = lines["keys and values"]
    if memory.kv_tokens is None and memory.kv_gib is None:  # the pool was given what was left
        kv_bytes = min(kv_bytes, LEAST_POOL * planned.memory.kv_bytes_per_token)
    dtype = next(planned.network.parameters()).dtype
    return ModelNeeds(
        sizes=replace(sizes, slots=sizes.total, host_slots=0),
        fixed_bytes=sum(lines.values()) - lines["experts"] - (lines["keys and values"] - kv_bytes),
        row_bytes=config.hidden_size * dtype.itemsize,
        replicas=settings.parallel.replicas,
    )


def first_placements(
    locality: Locality, sizes: DecodeSizes, ranks: int, kind: str, replicas: float
) -> list[Placement]:
    """Placements of the sampled layers, by the first half of the recorded routing."""
    if not isinstance(locality, TracedRouting):
        return [first_placement(kind, sizes.experts, ranks, replicas)] * min(sizes.layers, LAYERS)
    steps_SLBK = locality.steps(BATCHES[-1])
    seen = loads_of(steps_SLBK[: max(len(steps_SLBK) // 2, 1)], sizes.experts)
    return [first_placement(kind, sizes.experts, ranks, replicas, seen_SE) for seen_SE in seen]


def expected_traffic(
    locality: Locality, sizes: DecodeSizes, batch: int, placements: Sequence[Placement]
) -> Traffic:
    """Traffic on the second half of the recorded routing, or on uniform routing."""
    if isinstance(locality, TracedRouting):
        steps_SLBK = locality.steps(batch)
    else:
        steps_SLBK = uniform_steps(sizes, batch)
    return traffic(placements, steps_SLBK[len(steps_SLBK) // 2 :])


def _assumptions(
    machine: Machine, locality: Locality, prompts: PromptNeeds, more: Sequence[RankAdvice]
) -> list[str]:
    disk = "" if machine.speeds.disk is None else f", disk {machine.speeds.disk / 1e9:.2f} GB/s"
    return [
        f"Routing: {locality.how}.",
        f"A node (measured here): memory {machine.speeds.memory / 1e9:.2f} GB/s{disk}; its ranks "
        "share both, and its memory.",
        f"Ranks of a node exchange: {machine.link}.",
        f"Nodes exchange: {machine.network}.",
        "Steps are decode steps: bytes over bandwidths, one path after the other. Arithmetic is "
        "not counted.",
        *(
            f"{one.assumption} {prompts.flops_per_s / 1e9:,.0f} GFLOP/s a node (measured here)."
            for one in more
            if one.assumption
        ),
    ]


def show(made: RanksPlan, console: Console) -> None:
    """Print the table, the advice and its assumptions."""
    first, *more = (str(batch) for batch in made.plans[0].seconds)
    names = ("GiB\neach", "resident", "kB a\ntoken", "imbalance", f"tokens/s: {first}", *more)
    columns = [Column(name, no_wrap=True) for name in ("", *names)]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for plan in made.plans:
        table.add_row(
            plan.name,
            f"{plan.rank_bytes / GIB:.2f}",
            f"{plan.resident:.0%}",
            f"{plan.exchanged_bytes / 1e3:,.1f}",
            f"{plan.imbalance:.2f}",
            *(f"{plan.tokens_per_second(batch):,.1f}" for batch in plan.seconds)
            if plan.fits
            else ("does not fit", *[""] * (len(plan.seconds) - 1)),
        )
    console.print(table)
    console.print()
    for line in (f"Take {made.advice}.", *(one.advice for one in made.more), *made.assumptions):
        console.print(line, soft_wrap=True)
