"""The parts of a multimodal model that read images, planned and loaded beside its text part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experts.manifest import TOWERS_NAME, is_store
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.checkpoint import Checkpoint
from moe.loading.load import WeightPlan, load_weights, plan_weights
from moe.loading.meta_model import build_towers
from moe.loading.progress import Report
from moe.loading.quantized import open_checkpoint
from moe.loading.store import plan_exactly


@dataclass(frozen=True)
class PlannedTowers:
    """Parts that can be loaded.

    Attributes:
        network: on the meta device, without its text part.
        weights: what to read.
    """

    path: Path
    config: PreTrainedConfig
    network: PreTrainedModel
    weights: WeightPlan

    @property
    def nbytes(self) -> int:
        """Memory of all their weights."""
        return sum(self.weights.nbytes.values())

    def load(self, device: torch.device, report: Report) -> PreTrainedModel:
        """Read the weights. Raises `CheckpointError`."""
        with _open(self.path, self.config) as checkpoint:
            load_weights(self.network, checkpoint, self.weights, device=device, report=report)
        return self.network


def plan_towers(
    path: Path, config: PreTrainedConfig, network: PreTrainedModel, dtype: torch.dtype | None
) -> PlannedTowers | str:
    """Plan the reader of images of the model in a directory; or say why there is none.

    Args:
        network: its text part, as `build_meta_model` makes it.
        dtype: what weights are kept in; None: as they are stored.
    """
    try:
        towers = build_towers(network)
        with _open(path, config) as checkpoint:
            make = plan_exactly if is_store(path) else None
            weights = plan_weights(towers, checkpoint, lambda _, stored: _kept(dtype, stored), make)
    except (CheckpointError, UnsupportedModelError) as error:
        return f"its images cannot be read: {error}"
    if not weights.plan.conversions:
        return "its files have no weights that read images"
    return PlannedTowers(path, config, towers, weights)


def read_towers(network: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel | str:
    """Load the vision towers as they are stored; or say why there are none."""
    try:
        towers = build_towers(network)
        weights = plan_weights(towers, checkpoint, lambda _, stored: stored)
    except (CheckpointError, UnsupportedModelError) as error:
        return f"the store has nothing that reads images: {error}"
    if not weights.plan.conversions:
        return "the checkpoint has no weights that read images"
    load_weights(towers, checkpoint, weights, device="cpu")
    return towers


def _kept(dtype: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


@contextmanager
def _open(path: Path, config: PreTrainedConfig) -> Iterator[Checkpoint]:
    if not is_store(path):
        with open_checkpoint(path, config) as checkpoint:
            yield checkpoint
        return
    if not (path / TOWERS_NAME).is_file():
        raise CheckpointError(f"the store {path} has no {TOWERS_NAME}; convert the model again")
    with Checkpoint.open(path, [TOWERS_NAME]) as checkpoint:
        yield checkpoint
