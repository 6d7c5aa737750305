"""The files of a calibration, in the folder `CALIBRATION_FOLDER` beside the model.

``predictors.safetensors`` and ``trace.safetensors`` hold numbers; ``calibration.json`` says which
model they belong to. It is written last: without it there is no calibration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
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
_MAX_MANIFEST_BYTES = 16 << 20
_NOT_IDENTITY = (
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "quantization_config",
)

Count = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class FittedPredictors:
    """Predictors that calibration fitted, and why it could not fit the rest.

    Attributes:
        unavailable: reasons by name of a missing source.
    """

    calibrated: CalibratedPredictors
    unavailable: dict[str, str]


class SavedRouterRule(BaseModel):
    """A layer's `RouterRule` without its correction, which is a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    top_k: Count
    score: Score
    groups: Count
    groups_kept: Count
    group_score: GroupScore


class CalibrationManifest(BaseModel):
    """``calibration.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
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
    """Evidence sources that this model does not have, and why."""
    head_scores: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """Scores of key heads for looking up earlier text, by
    layer."""
    made_by: dict[str, str]
    """Versions; for people."""
    files: dict[str, str]
    """SHA-256 of each file."""


def fingerprint(config: Any) -> str:
    """Digest of a transformers configuration: a model's identity here.

    Weights differ with the precision they are loaded at, so neither they nor dtypes count.
    """
    content = {key: value for key, value in config.to_dict().items() if key not in _NOT_IDENTITY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def save_calibration(
    folder: Path,
    config: Any,
    text: str,
    trace: Trace,
    fitted: FittedPredictors,
    head_scores: Mapping[int, tuple[float, ...]] | None = None,
) -> None:
    """Replace the calibration in `folder`.

    Args:
        config: of the model.
        text: name of the text that was read.
        head_scores: see `CalibrationManifest`; None: they have not been measured.

    Raises:
        CalibrationError: the folder cannot be written.
    """
    model, files = fitted.calibrated.model, [PREDICTORS_FILE, TRACE_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as made:  # a full disk costs the new one, not the old
            new = Path(made)
            (new / PREDICTORS_FILE).write_bytes(save(fitted.calibrated.tensors()))
            trace.save(new / TRACE_FILE)
            manifest = CalibrationManifest(
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
                head_scores=dict(head_scores or {}),
                made_by={name: version(name) for name in ("torch", "transformers")},
                files={name: _digest(new / name) for name in files},
            )
            (new / MANIFEST_FILE).write_text(
                manifest.model_dump_json(indent=1) + "\n", encoding="utf-8"
            )
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            for name in (*files, MANIFEST_FILE):
                (new / name).replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise _not_writable(folder, error) from error


def check_writable(folder: Path) -> None:
    """Raise `CalibrationError` if `folder` cannot be written: to be asked before hours of work.

    Nothing new is left: what comes after may fail, and then there is no calibration.
    """
    made: list[Path] = []
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _not_writable(folder: Path, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"cannot write the calibration to {folder}: {error}; name another place with --out"
    )


def load_manifest(folder: Path, config: Any, num_experts: Sequence[int]) -> CalibrationManifest:
    """Read the manifest in `folder` and check that it belongs to the model.

    Raises:
        CalibrationError: there is none, it is damaged, or it is another model's.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise CalibrationError(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes: not ours")
        manifest = CalibrationManifest.model_validate_json(path.read_bytes())
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
    if manifest.model != fingerprint(config) or list(manifest.num_experts) != list(num_experts):
        raise CalibrationError(
            f"{folder} was made for another model ({manifest.architecture}, "
            f"{len(manifest.num_experts)} MoE layers, {manifest.model[:12]}; this one is "
            f"{fingerprint(config)[:12]} with {len(num_experts)}); run moe calibrate again"
        )
    if len(manifest.rules) != len(manifest.num_experts):
        raise CalibrationError(
            f"{path} has {len(manifest.rules)} rules for {len(manifest.num_experts)} MoE layers; "
            "run moe calibrate again"
        )
    return manifest


def load_calibration(
    folder: Path,
    config: Any,
    num_experts: Sequence[int],
    predictors: Collection[str] = tuple(PREDICTORS),
) -> CalibratedPredictors:
    """Load the named predictors from `folder`.

    Raises:
        CalibrationError: as `load_manifest`, or the predictors are damaged.
    """
    manifest = load_manifest(folder, config, num_experts)
    sources = {source for name in predictors for source in PREDICTORS[name]}
    prefixes = ("rules.", *(f"weights.{n}." for n in predictors), *(f"{s}." for s in sources))
    tensors = _load_tensors(folder / PREDICTORS_FILE, manifest, prefixes)
    rules = tuple(
        RouterRule(correction=tensors.pop(f"rules.{layer}.correction", None), **rule.model_dump())
        for layer, rule in enumerate(manifest.rules)
    )
    model = PredictedModel(manifest.num_experts, manifest.vocabulary, rules)
    try:
        return CalibratedPredictors.restore(tensors, model)
    except (LookupError, RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"{folder / PREDICTORS_FILE} is not whole ({error}); run moe calibrate again"
        ) from error


def load_trace(folder: Path, config: Any, num_experts: Sequence[int]) -> Trace:
    """Load the calibration's trace.

    Raises:
        CalibrationError: as `load_manifest`, or the trace is damaged.
    """
    load_manifest(folder, config, num_experts)
    return Trace.load(folder / TRACE_FILE)


def unavailable_before(folder: Path, config: Any, trace: Trace) -> dict[str, str] | None:
    """`CalibrationManifest.unavailable` if `folder` holds predictors of this very trace, else None.

    A run that is stopped while it measures compression leaves them; the next one need not fit them.
    """
    try:
        manifest = load_manifest(folder, config, trace.num_experts)
        before = Trace.load(folder / TRACE_FILE)
        whole = _digest(folder / PREDICTORS_FILE) == manifest.files.get(PREDICTORS_FILE)
    except (CalibrationError, OSError):
        return None
    pairs = zip(
        [before.token_ids, *before.expert_ids], [trace.token_ids, *trace.expert_ids], strict=True
    )
    same = before.lengths == trace.lengths and all(torch.equal(one, two) for one, two in pairs)
    return manifest.unavailable if whole and same else None


def _load_tensors(
    path: Path, manifest: CalibrationManifest, prefixes: tuple[str, ...]
) -> dict[str, Tensor]:
    """Tensors whose names begin with one of ``prefixes``."""
    try:
        if _digest(path) != manifest.files.get(path.name):
            raise CalibrationError(
                f"{path} is not the file that {MANIFEST_FILE} describes; run moe calibrate again, "
                "or copy all of its folder"
            )
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefixes)]  # noqa: SIM118 - it has no iterator
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
