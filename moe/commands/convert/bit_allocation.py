"""Choose the bits of every expert under a budget, by the losses that calibration measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from experts.compress.allocation import AllocationError, allocate, predicted_damage
from experts.compress.gptq import quantize_calibrated
from experts.compress.statistics import LayerCalibration
from experts.weights import ExpertShape
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import PREFIX_BITS
from moe.calibration.files import load_manifest
from moe.commands.calibrate.compression import layer_path, load_layer, load_statistics
from moe.errors import CalibrationError
from moe.extras import install_line, is_installed
from moe.loading.memory_plan import GIB
from moe.loading.takeover import quantizes
from moe.network.seam import expert_shape, experts_modules
from moe.settings import ModelSettings

CALIBRATE_FIRST = "run moe calibrate MODEL --text FILE --compression and add --calibration DIR"


@dataclass(frozen=True)
class BitBudget:
    """Size limit of all experts: mean bits per weight, scales included, or GiB."""

    bits: float | None = None
    gib: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("GiB", self.gib)):
            if value is not None and not 0 < value < math.inf:
                raise CalibrationError(
                    f"the budget is {value:g} {name}; it must be a finite number above 0"
                )

    def nbytes(self, weights: int) -> int:
        """The budget in bytes, for this number of weights."""
        if self.gib is not None:
            return int(self.gib * GIB)
        assert self.bits is not None
        return int(self.bits * weights / 8)


@dataclass(frozen=True)
class BitAllocation:
    """The bits of each expert that a conversion writes.

    Attributes:
        folder: of the calibration.
        bits: of each expert of each MoE layer.
        uniform: all experts have the same bits, and may be read at fewer.
    """

    folder: Path
    bits: tuple[tuple[int, ...], ...]
    uniform: bool

    def quantize(self, layer: int, whole: ExpertWeights, group_size: int) -> QuantizedExperts:
        """A layer's experts. Raises ValueError if its weights cannot be quantised."""
        inputs = load_layer(self.folder, layer).inputs
        return quantize_calibrated(whole, inputs, self.bits[layer], group_size, nested=self.uniform)

    def stored_bits(self, layer: int) -> tuple[int, ...] | None:
        """The bits that a store records for a layer; None if all experts have the same."""
        return None if self.uniform else self.bits[layer]

    @property
    def most(self) -> int:
        return max(map(max, self.bits))

    @property
    def digest(self) -> str:
        """Digest of the bits and of the calibration."""
        digest = hashlib.sha256(repr(self.bits).encode())
        for layer in range(len(self.bits)):
            digest.update(layer_path(self.folder, layer).read_bytes())
        return digest.hexdigest()


def allocate_bits(
    network: PreTrainedModel,
    settings: ModelSettings,
    calibration: Path | None,
    budget: BitBudget | None,
) -> BitAllocation | None:
    """Choose the bits of every expert; None without a calibration.

    Args:
        network: on meta.
        settings: bits of all experts if there is no budget, and the group size.
        calibration: folder of a calibration with ``compression``.
        budget: see `BitBudget`.

    Raises:
        CalibrationError: the calibration is missing or another model's, or no choice of bits meets
            the budget.
    """
    if calibration is None:
        if budget is None:
            return None
        raise CalibrationError("a budget of bits needs a calibration: " + CALIBRATE_FIRST)
    if budget is not None and not is_installed("calibration"):
        raise CalibrationError(f"a budget of bits needs SciPy: {install_line('calibration')}")
    modules = [module for _, module in experts_modules(network)]
    counts = [module.num_experts for module in modules]
    shapes = [expert_shape(module, settings.group_size) for module in modules]
    load_manifest(calibration, network.config, counts)
    layers = load_statistics(calibration, len(counts))
    for layer, (statistics, shape, count) in enumerate(zip(layers, shapes, counts, strict=True)):
        found = len(statistics.frequency_E), statistics.inputs.hidden_TH.shape[1]
        if found != (count, shape.hidden):
            raise CalibrationError(
                f"{layer_path(calibration, layer)} has {found[0]} experts with hidden size "
                f"{found[1]}, the model has {count} with {shape.hidden}; run moe calibrate again"
            )
    if budget is not None:
        return BitAllocation(calibration, choose_bits(layers, shapes, counts, budget), False)
    bits = settings.expert_bits or PREFIX_BITS[-1]
    if not quantizes(bits):
        raise CalibrationError(
            f"experts of {bits} bits are not quantised, so a calibration has no effect; leave out "
            "--calibration, or choose 2, 3, 4 or 8 bits"
        )
    return BitAllocation(calibration, tuple((bits,) * count for count in counts), True)


def choose_bits(
    layers: Sequence[LayerCalibration],
    shapes: Sequence[ExpertShape],
    counts: Sequence[int],
    budget: BitBudget,
) -> tuple[tuple[int, ...], ...]:
    """Bits of each expert of each layer; raises `CalibrationError` if the budget cannot be met.

    Args:
        shapes, counts: of the experts of each layer, with the group size of the store.
    """
    sizes = [[shape.nbytes(bits) for bits in PREFIX_BITS] for shape in shapes]
    weights = [shape.hidden * shape.intermediate * (shape.parts + 1) for shape in shapes]
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    try:
        choice = allocate(
            predicted_damage(layers), np.repeat(sizes, counts, axis=0), budget.nbytes(total)
        )
    except AllocationError as error:
        least, most = (
            8 * sum(size[at] * count for size, count in zip(sizes, counts, strict=True)) / total
            for at in (0, -1)
        )
        raise CalibrationError(
            f"{error}: between {least:.3g} and {most:.3g} bits per weight are possible, scales "
            f"included, and the budget is {8 * budget.nbytes(total) / total:.3g}"
        ) from error
    bits = np.array(PREFIX_BITS)[choice]
    return tuple(tuple(own.tolist()) for own in np.split(bits, np.cumsum(counts)[:-1]))
