"""`CanvasWriter`: answers the core for a model that writes canvases (`moe.engine.writer`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.describe.row_wise import make_linears_row_wise
from moe.engine.runner import ModelRunner
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.methods.diffusion import DiffusionSettings, limits
from moe.methods.diffusion.denoise import Acceptance
from moe.methods.diffusion.driver import CanvasDriver
from moe.methods.diffusion.runner import CanvasRunner
from moe.methods.diffusion.selectors import watch_selectors
from moe.network.backbone import Backbone
from moe.network.lanes import Lane
from moe.network.moe_layer import FoundSelector, MoELayers
from moe.network.packed_pass import Work
from moe.sampling.params import SamplingParams
from moe.settings import Profile


def make_writer(backbone: Backbone, profile: Profile) -> CanvasWriter:
    """The writer of a loaded model, proven on short canvases.

    Raises:
        UnsupportedModelError: the model's generation code cannot be driven.
        ProfileError: ``methods.diffusion`` has rules that the model cannot follow.
    """
    make_linears_row_wise(backbone.model)
    driver, settings = CanvasDriver(backbone.model), profile.methods.diffusion
    with torch.inference_mode():
        driver.prove()
    limits.refuse_rules(settings, driver.no_policies)
    return CanvasWriter(driver, settings)


class CanvasWriter:
    """Answers the core's questions about one loaded model; see `moe.engine.writer.Writer`.

    Args:
        driver: runs the model's generation code.
        settings: how canvases are refined.

    Attributes:
        driver: as given.
    """

    why = "it writes canvases by its own generation code"

    def __init__(self, driver: CanvasDriver, settings: DiffusionSettings) -> None:
        self.driver, self._settings = driver, settings

    @property
    def unit(self) -> int:
        return self.driver.canvas_length

    def reading(self, work: Work) -> Lane[list[Tensor]]:
        return self.driver.reading(work)

    def windows(self, form: KVFormat) -> Windows:
        return self.driver.windows(form)

    def selectors(self, backbone: Backbone) -> list[FoundSelector]:
        return watch_selectors(self.driver)

    def checked(self, params: SamplingParams) -> SamplingParams:
        return limits.checked(params, self.driver.no_policies)

    def runner(self, backbone: Backbone, experts: MoELayers) -> ModelRunner:
        return CanvasRunner(backbone, experts, self.driver, Acceptance.of(self._settings))

    def status(self) -> dict[str, Any]:
        return {
            "canvas_length": self.driver.canvas_length,
            "schedule": self.driver.schedule,
            "policies": self.driver.no_policies or "any",
        }
