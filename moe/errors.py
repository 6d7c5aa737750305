"""Errors a user can cause, each a ``ValueError`` that names the rule, the value and the remedy.

They are raised before anything is changed or served. Faults of ranks come while a model runs and
are no ``MoEError``. Invariants of our own code are ``assert`` statements instead.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 50


class MoEError(ValueError):
    """Base of every error that a user's input can cause."""


class CheckpointError(MoEError):
    """Model files are absent, damaged, incomplete or not what the configuration says."""


class UnsupportedModelError(MoEError):
    """The architecture is unknown, or cannot be run through the seam."""


class ProfileError(MoEError):
    """A profile file, environment variable or override is not valid."""


class DoesNotFitError(MoEError):
    """The model does not fit into the memory there is."""


class RequestError(MoEError):
    """A prompt or a sampling parameter is not valid for the loaded model."""


class BusyError(MoEError):
    """The machine was too busy for a request, which may be valid: it can be sent again."""


class StructureError(RequestError):
    """A structured output became too complex to constrain while the text was generated."""


class ContextError(RequestError):
    """A prompt and its new tokens are longer than the model's context, or than memory has room for.

    Attributes:
        limit: tokens that there is room for; None: not known here.
        num_prompt: tokens of the prompt, or a number that it has at least.
        num_new: new tokens that are asked for.
    """

    def __init__(
        self, message: str, limit: int | None = None, num_prompt: int = 0, num_new: int = 0
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.num_prompt = num_prompt
        self.num_new = num_new


class CalibrationError(MoEError):
    """A text cannot be calibrated on, or the files of an earlier calibration cannot be used."""


class LaunchError(MoEError):
    """Ranks of a launch are missing, or differ."""


class RankError(RuntimeError):
    """A fault on a rank that computes or serves a sequence; the sequence ends with it."""


class RankLostError(RuntimeError):
    """A rank of the launch is gone or makes no progress; the message names it and the reason."""


def listing(title: str, problems: Sequence[str]) -> str:
    """`title` and one indented line a problem, cut after `MAX_LISTED` with the number left out."""
    lines = [f"{title} ({len(problems)} problem{'s' if len(problems) != 1 else ''}):"]
    lines += [f"  - {problem}" for problem in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"  ... and {len(problems) - MAX_LISTED} more")
    return "\n".join(lines)
