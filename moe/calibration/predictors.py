"""Uses of a calibration: to prefetch experts from disk, and to expect the load of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from moe.calibration.files import CALIBRATION_FOLDER, MANIFEST_FILE, load_calibration
from moe.errors import CalibrationError, ProfileError
from moe.settings import OffloadSettings
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import RoutingError
from routing.predict import GivenForecast
from routing.predict.calibrated import PREDICTORS
from routing.predict.token_table import TokenTable

DEFAULT_PREDICTOR = "ensemble"


def make_prefetcher(
    offloaded: Offloaded,
    path: Path,
    config: PreTrainedConfig,
    settings: OffloadSettings,
    drafts: bool = False,
) -> tuple[Prefetcher | None, str]:
    """The prefetcher that ``offload.predictor`` asks for, or None and a notice that says why not.

    Args:
        path: of the model; its calibration is beside it.
        drafts: drafts will forecast experts if there is no calibration.

    Returns:
        The notice is empty if no prefetcher is wanted.

    Raises:
        ProfileError: there is no predictor of that name.
        CalibrationError: a predictor was named, and the calibration is absent or damaged.
    """
    wanted, folder = settings.predictor, path / CALIBRATION_FOLDER
    if wanted not in ("off", "auto", *PREDICTORS):
        names = ", ".join(("off", "auto", *PREDICTORS))
        raise ProfileError(f"offload.predictor must be one of {names}, got '{wanted}'")
    if wanted == "off" or not settings.prefetch:
        return None, ""
    if wanted == "auto" and not (folder / MANIFEST_FILE).exists():
        if drafts:
            return offloaded.prefetch_with(GivenForecast()), ""
        return None, "experts on disk are not prefetched: run moe calibrate on this model"
    name = DEFAULT_PREDICTOR if wanted == "auto" else wanted
    try:
        counts = [layer.num_experts for layer in offloaded.layers]
        predictor = load_calibration(folder, config, counts, [name]).predictor(name)
    except (CalibrationError, RoutingError) as error:
        if wanted != "auto":
            raise CalibrationError(str(error)) from error
        return None, f"experts on disk are not prefetched: {error}"
    return offloaded.prefetch_with(predictor), ""


def load_token_table(
    path: Path, config: PreTrainedConfig, num_experts: Sequence[int]
) -> TokenTable | None:
    """The token table that `moe calibrate` left beside the model; None if there is none."""
    try:
        calibrated = load_calibration(
            path / CALIBRATION_FOLDER, config, num_experts, [TokenTable.name]
        )
    except (CalibrationError, RoutingError):
        return None
    table = calibrated.sources.get(TokenTable.name)
    return table if isinstance(table, TokenTable) else None
