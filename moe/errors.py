"""Errors a user can cause, each a ``ValueError`` that names the rule, the value and the remedy.

They are raised before anything is changed or served, but for faults of ranks, which come while a
model runs and are no ``MoEError``. Invariants of our own code are ``assert`` statements instead.
"""

from __future__ import annotations


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


class StructureError(RequestError):
    """What a text has to be like became too complex to follow while the text was generated."""


class ContextError(RequestError):
    """A prompt, with what is to follow, is longer than the model's context."""


class CalibrationError(MoEError):
    """A text cannot be calibrated on, or what an earlier calibration left cannot be used."""


class LaunchError(MoEError):
    """The processes of a launch have not come together, or do not fit together."""


class RankError(RuntimeError):
    """A fault on a rank that computes or serves a sequence, which ends there."""


class RankLostError(RuntimeError):
    """A process of the launch is gone, or no longer does its part; says which one and why."""
