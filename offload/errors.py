"""What goes wrong while a model runs and is no fault of the request: a disk fails, a file changes.

Not a `MoEError`: those are raised before anything is served. This one ends the requests that needed
the bytes, and nothing else.
"""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Weights that a request needs cannot be had; the message says which, why and what to do."""


class BudgetError(ValueError):
    """A memory budget is too small to work with; the message has the numbers."""
