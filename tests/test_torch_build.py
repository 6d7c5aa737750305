"""`make` takes the CPU build of torch where nothing needs the other one, and says why."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import torch_build
from tests.floors import ROOT
from torch_build import CPU_INDEX, Build, choose

CPU, DEFAULT = "torch==2.13.0+cpu", "torch==2.13.0"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "nvidia_gpu", lambda: "")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The indexes that are asked, of which one has the CPU build; "" is those of pip's settings."""

    def stand_in(having: str) -> list[str]:
        order: list[str] = []

        def has(_requirement: str, *index: str) -> bool:
            order.append(" ".join(index))
            return order[-1] == having

        monkeypatch.setattr(torch_build, "has", has)
        return order

    return stand_in


def test_the_own_indexes_come_first(asked: Callable[[str], list[str]]) -> None:
    order = asked("")
    build = choose("2.13.0")
    assert build.arguments == [CPU]
    assert build.reason == f"{CPU}, the CPU build: this machine has no NVIDIA GPU"
    assert order == [""]


def test_pytorchs_index_is_the_second(asked: Callable[[str], list[str]]) -> None:
    order = asked(f"--index-url {CPU_INDEX}")
    build = choose("2.13.0")
    assert build.arguments == [CPU, "--extra-index-url", CPU_INDEX]
    assert build.reason.endswith(f"no NVIDIA GPU (from {CPU_INDEX})")
    assert len(order) == 2


def test_without_either_the_default_is_taken_and_said(asked: Callable[[str], list[str]]) -> None:
    asked("nobody")
    build = choose("2.13.0")
    assert build.arguments == [DEFAULT]
    assert build.reason == (
        f"{DEFAULT}, the default build, which may bring several GB for CUDA: this machine has no "
        f"NVIDIA GPU, but neither pip's indexes nor {CPU_INDEX} offered {CPU} within 60 seconds"
    )


def test_a_gpu_takes_the_default_and_nobody_is_asked(
    asked: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = asked("")
    monkeypatch.setattr(torch_build, "nvidia_gpu", lambda: "/dev/nvidia0")
    why = f"{DEFAULT}, the default build: /dev/nvidia0 shows an NVIDIA GPU"
    assert choose("2.13.0") == Build([DEFAULT], why)
    assert order == []


def test_a_gpu_is_seen_by_its_tool_or_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch_build, "_GPU_FILES", (f"{tmp_path}/nvidia[0-9]",))
    assert torch_build.nvidia_gpu() == ""
    (tmp_path / "nvidia0").touch()
    assert torch_build.nvidia_gpu() == f"{tmp_path}/nvidia0"
    tool = tmp_path / "nvidia-smi"
    tool.touch(mode=0o755)
    assert torch_build.nvidia_gpu() == str(tool)


class Index(SimpleHTTPRequestHandler):
    """Of packages, with one page; keeps quiet."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An index on localhost, the only one in pip's settings, with both builds of torch 2.13.0."""
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    names = [f"torch-2.13.0{build}-py3-none-any.whl" for build in ("", "+cpu")]
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    page.write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}/simple"
    own = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    for name, value in {**own, "PIP_INDEX_URL": address}.items():
        monkeypatch.setenv(name, value)
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


def test_pip_knows_what_an_index_has(index: str) -> None:
    assert torch_build.has(CPU)
    assert not torch_build.has("torch==2.13.0+cu130")
    assert not torch_build.has("torch==2.1", "--index-url", f"{index}/nothing")


def test_make_says_the_reason_and_gives_pip_the_arguments(index: str) -> None:
    command = [sys.executable, str(ROOT / "torch_build.py"), "2.13.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch: torch==2.13.0")
    assert line.endswith("; make TORCH=... names another")
    assert done.stdout.split()[0] in (CPU, DEFAULT)  # with a GPU, the other


@pytest.mark.parametrize("given", ["", "torch==2.12.0 --index-url http://localhost"])
def test_makefile_asks_unless_torch_is_named(given: str) -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/.installed-run", f"TORCH={given}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "torch" in line and "pip" in line]
    assert line.endswith(given or "$(.venv/bin/python torch_build.py 2.13.0)")
