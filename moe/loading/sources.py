"""Sources of weights: a checkpoint in anybody's layout, or a store of ours.

Both say first what they will take (`plan`) and then read it (`load`); what comes out is the same: a
network without experts, and the experts of each MoE layer at the precision that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experts.manifest import is_store
from kernels.reference import AnyExperts
from moe.hooks import Registry
from moe.loading.checkpoint import Checkpoint
from moe.loading.load import DtypeFor, LoadReport, WeightPlan, plan_weights
from moe.loading.memory_plan import Offloadable
from moe.loading.mtp import NOT_ASKED, WITHOUT_MTP, PlannedMtp, plan_mtp, restore_mtp
from moe.loading.own_planes import find_own
from moe.loading.progress import Report
from moe.loading.quantized import open_checkpoint
from moe.loading.store import StoreSource, open_store, open_trunk
from moe.loading.takeover import Takeover, keep_layer, quantizes
from moe.network.adopt import check_experts
from moe.settings import ModelSettings, Profile
from offload.capacity import Capacity
from offload.layer import LayerExperts, MissingExperts
from offload.offloaded import Offloaded

MISSING_EXPERTS = Registry[Callable[[Profile], MissingExperts]]("offload.late")
"""Missing-expert policies that methods bring."""


def missing_experts(profile: Profile) -> MissingExperts | None:
    """The policy of `offload.late` by which missing experts come with fewer bits; None: none."""
    make = MISSING_EXPERTS.find(profile.offload.late)
    return None if make is None else make(profile)


class WeightSource(Protocol):
    """Weights of a network that is on meta.

    Attributes:
        no_mtp: why the network has no multi-token-prediction layer; empty if it has one.
    """

    no_mtp: str

    def plan(self, dtype_for: DtypeFor) -> WeightPlan:
        """Plan what is read and the memory it takes. Raises `CheckpointError` listing every
        fault."""
        ...

    def offloadable(self) -> Offloadable | str:
        """The experts, if they can be read one by one later; else why not, and what would help."""
        ...

    def load(
        self, weights: WeightPlan, device: torch.device, report: Report, room: Capacity | None
    ) -> tuple[list[AnyExperts] | Offloaded, LoadReport]:
        """Fill the network; the experts of each MoE layer, and what was done.

        Args:
            room: for how many experts there is room where, the others staying on disk; None where
                the device holds all.
        """
        ...


@contextmanager
def open_source(
    path: Path,
    config: PreTrainedConfig,
    network: PreTrainedModel,
    profile: Profile,
    device: torch.device,
    report: Report,
    *,
    no_mtp: str = NOT_ASKED,
) -> Iterator[WeightSource]:
    """The weights in a model directory, opened and checked.

    Args:
        no_mtp: why the network is to have no multi-token-prediction layer; empty: give it one, if
            there is one.

    Raises:
        UnsupportedModelError: the network has no experts to take over.
        CheckpointError: files are absent or damaged.
        ProfileError: the profile asks for more bits than a store has.
    """
    check_experts(network)
    settings = profile.model
    if is_store(path):
        with (
            open_store(path, verify=settings.verify, report=report, drafts=not no_mtp) as store,
            open_trunk(store) as trunk,
        ):
            no_mtp = no_mtp or restore_mtp(network, trunk.tensors)
            how = settings, profile.offload, missing_experts(profile), no_mtp
            yield StoreSource(network, store, trunk, *how)
    else:
        exact = any(map(quantizes, (settings.expert_bits, settings.trunk_bits)))
        with open_checkpoint(path, config, exact=exact) as checkpoint:
            found = plan_mtp(network, checkpoint.tensors, no_mtp)
            yield CheckpointSource(network, checkpoint, settings, device, found)


def total_bytes(network: PreTrainedModel, layers: Sequence[LayerExperts]) -> int:
    """Bytes of a network without experts, and of its experts wherever they are."""
    trunk = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    return trunk + sum(layer.expert_bytes * layer.num_experts for layer in layers)


class CheckpointSource:
    """Any Hugging Face checkpoint; what is to be quantized is quantized while it is read."""

    def __init__(
        self,
        network: PreTrainedModel,
        checkpoint: Checkpoint,
        settings: ModelSettings,
        device: torch.device,
        mtp: PlannedMtp = WITHOUT_MTP,
    ) -> None:
        self._network = network
        self._checkpoint, self._renamed = checkpoint, mtp.renamed
        self.no_mtp = mtp.why_not
        self._settings, self._device = settings, device
        self._takeover = Takeover(network, settings, lambda _, whole: keep_layer(settings, whole))

    def plan(self, dtype_for: DtypeFor) -> WeightPlan:
        dtype_for = self._takeover.dtype_for(dtype_for)
        weights = plan_weights(self._network, self._checkpoint, dtype_for, renamed=self._renamed)
        own = find_own(
            self._network,
            self._checkpoint,
            weights.plan,
            self._settings,
            device=self._device,
        )
        self._takeover.own = own
        weights = replace(weights, kept=own.summary(self._network))
        return replace(weights, nbytes=self._takeover.nbytes(weights.nbytes))

    def offloadable(self) -> str:
        return "moe convert writes a store, whose experts may stay on disk (this is a checkpoint)"

    def load(
        self, weights: WeightPlan, device: torch.device, report: Report, room: Capacity | None
    ) -> tuple[list[AnyExperts], LoadReport]:
        assert room is None, "not offloadable"
        loaded = self._takeover.load(self._checkpoint, weights, device, report)
        return [layer for _, layer in sorted(self._takeover.layers.items())], loaded
