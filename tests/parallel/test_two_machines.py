"""Two machines, played by two network namespaces with a cable between them.

DeepSpeed's path for several machines without ssh: the same command on each, with its number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launched import PATIENCE_S
from tests.parallel.test_launcher import ENVIRONMENT
from tests.parallel.test_loss import ARGUMENTS, LONG, SLACK_S, TIMEOUT_S

pytest.importorskip("deepspeed", reason="the launcher comes with DeepSpeed")
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = "29577"
ASK = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None,
                                 {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=120).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces; the ends of the cable are called as they are."""
    names = tuple(f"moe{end}{os.getpid() % 100000}" for end in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        clear(names)
        pytest.skip(f"network namespaces are not allowed here: {error}")
    yield names[0], names[1]
    clear(names)


def clear(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def inside(name: str, *command: str, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["ip", "netns", "exec", name, *command], env=ENVIRONMENT, **how)


def ask(name: str, url: str, body: Any = "") -> subprocess.Popen[bytes]:
    data = body and json.dumps(body)
    return inside(name, sys.executable, "-c", ASK, url, data, stdout=subprocess.PIPE)


@pytest.mark.deep
def test_two_machines_serve_one_model_until_the_cable_is_cut(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=1\nsecond slots=1\n")
    outs = [tmp_path / "first", tmp_path / "second"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--hostfile", str(hosts)]
    launcher += ["--no_ssh", "--master_addr", ADDRESSES[0], "--master_port", PORT]
    launched = []
    for number, name in enumerate(machines):
        with outs[number].open("wb") as out:
            command = [*launcher, "--node_rank", str(number), "--module", "moe", *ARGUMENTS]
            launched.append(inside(name, *command, stdout=out, stderr=out))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "moe: serving" not in outs[0].read_text():
            assert time.monotonic() < deadline, said(outs)
            assert all(process.poll() is None for process in launched), said(outs)
            time.sleep(0.1)
        url = next(line for line in outs[0].read_text().splitlines() if "moe: serving" in line)
        url = url.split()[-1]
        status = json.loads(ask(machines[0], f"{url}/v1/status").communicate()[0])
        assert status["engine"]["ranks"] == 2
        short = ask(machines[0], f"{url}/v1/completions", LONG | {"max_tokens": 5})
        assert "choices" in json.loads(short.communicate()[0])

        asked = ask(machines[0], f"{url}/v1/completions", LONG | {"max_tokens": 2000})
        time.sleep(1.0)
        began = time.monotonic()
        ip("-n", machines[0], "link", "set", machines[0], "down")
        answer = json.loads(asked.communicate()[0] or said(outs))
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert "rank 1 has not been heard of" in answer["error"]["message"]
        assert all(process.wait(60) != 0 for process in launched), said(outs)
        assert "rank 0 has not been heard of" in outs[1].read_text() or "-9" in outs[1].read_text()
    finally:
        for process in launched:
            process.kill()


def said(outs: list[Path]) -> str:
    return "\n".join(out.read_text() for out in outs)
