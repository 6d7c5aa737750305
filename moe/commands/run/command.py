"""``moe run``: choose how to run a model, say what and why, convert where needed, and serve."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experts.manifest import is_store
from moe.commands.convert.convert import convert
from moe.commands.plan.decode_speed import (
    Bandwidths,
    DecodeEstimate,
    UniformRouting,
    estimate_decode,
)
from moe.commands.plan.speeds import MachineSpeeds
from moe.commands.run.choice import TRUNK_BITS, RunChoice, choose_run
from moe.commands.run.facts import GROUP_SIZE, RunFacts, look_at, store_path, stores_of
from moe.errors import ProfileError
from moe.loading.hub import reach_model
from moe.loading.local import public_name
from moe.loading.progress import size_text
from moe.loading.remote.repository import HubUnreachableError
from moe.server.serve import serve
from moe.settings import ModelSettings
from moe.settings.device import use_device
from moe.settings.profile import as_yaml, load_profile


@dataclass(frozen=True)
class RunPlan:
    """The plan of a `moe run`.

    Attributes:
        name: what was asked for.
        source: what is served, or converted first.
        facts: of the model and the machine.
        choice: how to run it.
        settings: of the profile: the choice's, and what the user set.
        speed: estimate for one sequence.
    """

    name: str
    source: str
    facts: RunFacts
    choice: RunChoice
    settings: Mapping[str, Any]
    speed: DecodeEstimate

    @property
    def served(self) -> str:
        """The directory or name that is served."""
        if not self.choice.from_store:
            return self.source
        assert self.choice.bits is not None
        return str(store_path(self.facts.stores, self.choice.bits))

    @property
    def commands(self) -> list[str]:
        """The plan as single commands."""
        settings = [f"--set {shlex.quote(f'{k}={as_yaml(v)}')}" for k, v in self.settings.items()]
        profile = ["--profile offload"] if self.choice.offload else []
        serving = ["moe serve", shlex.quote(self.served), *profile, *settings]
        if self.choice.from_store:  # else clients would have to ask for the store's folder
            serving.append(f"--served-model-name {shlex.quote(public_name(self.name))}")
        if not self.choice.convert:
            return [" ".join(serving)]
        places = f"{shlex.quote(self.source)} {shlex.quote(self.served)}"
        return [f"moe convert {places} --bits {self.choice.bits}", " ".join(serving)]


def run(
    name: str,
    overrides: Mapping[str, Any],
    *,
    listener: socket.socket | None,
    yes: bool,
    api_key: str | None,
    server: Mapping[str, Any],
) -> int:
    """Print the choice and its reasons; then convert and serve.

    Args:
        overrides: what the user set of the profile, by key.
        listener: where to serve; None: only say what would be done.
        yes: convert without asking.
        server: further arguments of `moe.server.serve.serve`.

    Raises:
        DoesNotFitError: there is no way to run it here.
        ProfileError: a conversion is needed, and nobody is there to be asked.
    """
    made = plan_run(name, overrides)
    for line in explain(made):
        print(line, file=sys.stdout if listener is None else sys.stderr)
    if listener is None:
        print("the same in single commands:", *made.commands, sep="\n  ")
        return 0
    if made.choice.convert:
        if not yes:
            _ask(made)
        Path(made.served).parent.mkdir(parents=True, exist_ok=True)
        convert(
            made.source,
            made.served,
            _store_settings(made.choice),
            progress=sys.stderr.isatty(),
            on_notice=lambda notice: print(f"moe: {notice}", file=sys.stderr),
        )
    profile = load_profile(made.choice.profile, made.settings)
    return serve(made.served, profile, listener, api_key, [public_name(name)], **server)


def plan_run(name: str, overrides: Mapping[str, Any]) -> RunPlan:
    """Look at a model and at this machine, and choose.

    Raises:
        CheckpointError, UnsupportedModelError, ProfileError, DoesNotFitError: as when loading.
    """
    settings = load_profile(None, overrides).profile
    device, source = use_device(settings), name
    try:
        with reach_model(name, whole=False) as files:
            facts = look_at(name, files, settings, device)
    except HubUnreachableError:
        if (store := newest_store(name)) is None:
            raise
        source = str(store)
        with reach_model(source, whole=False) as files:
            facts = look_at(source, files, settings, device)
    choice = choose_run(facts.model, facts.machine)
    machine = MachineSpeeds(device, settings.model.proof_cache)
    disk = machine.cache_disk(facts.stores, _one(facts, choice)) if choice.offload else None
    speeds = replace(
        machine.steps(_expert_bits(facts, choice), disk),
        to_device=machine.to_device() if choice.offload else None,
        products=machine.products() if facts.sizes.rows > 1 else None,
    )
    return RunPlan(
        name, source, facts, choice, {**choice.settings, **overrides}, _speed(facts, choice, speeds)
    )


def newest_store(name: str) -> Path | None:
    """The last store that was made of a model, whatever the hub has now."""
    found = [path for path in stores_of(name).glob("*/*bit") if is_store(path)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def explain(made: RunPlan) -> list[str]:
    """Say what is chosen, why and what it costs: five lines."""
    facts, choice = made.facts, made.choice
    model, machine, plan = facts.model, facts.machine, choice.plan
    where = " on the hub" if model.remote else ""
    free = "" if machine.memory is None else f" of {_size(machine.memory)} available"
    most = "" if choice.context == model.context else f" of the model's {model.context}"
    rate = f"{made.speed.tokens_per_second:,.1f} tokens/s"
    return [
        f"model    {made.name}: {model.kind}, {_size(model.weight_bytes)}{where} ({facts.about})",
        f"runs     {choice.how}: {_size(plan.needed_bytes)}{free}{_because(choice.rejected)}",
        f"store    {_store(made)}",
        f"context  {choice.context} tokens{most}; keys and values of {plan.kv_tokens} have room",
        f"speed    about {rate} for one sequence, bound by {made.speed.bound.replace('_', ' ')}",
    ]


def _because(rejected: Sequence[str]) -> str:
    return f"; {'; '.join(rejected)}" if rejected else ""


def _store(made: RunPlan) -> str:
    choice, model = made.choice, made.facts.model
    if choice.convert:
        assert choice.bits is not None
        size, free = _size(model.store_bytes(choice.bits)), _size(made.facts.machine.disk)
        reads = f"reads {_size(model.weight_bytes)}{' from the hub' if model.remote else ''}"
        return f"{reads}, writes {size} to {made.served} ({free} free); once"
    if choice.from_store:
        return f"{made.served}, made before"
    if model.store_bits is not None:
        return f"{made.served} is one"
    if choice.bits is not None:
        return "none, for want of disk: weights are quantised at each start"
    download = f", after a download of {_size(model.weight_bytes)}" if model.remote else ""
    if model.is_quantized and not model.is_small:
        return f"none: its weights are quantised, and keep their own codes{download}"
    return f"none: it is small enough to load as it is{download}"


def _ask(made: RunPlan) -> None:
    """Raises `ProfileError` where the answer is no, or nobody is there."""
    if not sys.stdin.isatty():
        raise ProfileError(
            f"moe run {made.name} converts it first, as said above; add --yes to do so, or "
            "--dry-run to see the commands"
        )
    print("Convert now? [Y/n] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise ProfileError("nothing was converted; --dry-run shows the commands")


def _store_settings(choice: RunChoice) -> ModelSettings:
    return ModelSettings(
        expert_bits=choice.bits,
        trunk_bits=TRUNK_BITS,
        head_bits=TRUNK_BITS,
        group_size=GROUP_SIZE,
    )


def _one(facts: RunFacts, choice: RunChoice) -> int:
    """Bytes of an expert as it is served."""
    model = facts.model
    size = model.whole["experts"] if choice.bits is None else model.expert_bytes[choice.bits]
    return size // model.num_experts


def _expert_bits(facts: RunFacts, choice: RunChoice) -> float:
    """About how many bits a weight of an expert takes; where experts are as they are, with their
    scales."""
    if choice.bits is not None:
        return choice.bits
    at_8 = facts.model.expert_bytes.get(8)
    return 16 if at_8 is None else 8.25 * facts.model.whole["experts"] / at_8


def _speed(facts: RunFacts, choice: RunChoice, speeds: Bandwidths) -> DecodeEstimate:
    tiers = choice.plan.tiers
    stored = facts.model.trunk_bytes if choice.bits is not None else facts.model.whole["trunk"]
    read = facts.sizes.trunk_bytes / max(facts.model.whole["trunk"], 1)  # no embedding
    sizes = replace(
        facts.sizes,
        expert_bytes=_one(facts, choice),
        trunk_bytes=int(stored * min(read, 1.0)),
        slots=tiers[0].experts if tiers else facts.sizes.total,
        host_slots=next((tier.experts for tier in tiers if tier.name == "host"), 0),
    )
    return estimate_decode(sizes, speeds, UniformRouting(sizes), 1)


def _size(number: int) -> str:
    return size_text(number).strip()
