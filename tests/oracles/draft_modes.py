"""Settings of every way to draft, for the checks that speculation changes no token."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

BITS = (8, 4, 3, 2)
PARTS: dict[str, dict[str, Any]] = {}
with suppress(ModuleNotFoundError):  # the method may have been taken out (tests/without_method.py)
    from moe.methods.core_drafts.rule import CoreSet

    PARTS["voted"] = {"rules": (CoreSet(0.2),)}
    PARTS["first experts"] = {"rules": (CoreSet(),), "experts": 3}
with suppress(ModuleNotFoundError):
    from moe.methods.skip_drafts.rule import Skip

    PARTS["skipping"] = {"rules": (Skip(0.5),)}
WAYS: dict[str, dict[str, Any]] = {
    "8 bits": {"mode": "elastic", "bits": 8, "experts": 2},  # with all of them it is the model
    **{f"{bits} bits": {"mode": "elastic", "bits": bits} for bits in BITS[1:]},
    **{
        f"{name}, {bits} bits": {"mode": "elastic", "bits": bits, **part}
        for name, part in PARTS.items()
        for bits in BITS
    },
    **{mode: {"mode": mode} for mode in ("ngram", "recycling", "auto")},
}
NEW_TOKENS = 8
