"""Repacking in a process of its own, as numpy's many small calls would delay the step loop.

The process reads jobs and writes placements, one JSON line each. It has the lowest priority, and
ends as soon as its input is closed, whatever closed it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np

import experts
from experts.placement.packing import Repacked, repack
from experts.placement.placement import Floats, Placement

NICEST = 19


@dataclass(frozen=True)
class RepackJob:
    """The arguments of `repack`."""

    costs_SE: Floats
    current: Placement
    price_E: Floats

    def to_json(self) -> str:
        return json.dumps(
            {
                "costs": np.round(self.costs_SE, 3).tolist(),
                "experts": self.current.experts_P,
                "ranks": self.current.ranks,
                "price": self.price_E.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RepackJob:
        made = json.loads(text)
        costs_SE, price_E = np.array(made["costs"]), np.array(made["price"])
        return cls(
            costs_SE, Placement(tuple(made["experts"]), len(price_E), made["ranks"]), price_E
        )


class Background:
    """Runs one job at a time in another process."""

    def __init__(self) -> None:
        self._asking = ThreadPoolExecutor(1, "repack")
        self._asking.submit(int)  # starts the thread: a step must not fail where there is none
        self._answer: Future[Repacked] | None = None
        self._process: subprocess.Popen[str] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a job has no answer yet, or its answer was not taken."""
        return self._answer is not None

    def submit(self, job: RepackJob) -> None:
        """Begin a job; not while `busy`."""
        assert self._answer is None
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experts.placement.background"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(experts.__file__).parents[1],
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._answer = self._asking.submit(_ask, self._process, job)

    def result(self) -> Repacked | None:
        """The answer, once; None while there is none.

        Raises:
            OSError: the process could not be started or has ended.
        """
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer.result()

    def close(self) -> None:
        """End the process at once."""
        process = self._process
        if process is None:
            self._asking.shutdown()
            return
        process.kill()
        self._asking.shutdown()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _ask(process: subprocess.Popen[str], job: RepackJob) -> Repacked:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job.to_json() + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise OSError(f"the process that repacks experts ended with status {process.wait()}")
    experts_P, sure = json.loads(line)
    return Repacked(
        Placement(tuple(experts_P), job.current.num_experts, job.current.ranks), bool(sure)
    )


def main() -> None:
    """Answer jobs until the input ends."""
    os.nice(NICEST)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work() -> None:
        try:
            while True:
                job = RepackJob.from_json(jobs.get())
                found = repack(job.costs_SE, job.current, job.price_E)
                print(json.dumps([found.placement.experts_P, found.sure]), flush=True)
        finally:
            os._exit(1)

    Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # without finishing the job: its answer would not be read


if __name__ == "__main__":
    main()
