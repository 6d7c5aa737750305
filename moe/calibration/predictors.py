"""What a calibration is for: which predictor looks ahead for experts on disk, by what the profile
wants and what calibration has left beside the model; what the cache's policy goes by; and which
experts a prompt will need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig

from moe.calibration.artefacts import CALIBRATION_FOLDER, MANIFEST_FILE, load_calibration
from moe.errors import CalibrationError, ProfileError
from moe.settings import OffloadSettings
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import RoutingError
from routing.predict import GivenForecast, contexts
from routing.predict.calibrated import PREDICTORS
from routing.predict.forecast import Floats
from routing.predict.token_table import TokenTable

PromptEstimator = Callable[[Sequence[int]], Floats]
"""From the tokens of a prompt to how often a token of it visits each unit, ``(units,)``."""

BEST = "ensemble"
OFF = ("off", "auto")
_PROMPT_TOKENS = 256  # its last ones: what is said next is nearest to them


def make_prefetcher(
    offloaded: Offloaded,
    path: Path,
    config: PreTrainedConfig,
    settings: OffloadSettings,
    drafts: bool = False,
) -> tuple[Prefetcher | None, str]:
    """The prefetcher, or None and why nobody looks ahead (nothing where none is wanted).

    Args:
        drafts: what is drafted says what comes next, where no predictor does.

    Raises:
        ProfileError: no predictor of that name.
        CalibrationError: a predictor was named, and the calibration is absent or not whole.
    """
    wanted, folder = settings.predictor, path / CALIBRATION_FOLDER
    if wanted not in (*OFF, *PREDICTORS):
        names = ", ".join((*OFF, *PREDICTORS))
        raise ProfileError(f"offload.predictor must be one of {names}, got '{wanted}'")
    if wanted == "off" or not settings.prefetch:
        return None, ""
    if wanted == "auto" and not (folder / MANIFEST_FILE).exists():
        if drafts:
            return offloaded.prefetch_with(GivenForecast()), ""
        return None, "nobody looks ahead for experts on disk: run moe calibrate on this model"
    name = BEST if wanted == "auto" else wanted
    try:
        counts = [layer.num_experts for layer in offloaded.layers]
        predictor = load_calibration(folder, config, counts, [name]).predictor(name)
    except (CalibrationError, RoutingError) as error:
        if wanted != "auto":
            raise CalibrationError(str(error)) from error
        return None, f"nobody looks ahead for experts on disk: {error}"
    return offloaded.prefetch_with(predictor), ""


def load_prompt_estimator(
    path: Path, config: PreTrainedConfig, num_experts: Sequence[int]
) -> tuple[PromptEstimator | None, str]:
    """What `moe calibrate` left beside the model, or None and why requests keep their order."""
    try:
        calibrated = load_calibration(
            path / CALIBRATION_FOLDER, config, num_experts, ["token_table"]
        )
        predictor = calibrated.predictor("token_table")
    except (CalibrationError, RoutingError) as error:
        return None, f"requests are not grouped by their experts: {error}"

    def expect(token_ids: Sequence[int]) -> Floats:
        recent = torch.tensor(token_ids[-_PROMPT_TOKENS:])
        predictor.start(contexts(recent, predictor.context))
        layers = [predictor.rows(-1, layer) for layer in range(len(num_experts))]
        return np.concatenate([rows.mean(0) for rows in layers if rows is not None])

    return expect, ""


def load_token_table(
    path: Path, config: PreTrainedConfig, num_experts: Sequence[int]
) -> TokenTable | None:
    """That of `moe calibrate` beside the model; None where there is none."""
    try:
        calibrated = load_calibration(
            path / CALIBRATION_FOLDER, config, num_experts, [TokenTable.name]
        )
    except (CalibrationError, RoutingError):
        return None
    table = calibrated.sources.get(TokenTable.name)
    return table if isinstance(table, TokenTable) else None
