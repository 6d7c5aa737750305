"""One rank in a test: the ``moe`` command, or a script, with a fault if the environment asks.

``TEST_FAULT`` is JSON: ``{"rank": 1, "kind": "raise", "step": 40}``; rank "01" is both.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from typing import Any

FAULT: dict[str, Any] = json.loads(os.environ.get("TEST_FAULT", "{}"))
NAPS = {"stall": 1000.0, "slow": 0.05}


def break_steps() -> None:
    """In one step of this rank; slow ones go on being slow."""
    from moe.parallel.mirror import Mirror

    steps, run = 0, Mirror.run

    def broken(self: Mirror, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == FAULT["step"] or (FAULT["kind"] == "slow" and steps > FAULT["step"]):
            assert FAULT["kind"] != "raise", "broken on purpose"
            time.sleep(NAPS[FAULT["kind"]])
        return run(self, *arguments)

    Mirror.run = broken  # type: ignore[assignment, method-assign]


def run_out_of_memory() -> None:
    """When experts are run in one step of this rank, once."""
    from moe.parallel import serving
    from moe.parallel.mirror import Mirror

    steps, run, run_rows = 0, Mirror.run, serving.run_rows

    def counted(self: Mirror, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(self, *arguments)

    def broken(*arguments: Any) -> Any:
        if steps < FAULT["step"]:
            return run_rows(*arguments)
        serving.run_rows = run_rows
        raise MemoryError("no memory, on purpose")

    Mirror.run = counted  # type: ignore[assignment, method-assign]
    serving.run_rows = broken  # type: ignore[assignment]


def stay_in_loading() -> None:
    from moe.parallel.ranks import Ranks

    def share(*_: Any) -> Any:
        print("loading", flush=True)
        time.sleep(NAPS["stall"])

    Ranks.share = share  # type: ignore[assignment, method-assign]


BREAK = {"memory": run_out_of_memory, "load": stay_in_loading}


def main() -> int:
    # A shell that runs the tests in the background has SIGINT ignored in all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("RANK", "none") in str(FAULT.get("rank", "")):
        BREAK.get(FAULT["kind"], break_steps)()
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    from moe.cli import main as moe

    return moe(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
