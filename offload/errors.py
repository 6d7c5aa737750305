"""Errors of a running model that are not a request's fault: a disk fails, or a file changes.

They are no `MoEError`, which is raised before anything is served.
"""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Weights cannot be read; ends only the requests that need them. The message says which
    weights, why, and what to do."""


class BudgetError(ValueError):
    """A memory budget is too small to work with; the message has the numbers."""
