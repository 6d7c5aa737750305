"""Write what calibration leaves beside a model, and read it back.

``predictors.safetensors`` and ``trace.safetensors`` hold numbers, ``calibration.json`` says what
they are for. It is written last: without it there is no calibration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moe.calibration.trace import Trace
from moe.errors import CalibrationError
from routing.predict.calibrated import PREDICTORS, CalibratedPredictors, PredictedModel
from routing.routers import GroupScore, RouterRule, Score

CALIBRATION_FOLDER = "moe-calibration"
MANIFEST_FILE = "calibration.json"
PREDICTORS_FILE, TRACE_FILE = "predictors.safetensors", "trace.safetensors"
_MAX_ABOUT_BYTES = 16 << 20
_PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "quantization_config")

Count = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class FittedPredictors:
    """What calibration gave, and why it could not give the rest.

    Attributes:
        unavailable: reasons by name of the predictor.
    """

    calibrated: CalibratedPredictors
    unavailable: dict[str, str]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedRouterRule(_Record):
    """What chooses in a layer's `RouterRule`, but for its correction."""

    top_k: Count
    score: Score
    groups: Count
    groups_kept: Count
    group_score: GroupScore


class CalibrationManifest(_Record):
    """``calibration.json``."""

    format: Literal["moe-calibration"] = "moe-calibration"
    version: Literal[2] = 2
    model: str
    """`fingerprint` of the model."""
    architecture: str
    text: str
    """Name of the text; for people."""
    tokens: Count
    vocabulary: Count
    num_experts: tuple[Count, ...] = Field(min_length=1)
    rules: tuple[SavedRouterRule, ...]
    unavailable: dict[str, str]
    """Predictors that this model does not have, and why."""
    made_by: dict[str, str]
    """Versions; for people."""
    files: dict[str, str]
    """SHA-256 of each file."""


def fingerprint(config: Any) -> str:
    """Digest of a transformers configuration, but for what passes: a model's identity here, as its
    weights differ with the precision they were loaded at."""
    content = {key: value for key, value in config.to_dict().items() if key not in _PASSING}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def save_calibration(
    folder: Path, config: Any, text: str, trace: Trace, fitted: FittedPredictors
) -> None:
    """Replace what `folder` holds. Raises `CalibrationError` where it cannot be written."""
    model, files = fitted.calibrated.model, [PREDICTORS_FILE, TRACE_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        (folder / PREDICTORS_FILE).write_bytes(save(fitted.calibrated.tensors()))
        trace.save(folder / TRACE_FILE)
        about = CalibrationManifest(
            model=fingerprint(config),
            architecture=(getattr(config, "architectures", None) or ["?"])[0],
            text=text,
            tokens=trace.num_tokens,
            vocabulary=model.vocabulary,
            num_experts=model.num_experts,
            rules=tuple(
                SavedRouterRule(
                    **{name: getattr(rule, name) for name in SavedRouterRule.model_fields}
                )
                for rule in model.rules
            ),
            unavailable=fitted.unavailable,
            made_by={name: version(name) for name in ("torch", "transformers")},
            files={name: _digest(folder / name) for name in files},
        )
        (folder / MANIFEST_FILE).write_text(
            about.model_dump_json(indent=1) + "\n", encoding="utf-8"
        )
    except (OSError, SafetensorError) as error:
        raise _not_writable(folder, error) from error


def check_writable(folder: Path) -> None:
    """Before anything takes time. Raises `CalibrationError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"cannot write the calibration to {folder}: {error}; name another place with --out"
    )


def read_calibration_manifest(
    folder: Path, config: Any, num_experts: Sequence[int]
) -> CalibrationManifest:
    """What is known of the calibration in `folder`, checked against the model.

    Raises:
        CalibrationError: there is none, it is damaged, or it is another model's.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > _MAX_ABOUT_BYTES:
            raise CalibrationError(f"{path} is larger than {_MAX_ABOUT_BYTES} bytes: not ours")
        about = CalibrationManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CalibrationError(
            f"{folder} has no {MANIFEST_FILE}: run moe calibrate MODEL --text FILE"
        ) from error
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise CalibrationError(
            f"{path} cannot be used: {place}: {first['msg']}; run moe calibrate again"
        ) from error
    if about.model != fingerprint(config) or list(about.num_experts) != list(num_experts):
        raise CalibrationError(
            f"{folder} was made for another model ({about.architecture}, "
            f"{len(about.num_experts)} MoE layers, {about.model[:12]}; this one is "
            f"{fingerprint(config)[:12]} with {len(num_experts)}); run moe calibrate again"
        )
    if len(about.rules) != len(about.num_experts):
        raise CalibrationError(
            f"{path} has {len(about.rules)} rules for {len(about.num_experts)} MoE layers; run "
            "moe calibrate again"
        )
    return about


def load_calibration(
    folder: Path,
    config: Any,
    num_experts: Sequence[int],
    predictors: Collection[str] = tuple(PREDICTORS),
) -> CalibratedPredictors:
    """The named predictors in `folder`.

    Raises:
        CalibrationError: as `read_calibration_manifest`, or the file of predictors is damaged.
    """
    about = read_calibration_manifest(folder, config, num_experts)
    clues = {clue for name in predictors for clue in PREDICTORS[name]}
    heads = ("rules.", *(f"weights.{n}." for n in predictors), *(f"{c}." for c in clues))
    tensors = _load(folder / PREDICTORS_FILE, about, heads)
    rules = tuple(
        RouterRule(correction=tensors.pop(f"rules.{layer}.correction", None), **rule.model_dump())
        for layer, rule in enumerate(about.rules)
    )
    model = PredictedModel(about.num_experts, about.vocabulary, rules)
    try:
        return CalibratedPredictors.restore(tensors, model)
    except (LookupError, RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"{folder / PREDICTORS_FILE} is not whole ({error}); run moe calibrate again"
        ) from error


def load_trace(folder: Path, config: Any, num_experts: Sequence[int]) -> Trace:
    """The calibration's trace. Raises `CalibrationError` as `read_calibration_manifest` does."""
    read_calibration_manifest(folder, config, num_experts)
    return Trace.load(folder / TRACE_FILE)


def unavailable_before(folder: Path, config: Any, trace: Trace) -> dict[str, str] | None:
    """`CalibrationManifest.unavailable` if `folder` holds predictors fitted to this very trace.

    A run that was stopped while it measured compression has left them, and need not fit again.
    """
    try:
        about = read_calibration_manifest(folder, config, trace.num_experts)
        before = Trace.load(folder / TRACE_FILE)
        whole = _digest(folder / PREDICTORS_FILE) == about.files.get(PREDICTORS_FILE)
    except (CalibrationError, OSError):
        return None
    pairs = zip(
        [before.token_ids, *before.expert_ids], [trace.token_ids, *trace.expert_ids], strict=True
    )
    same = before.lengths == trace.lengths and all(torch.equal(one, two) for one, two in pairs)
    return about.unavailable if whole and same else None


def _load(path: Path, about: CalibrationManifest, heads: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensors whose names begin with one of ``heads``."""
    try:
        if _digest(path) != about.files.get(path.name):
            raise CalibrationError(
                f"{path} is not the file that {MANIFEST_FILE} describes; run moe calibrate again, "
                "or copy all of its folder"
            )
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(heads)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{path} cannot be read: {error}; run moe calibrate again"
        ) from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
