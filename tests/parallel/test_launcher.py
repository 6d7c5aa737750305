"""The command line under DeepSpeed's launcher, and what becomes of all processes at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.cli import main
from tests.launched import PATIENCE_S, ROOT, free_port
from tests.parallel.test_loss import ARGUMENTS, DEMO, LONG, SLOW, url_of

deepspeed = pytest.importorskip("deepspeed", reason="the launcher comes with DeepSpeed")
GENERATE = [
    *("generate", str(DEMO), "--prompt", "import os", "--max-new-tokens", "12", "--json"),
    *("--temperature", "0", "--set", "device=cpu"),
]


def launcher(*arguments: str) -> list[str]:
    """DeepSpeed's launcher for two ranks; it knows ``--module`` and not ``-m``."""
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    return [*launch, "-q", "--master_port", str(free_port()), "--module", "moe", *arguments]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def test_the_command_says_the_same_on_two_ranks(
    launch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*GENERATE, "--profile", "expert-parallel"]
    with launch(2, command) as together:
        assert main(command) == 0
        assert together.codes() == [0, 0], together.everything()
    said = json.loads(together.out())
    assert said["text"] == json.loads(capsys.readouterr().out)["text"]
    assert together.out(1) == ""


def children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.1)


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A server under the launcher: the launcher, its address, and where its output is."""
    out = tmp_path / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(launcher(*arguments), env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "moe: serving" not in out.read_text():
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.1)
        line = next(line for line in out.read_text().splitlines() if "moe: serving" in line)
        yield process, line.split()[-1], out
    finally:
        for pid in [*children(process.pid), process.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.deep
def test_all_end_in_peace_when_rank_0_is_told_to(launch: Any) -> None:
    """SIGTERM goes to everybody, as launchers send it: running requests are finished first. A rank
    that is only slow is not lost meanwhile."""
    with launch(2, ARGUMENTS, SLOW) as launched:
        url = url_of(launched)
        question, where = LONG | {"stream": True, "max_tokens": 200}, f"{url}/v1/completions"
        with httpx.stream("POST", where, json=question, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            status = httpx.get(f"{url}/v1/status", timeout=60).json()
            measured = metrics(url)
            for rank in (1, 0):
                launched.signal(rank, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert launched.codes() == [0, 0], launched.everything()
    assert status["engine"]["ranks"] == 2
    served = [measured[f'moe_rank_served_total{{rank="{rank}"}}'] for rank in range(2)]
    assert min(served) > 0
    assert measured["moe_rank_imbalance"] == pytest.approx(2 * max(served) / sum(served))
    assert measured['moe_rank_bytes_total{rank="1",what="results"}'] > 0


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@pytest.mark.deep
def test_without_rank_0_the_others_end(launch: Any) -> None:
    with launch(2, ARGUMENTS) as launched:
        url_of(launched)
        launched.signal(0, signal.SIGKILL)
        assert launched.codes(60) == [-signal.SIGKILL, 1]
        assert "rank 1 ends: rank 0 has ended" in launched.errors(1)


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((v.removeprefix("RANK=") for v in variables if v.startswith("RANK=")), "")


def test_the_documented_command_ends_all_that_it_started(tmp_path: Path) -> None:
    """``deepspeed`` itself, as users start it: requests are finished first, then all ends."""
    with serving(tmp_path, *ARGUMENTS) as (process, url, errors):
        pids = children(process.pid)
        question, where = LONG | {"stream": True, "max_tokens": 100}, f"{url}/v1/completions"
        with httpx.stream("POST", where, json=question, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.kill()
            assert process.wait(60) == -signal.SIGKILL
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until_gone(pids)
        assert "the launcher has ended; stopping" in errors.read_text()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/ready")


@pytest.mark.deep
def test_the_launcher_lets_the_others_go_on_and_nobody_outlives_it(tmp_path: Path) -> None:
    """kill -9 of a rank under load: all requests are answered, as if nothing had been. Then of the
    launcher: the rank that is left ends."""
    settings = ["--set", "parallel.on_rank_loss=continue"]
    question = LONG | {"max_tokens": 60, "temperature": 0}
    with serving(tmp_path, *ARGUMENTS, *settings) as (process, url, errors):
        pids = children(process.pid)
        (second,) = [pid for pid in pids if rank_of(pid) == "1" and not children(pid)]

        def ask(number: int) -> str:
            prompt = "import os" + number * " "
            answer = httpx.post(
                f"{url}/v1/completions", json=question | {"prompt": prompt}, timeout=120
            )
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(4) as pool:
            before = list(pool.map(ask, range(4)))
            during = [pool.submit(ask, number) for number in range(4)]
            time.sleep(0.3)
            os.kill(second, signal.SIGKILL)
            assert [future.result() for future in during] == before
            assert list(pool.map(ask, range(4))) == before
        status = httpx.get(f"{url}/v1/status", timeout=60).json()
        assert status["engine"]["ranks"] == 1
        assert process.poll() is None
        assert "rank 1 has ended" in errors.read_text()
        assert "going on without it" in errors.read_text()
        os.kill(pids[0], signal.SIGKILL)
        process.wait(60)
        wait_until_gone(pids)
