"""Signals at any time, and memory that runs out: what becomes of ranks and of those who wait.

The faults that several ranks must survive, and where each is tested:

==== ==============================================================================================
B1   `test_wire`: JSON only, bounded, from who knows the secret; `tests/test_house.py`: no pickle
B4   `test_start`: one address is listened on; exposed ranks are warned of
B5   `tests/test_house.py`: no shell; `test_start`: nonsense of a launcher is refused
B6   `test_secret`, `tests/experts/test_dispatch_sockets.py`: files of nobody else, no shared memory
B7   `test_launcher`: nobody outlives a launcher that is killed, nor rank 0
B8   `test_start`: a port that is taken is an error
B9   `test_start`: versions, code, settings and files are compared
B10  `test_loss`: killed, stopped, raising, stalled; `test_launcher`: only slow
B11  `test_start`: every difference is named on every rank
B12  `test_start`: ranks that do not come are named
B13  here, while loading and in a stream; `test_launcher`: drained to the end
B14  here, in a step; `tests/moe/parallel/test_lockstep.py`: experts that cannot be read
E1   `test_receipts`: bits do not depend on company; dispatch drops nothing
E2   here: every token wants the same experts; `tests/experts/test_dispatch.py`: of one rank;
     `test_launcher`: the busiest rank is in the metrics
E3   `tests/moe/server/test_answers.py`: no answer says which experts it used
E4   `tests/experts/test_dispatch.py`: nobody has tokens; `test_receipts`: a rank without any
E5   `tests/experts/test_dispatch_assignment.py`: both ends count alike, in 64 bits
E6   `tests/routing/test_routing.py`: equal scores; `test_parallel_engine`: rows that are no numbers
E11  `tests/experts/test_dispatch.py`: epochs are compared; `test_generation`: moved all the time
E12  `tests/experts/test_placement_rebalance.py`: what was meant for a lost group; `test_going_on`
E13  `tests/experts/test_placement_first.py`: any experts on any ranks; `test_start`: wrong RANK
==== ==============================================================================================
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.amounts import deep_except
from tests.parallel.test_loss import ARGUMENTS, LONG, SLOW, ask, first_token, url_of

PATIENT = [*ARGUMENTS, "--set", "parallel.timeout_s=60"]
"""Nobody is lost for being slow here."""
SOON_S = 60.0
"""For processes to end, on a machine that others use too."""


@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        ({0: signal.SIGTERM, 1: signal.SIGTERM}, {0, 1, -signal.SIGTERM}),  # as launchers do
        ({0: signal.SIGTERM}, {0, 1}),
        ({1: signal.SIGINT}, {1, -signal.SIGKILL}),
    ],
)
def test_a_signal_while_loading_ends_everybody(
    launch: Any, signals: dict[int, int], codes: set[int]
) -> None:
    with launch(2, PATIENT, {"rank": "01", "kind": "load"}) as launched:
        for rank in range(2):
            launched.wait_for("loading", rank)
        for rank, number in signals.items():
            launched.signal(rank, number)
        assert set(launched.codes(SOON_S)) <= codes, launched.everything()


@pytest.mark.deep
def test_a_second_signal_does_not_wait_for_streams(launch: Any) -> None:
    with launch(2, PATIENT, SLOW) as launched:
        where, question = f"{url_of(launched)}/v1/completions", LONG | {"stream": True}
        with httpx.stream("POST", where, json=question, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            launched.signal(0, signal.SIGTERM)
            time.sleep(0.5)
            assert launched.processes[0].poll() is None
            launched.signal(0, signal.SIGTERM)
            assert launched.codes(SOON_S) == [1, 1], launched.everything()


@pytest.mark.parametrize("rank", deep_except([1], [0, 1]))
def test_memory_that_runs_out_in_a_step_costs_the_requests_in_it(launch: Any, rank: int) -> None:
    fault = {"rank": rank, "kind": "memory", "step": 10}
    arguments = [*PATIENT, "--set", "engine.fused=off"]  # compiled steps do not call `run_experts`
    with launch(2, arguments, fault) as launched, ThreadPoolExecutor(4) as pool:
        url = url_of(launched)
        answers = list(pool.map(lambda seed: ask(url, seed=seed, max_tokens=40), range(4)))
        assert {500} <= {status for status, _ in answers} <= {200, 500}, answers
        assert "weights" not in str([answer for status, answer in answers if status == 500])
        assert "experts failed: MemoryError" in launched.errors(rank)
        first_token(url)
        assert ask(url, max_tokens=40)[0] == 200


@pytest.mark.deep
def test_all_tokens_may_want_the_same_experts(launch: Any) -> None:
    """A prompt of one token over and over, beside others that are answered as if alone."""
    with launch(2, PATIENT) as launched, ThreadPoolExecutor(4) as pool:
        url, plain = url_of(launched), {"temperature": 0, "max_tokens": 8}
        alone = ask(url, **plain)[1]["choices"][0]["text"]
        hostile = [pool.submit(ask, url, prompt=" a" * 300, **plain) for _ in range(3)]
        assert ask(url, **plain)[1]["choices"][0]["text"] == alone
        assert all(future.result()[0] == 200 for future in hostile)
