"""``moe trace``: read a text, and report how its tokens are routed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moe.commands.calibrate.record import record_trace
from moe.commands.console import OnStep, stdout_console, step_bar
from moe.commands.evaluate.scoring import WINDOW, read_text
from moe.commands.trace.findings import Findings, analyse
from moe.commands.trace.plots import draw
from moe.commands.trace.report import html, report_tables
from moe.errors import RequestError
from moe.extras import install_line, is_installed
from moe.model import MoE
from moe.settings.profile import LoadedProfile

REPORT, NUMBERS = "report.html", "routing.json"


def trace_model(
    model: MoE, text: str, tokens: int, name: str, on_step: OnStep = lambda what, done, total: None
) -> Findings:
    """Read the first ``tokens`` tokens of a text in windows of 512, and measure their routing.

    Raises:
        RequestError: the text is empty.
    """
    if not text:
        raise RequestError("the text is empty, so there is nothing to trace")
    ids = model.codec.encode(text)[:tokens]
    size = min(WINDOW, model.context_length or WINDOW)
    windows = [ids[at : at + size] for at in range(0, len(ids), size)]
    vocabulary = model.backbone.model.get_input_embeddings().num_embeddings
    trace = record_trace(
        model.backbone, model.experts, windows, row_bytes=0,
        on_tokens=lambda done: on_step("reading", done, len(ids)),
    )  # fmt: skip
    return analyse(
        trace, vocabulary, model.config.model_type, name,
        lambda done: on_step("measuring layers", done, len(trace.num_experts)),
    )  # fmt: skip


def write(findings: Findings, folder: Path) -> Path:
    """Write plots, numbers and the report to a folder; returns the path of the report.

    Raises:
        RequestError: the folder cannot be written.
    """
    images = draw(findings)
    try:
        for name, image in images.items():
            (folder / f"{name}.png").write_bytes(image)
        (folder / NUMBERS).write_text(json.dumps(findings.as_json(), indent=1))
        (folder / REPORT).write_text(html(findings, images), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--out {folder} cannot be written: {error}") from error
    return folder / REPORT


def run(
    name: str | Path,
    profile: LoadedProfile,
    text: Path,
    *,
    tokens: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """The subcommand: returns the exit code."""
    if tokens < 1:
        raise RequestError(f"--tokens must be at least 1, got {tokens}")
    words = read_text(text)
    if out is not None:
        _check_folder(out)
    model = MoE.from_pretrained(name, profile, progress=sys.stderr.isatty())
    with step_bar() as on_step:
        findings = trace_model(model, words, tokens, text.name, on_step)
    if as_json:
        print(json.dumps(findings.as_json()))
    else:
        console = stdout_console()
        for sheet in report_tables(findings):
            console.print(sheet.table())
            console.print(sheet.caption, style="dim")
    if out is not None:
        print(f"moe: see {write(findings, out)}", file=sys.stderr)
    return 0


def _check_folder(folder: Path) -> None:
    """Make the folder for the report, before the model is loaded."""
    if not is_installed("plots"):
        raise RequestError(f"--out needs matplotlib: {install_line('plots')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {folder} cannot be written: {error}") from error
