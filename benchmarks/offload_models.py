"""The stores that `benchmarks.offload` runs, and what their processes may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_contenders import gguf_file
from examples.models.random_models import bench_dir, random_2b
from examples.models.random_store import is_readable, random_30b
from experts.manifest import read_manifest
from moe.commands.convert.convert import convert
from moe.machine import memory_total
from moe.memory.planning import planning
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from offload.capacity import slot_bytes

ROOT = Path(__file__).parents[1]
GIB = 2**30
RUNTIME = 700_000_000
"""Bytes that a process of ours takes beside its memory plan: Python, torch, transformers."""
PEER_RUNTIME = 250_000_000
"""Bytes that llama.cpp takes beside its file: Python, buffers, keys and values."""


@dataclass(frozen=True)
class Target:
    """A store.

    Attributes:
        store: its directory.
        gguf: the same weights, or at least sizes, for llama.cpp.
        experts: of all layers together.
        expert_bytes: memory of one.
    """

    store: Path
    gguf: Path | None
    experts: int
    expert_bytes: int

    @classmethod
    def of(cls, store: Path, gguf: Path | None = None) -> Target:
        manifest = read_manifest(store).without_drafts()
        count = sum(layer.experts for layer in manifest.layers)
        return cls(store, gguf, count, slot_bytes(manifest, manifest.bits))

    @property
    def largest_file(self) -> Path:
        return max(self.store.glob("*.safetensors"), key=lambda file: file.stat().st_size)

    def settings(
        self, share: float, longest: int, memory: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Of the profile, for a share of the experts in memory.

        Args:
            longest: tokens of a prompt.
            memory: more settings of the section.
        """
        memory = {"kv_tokens": longest + 1024, "reserve_gib": 0.0, **(memory or {})}
        settings = {"memory": memory, "prefill": {"wave_tokens": longest}}
        if share == 1:
            return settings
        profile = load_profile(None, settings).profile
        with planning(self.store, profile, torch.device("cpu"), lambda _: None) as planned:
            lines = planned.memory.lines
        others = sum(line.bytes for line in lines if line.name != "experts")
        # half a slot more, as the rounding of a number in GiB must not cost one
        memory["device_gib"] = (others + (share * self.experts + 0.5) * self.expert_bytes) / GIB
        return settings

    def peer_limit(self, share: float) -> int:
        """Bytes for llama.cpp: the same share of its file."""
        assert self.gguf is not None
        return int(share * self.gguf.stat().st_size + PEER_RUNTIME)


def limit_of(settings: dict[str, Any]) -> int:
    """Bytes that a process with these settings may take."""
    gib = settings["memory"].get("device_gib")
    return (memory_total() or 2**50) if gib is None else int(gib * GIB) + RUNTIME


def targets(names: Sequence[str]) -> Iterator[Target]:
    """The models by name, made where they are not there yet; those that cannot be are left out."""
    for name in names:
        if name == "30b":
            store = random_30b()
            if store is not None:
                yield Target.of(store, gguf_file(store, "Q4_0"))
        elif name == "2b":
            checkpoint = random_2b()
            if checkpoint is not None:
                yield Target.of(stored(checkpoint), gguf_file(checkpoint, "Q8_0"))
        elif name == "demo":
            yield Target.of(stored(ROOT / "examples/demo-model"))
        else:
            yield Target.of(Path(name))


def stored(checkpoint: Path) -> Path:
    """An 8-bit store of a checkpoint, made where it is not there yet."""
    store = bench_dir() / f"{checkpoint.name}-8bit"
    if not is_readable(store):
        convert(checkpoint, store, ModelSettings(expert_bits=8, trunk_bits=8, head_bits=8))
    return store
