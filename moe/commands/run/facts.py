"""Finds the facts of a model and of this machine for `moe.commands.run.choice`: headers are read,
nothing else."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import device as Device

from experts.manifest import is_store, read_manifest
from experts.safetensors_io import digest_of
from moe.cache_dir.proofs import proofs_of
from moe.commands.plan.command import model_sizes
from moe.commands.plan.decode_speed import DecodeSizes
from moe.commands.run.choice import SHORT_WAVE, TRUNK_BITS, WAVE, RunMachine, RunModel
from moe.loading.hub import ModelFiles
from moe.loading.local import public_name
from moe.memory.planning import PlannedModel, host_room, planning
from moe.network.seam import expert_shape, experts_modules
from moe.settings import Profile

GROUP_SIZE: Literal[64] = 64
BITS = (8, 4, 3, 2)
HEADROOM = 1 / 32
"""Share of memory that may be gone when the model is loaded, after a conversion perhaps."""


@dataclass(frozen=True)
class RunFacts:
    """A model and a machine.

    Attributes:
        model, machine: for the choice.
        sizes: of the model's experts as they are.
        stores: the directory of this model's stores in the cache.
        about: the model in words.
    """

    model: RunModel
    machine: RunMachine
    sizes: DecodeSizes
    stores: Path
    about: str


def look_at(name: str, files: ModelFiles, profile: Profile, device: Device) -> RunFacts:
    """Look at a model, reading headers only, and at this machine.

    Raises:
        CheckpointError, UnsupportedModelError: as when loading.
    """
    store = is_store(files.path)
    identity, weight_bytes, gguf = _weight_files(files)
    wide, in_store = _passes(profile, WAVE), _passes(profile, SHORT_WAVE)
    if not store:
        bits = {"expert_bits": 8, "trunk_bits": TRUNK_BITS, "head_bits": TRUNK_BITS}
        in_store = in_store.model_copy(update={"model": profile.model.model_copy(update=bits)})
    with (
        proofs_of(files.path, wide, device=device),
        planning(files.path, wide, device, lambda _: None) as planned,
    ):
        whole = _lines(planned)
        sizes = model_sizes(planned, wide)
        expert_bytes, alike = _expert_bytes(planned)
        context = planned.context_length
        footprints = {WAVE: planned.footprint}
        logits_size, memory = planned.logits_size, planned.memory
        why_resident = planned.why_resident
        model_type = planned.config.model_type
    with (
        proofs_of(files.path, in_store, device=device),
        planning(files.path, in_store, device, lambda _: None) as planned,
    ):
        quantized = _lines(planned)
        footprints[SHORT_WAVE] = planned.footprint
    biases = max(0, quantized["experts"] - expert_bytes[8]) if not store else 0
    model = RunModel(
        kind="store" if store else "GGUF file" if gguf else "checkpoint",
        weight_bytes=weight_bytes,
        remote=files.remote is not None,
        whole=whole,
        trunk_bytes=quantized["trunk"],
        expert_bytes={bits: size + biases for bits, size in expert_bytes.items()},
        num_experts=sizes.total,
        alike=alike and not (store and why_resident),
        footprints=footprints,
        logits_size=logits_size,
        context=context,
        store_bits=read_manifest(files.path).bits if store else None,
    )
    stores = stores_of(name) / digest_of(repr(identity).encode()).hexdigest()[:12]
    free = memory.available_bytes
    return RunFacts(
        model,
        RunMachine(
            free and int(free * (1 - HEADROOM)),
            _disk_free(stores),
            frozenset(bits for bits in BITS if is_store(store_path(stores, bits))),
            memory.place,
            host_room(profile, device, 1),
        ),
        sizes,
        stores,
        f"{model_type}, {sizes.layers} layers of {sizes.experts} experts",
    )


def _passes(profile: Profile, tokens: int) -> Profile:
    """The profile with prompt passes of so many tokens."""
    prefill = {"wave_tokens": tokens, "mode": "layered"}
    return profile.model_copy(update={"prefill": profile.prefill.model_copy(update=prefill)})


def cache_root() -> Path:
    """Return the folder of stores that nobody named: ``$XDG_CACHE_HOME/moe-inference``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moe-inference"


def stores_of(name: str) -> Path:
    """The directory of all stores of a model, whatever its files are today."""
    return cache_root() / "stores" / re.sub(r"[^\w.-]+", "-", public_name(name))


def store_path(stores: Path, bits: int) -> Path:
    """The directory of a store of these bits."""
    return stores / f"{bits}bit"


def _weight_files(files: ModelFiles) -> tuple[list[tuple[int, str]], int, bool]:
    """Look at the files of weights.

    Returns:
        Of each file its size, and a text that changes with its content; bytes of all of them; and
        whether they are GGUF.
    """
    if files.remote is not None:
        sizes = list(files.remote.weights.values())
        return sorted(zip(sizes, files.etags, strict=True)), sum(sizes), files.remote.gguf
    found = [*files.path.glob("*.safetensors"), *files.path.glob("*.gguf")]
    known = []
    for file in (file.resolve() for file in found):
        seen = file.stat()
        # the hub's cache calls files by the hash of their content
        hashed = file.parent.name == "blobs"
        known.append((seen.st_size, file.name if hashed else str(seen.st_mtime_ns)))
    gguf = any(file.suffix == ".gguf" for file in found)
    return sorted(known), sum(size for size, _ in known), gguf


def _lines(planned: PlannedModel) -> dict[str, int]:
    """Memory of all weights, wherever the plan puts them."""
    modules = tuple(f"{name}." for name, _ in experts_modules(planned.network))
    sizes = planned.weights.nbytes
    experts = sum(size for name, size in sizes.items() if name.startswith(modules))
    return {"trunk": sum(sizes.values()) - experts, "experts": experts}


def _expert_bytes(planned: PlannedModel) -> tuple[dict[int, int], bool]:
    """Bytes of all experts by bits, without biases, and whether all have one shape."""
    modules = [module for _, module in experts_modules(planned.network)]
    shapes = [expert_shape(module, GROUP_SIZE) for module in modules]
    pairs = list(zip(modules, shapes, strict=True))
    sizes = {bits: sum(m.num_experts * shape.nbytes(bits) for m, shape in pairs) for bits in BITS}
    return sizes, len(set(shapes)) == 1


def _disk_free(path: Path) -> int:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(there).free
