"""As a script: rank 0 goes on generating while other ranks are lost, one after the other.

``python losing.py MODEL OUT``; OUT gets what was said with three ranks, two and one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from moe import MoE, SamplingParams
from tests.parallel.generation import PROMPTS, SETTINGS

PARAMS: dict[str, Any] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True, "n": 2},
}
LOSSES = [(2, signal.SIGKILL), (1, signal.SIGSTOP)]
AFTER = 5
"""Steps before the loss: some prompts have been read by then, and others not."""


def say(model: MoE, lose: Any = None) -> dict[str, list[list[int]]]:
    """Token ids by parameters; ``lose`` is called in the middle."""
    engine = model.loop()
    groups = {
        name: [model.request(prompt, SamplingParams(**params)) for prompt in PROMPTS]
        for name, params in PARAMS.items()
    }
    for group in (group for several in groups.values() for group in several):
        engine.submit(group)
    steps = 0
    while not engine.idle:
        if lose is not None and steps == AFTER:
            lose()
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
        steps += 1
    return {
        name: [s.token_ids for group in several for s in group.sequences]
        for name, several in groups.items()
    }


def main() -> None:
    path, out = sys.argv[1:]
    parallel = {"on_rank_loss": "continue", "timeout_s": 6.0, "combine": "exact"}
    model = MoE.from_pretrained(path, "expert-parallel", **SETTINGS, parallel=parallel)
    if model.rank:
        model.serve_rank()
        return model.close()
    found = [say(model)]
    for rank, number in LOSSES:
        pid = model._session.links._membership.members[rank].pid  # type: ignore[union-attr]
        found.append(say(model, lambda pid=pid, number=number: os.kill(pid, number)))
        found.append(say(model))
    status = model.status()["parallel"]
    model.close()
    Path(out).write_text(json.dumps({"said": found, "status": status}))


if __name__ == "__main__":
    main()
