"""One rank in a test: the ``moe`` command, or a script, with a fault if the environment asks.

``TEST_FAULT`` is JSON: ``{"rank": 1, "kind": "raise", "step": 40}``.
"""

from __future__ import annotations

import json
import os
import runpy
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


def main() -> int:
    if str(FAULT.get("rank")) == os.environ.get("RANK"):
        break_steps()
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    from moe.cli import main as moe

    return moe(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
