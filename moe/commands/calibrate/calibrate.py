"""``moe calibrate``: read a text with the model, fit predictors, let methods score key heads, and
save all this beside the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from moe.calibration.files import (
    CALIBRATION_FOLDER,
    FittedPredictors,
    check_writable,
    save_calibration,
    unavailable_before,
)
from moe.calibration.trace import Trace
from moe.commands.calibrate.compression import analyse
from moe.commands.calibrate.fit import HELD_OUT_EVERY, find_gates, fit_predictors
from moe.commands.calibrate.record import record_trace
from moe.commands.console import OnStep, step_bar
from moe.errors import CalibrationError
from moe.hooks import Hook
from moe.loading.gguf.directory import is_made
from moe.loading.hub import resolve_model
from moe.model import MoE
from moe.settings.profile import LoadedProfile
from routing.predict.path import VECTOR

SCORE_HEADS = Hook[Callable[[MoE], Iterable[tuple[int, tuple[float, ...]]]]]("score_heads")
"""Yields layers, each with the scores of its key heads (`moe.kv.visibility.HeadScores`)."""

WINDOW = 512
"""Tokens of a sequence, at most."""

LEAST_TOKENS = 1024
"""With fewer tokens nothing can be fitted."""

TOKENS = 50_000
"""Default number of tokens: minutes for a large model on two cores."""


def calibrate_model(
    model: MoE, text: str, *, tokens: int = TOKENS, on_step: OnStep = lambda what, done, total: None
) -> tuple[Trace, FittedPredictors]:
    """Record a trace of the model reading a text, and fit predictors to it.

    Args:
        text: preferably of the kind that the model will be used for.
        tokens: to read, in windows spread evenly over the text.
        on_step: called with the task, the steps done and all steps.

    Raises:
        CalibrationError: there is too little text, or activations are not finite.
    """
    trace = _recorded(model, text, tokens, on_step)
    return trace, _fitted(model, trace, on_step)


def calibrate(
    name: str | Path,
    profile: LoadedProfile,
    text: Path,
    tokens: int,
    out: Path | None,
    *,
    compression: int | None = None,
) -> int:
    """The subcommand.

    Args:
        name: of the model, or its path.
        text: file to read.
        tokens: of it to read.
        out: folder for the calibration; None for the one beside the model.
        compression: `read_tokens` of `analyse`; None to leave compression out.

    Returns:
        The exit code.

    Raises:
        CalibrationError: the text cannot be read or is too short, `out` cannot be written, or is
            None for a GGUF file.
    """
    content = _read(text)
    if compression is not None and compression < 1:
        raise CalibrationError(f"--compression must be at least 1 token, got {compression}")
    folder = out or _beside(name)
    check_writable(folder)
    began = time.perf_counter()
    model = MoE.from_pretrained(name, profile, progress=sys.stderr.isatty())
    with step_bar() as on_step:
        trace = _recorded(model, content, tokens, on_step)
        unavailable = None
        if compression is not None:  # an interrupted run may have saved the predictors already
            unavailable = unavailable_before(folder, model.config, trace)
        if unavailable is None:
            fitted = _fitted(model, trace, on_step)
            scores = {layer: own for score in SCORE_HEADS.of_all() for layer, own in score(model)}
            save_calibration(folder, model.config, text.name, trace, fitted, scores)
            unavailable = fitted.unavailable
    if compression is not None:
        with step_bar() as on_step:
            notices = analyse(model, trace, folder, on_step, read_tokens=compression)
        for notice in notices:
            print(f"moe: {notice}", file=sys.stderr)
    for absent, reason in unavailable.items():
        print(f"moe: no predictor {absent}: {reason}", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"moe: {trace.num_tokens} tokens read in {seconds:.0f} s; see {folder}", file=sys.stderr)
    return 0


def _beside(name: str | Path) -> Path:
    """The folder for the calibration of a model, in its directory."""
    directory = resolve_model(name)
    if is_made(directory):
        raise CalibrationError(
            f"beside {name} there is no model directory for a calibration, as it is a GGUF file; "
            "give it a folder with --out, or calibrate the store that moe convert makes"
        )
    return directory / CALIBRATION_FOLDER


def _recorded(model: MoE, text: str, tokens: int, on_step: OnStep) -> Trace:
    read = text_windows(model, text, tokens)
    total = sum(map(len, read))
    return record_trace(
        model.backbone,
        model.experts,
        read,
        on_tokens=lambda done: on_step("reading text", done, total),
    )


def _fitted(model: MoE, trace: Trace, on_step: OnStep) -> FittedPredictors:
    vectors = token_vectors(model.backbone.model.get_input_embeddings(), VECTOR)
    return fit_predictors(trace, find_gates(model.backbone), vectors, on_step)


@torch.inference_mode()
def token_vectors(embedding: torch.nn.Module, size: int) -> Tensor:
    """``(V, size)`` float32: the embedding's principal components, scaled to a deviation of 1.

    Padded with zeros if the embedding has fewer dimensions.
    """
    count = int(embedding.num_embeddings)  # type: ignore[arg-type]
    device = next((p.device for p in embedding.parameters()), torch.device("cpu"))
    pieces = torch.arange(count, device=device).split(1 << 14)

    def vectors(ids: Tensor) -> Tensor:
        rows: Tensor = embedding(ids).float().cpu()
        return rows

    mean = torch.stack([vectors(ids).sum(0) for ids in pieces]).sum(0) / count
    moments = torch.zeros(len(mean), len(mean))
    for ids in pieces:
        centred = vectors(ids) - mean
        moments += centred.T @ centred / count
    directions = torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :size]
    found = torch.cat([(vectors(ids) - mean) @ directions for ids in pieces])
    found = found / found.std().clamp_min(1e-12)
    return torch.nn.functional.pad(found, (0, size - found.shape[1]))


def text_windows(model: MoE, text: str, tokens: int) -> list[list[int]]:
    """Windows of a text, spread evenly over it.

    Args:
        tokens: of all windows together, at most.

    Returns:
        Token ids; at least `HELD_OUT_EVERY` windows.

    Raises:
        CalibrationError: the text is too short.
    """
    if not text.strip():
        raise CalibrationError("the text is empty; give --text a file with some hundred kilobytes")
    ids = model.codec.encode(text)
    shortest = max(min(len(ids), tokens) // (2 * HELD_OUT_EVERY), 1)
    size = min(WINDOW, model.context_length or WINDOW, shortest)
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    wanted = max(-(-tokens // size), 1)
    stride = max(len(parts) / wanted, 1.0)
    chosen = [parts[int(i * stride)] for i in range(min(wanted, len(parts)))]
    if (surplus := sum(map(len, chosen)) - tokens) > 0:
        chosen[-1] = chosen[-1][:-surplus]
    found = sum(map(len, chosen))
    if found < LEAST_TOKENS:
        raise CalibrationError(
            f"the text gives {found} tokens ({len(ids)} are there, --tokens is {tokens}) and "
            f"calibration needs at least {LEAST_TOKENS}; give more text or raise --tokens"
        )
    return chosen


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")  # no newline translation, as in prompts
    except OSError as error:
        raise CalibrationError(f"cannot read the text {path}: {error}") from error
