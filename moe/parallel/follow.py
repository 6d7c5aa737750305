"""What ``moe`` does on every rank but the first."""

from __future__ import annotations

import signal
from contextlib import closing

from moe.model import MoE
from moe.profile import LoadedProfile


def follow(name: str, profile: LoadedProfile) -> None:
    """Load the model and compute until rank 0 stops.

    Raises:
        MoEError: the model cannot be loaded, or the ranks do not come together.
        RankLostError: rank 0 is lost.
    """
    with closing(MoE.from_pretrained(name, profile)) as model:
        # A launcher signals all ranks: rank 0 finishes what it has begun, then stops the others.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        model.serve_rank()
