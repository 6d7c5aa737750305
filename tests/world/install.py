"""Installs clients from PyPI and npm into folders below build/world/clients."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.world.files import WORLD

SECONDS = 1500


@dataclass(frozen=True)
class PyPI:
    """Distributions in a virtual environment of their own.

    Attributes:
        requirements: as pip reads them.
        needs_torch: the torch of this Python is shown to pip, which else brings gigabytes of CUDA.
    """

    requirements: tuple[str, ...]
    needs_torch: bool = False

    def install(self, folder: Path) -> None:
        """Takes the newest releases that fit together."""
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=SECONDS)
        if self.needs_torch:
            (packages,) = folder.glob("lib/python*/site-packages")
            ours = Path(torch.__file__).parents[1]
            (packages / "torch_of_moe.pth").write_text(f"{ours}\n")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--quiet"]
        subprocess.run([*pip, *self.requirements], check=True, timeout=SECONDS)

    def programs(self, folder: Path) -> Path:
        """Where its commands lie."""
        return folder / "bin"

    def version(self, folder: Path, package: str) -> str:
        """Of one of the packages."""
        show = f"from importlib.metadata import version; print(version({package!r}))"
        return _output([str(folder / "bin" / "python"), "-c", show])


@dataclass(frozen=True)
class Npm:
    """Packages of npm's in a folder of their own."""

    packages: tuple[str, ...]

    def install(self, folder: Path) -> None:
        """Takes the newest releases."""
        folder.mkdir(parents=True)
        (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run([*npm, *self.packages], cwd=folder, check=True, timeout=SECONDS)

    def programs(self, folder: Path) -> Path:
        """Where its commands lie."""
        return folder / "node_modules" / ".bin"

    def version(self, folder: Path, package: str) -> str:
        """Of one of the packages."""
        about = (folder / "node_modules" / package / "package.json").read_text()
        return str(json.loads(about)["version"])


FOLDERS: dict[str, PyPI | Npm] = {
    "claude-code": Npm(("@anthropic-ai/claude-code",)),
    "codex": Npm(("@openai/codex",)),
    "opencode": Npm(("opencode-ai",)),
    "continue": Npm(("@continuedev/cli",)),
    "node": Npm(("openai", "@anthropic-ai/sdk")),
    "python": PyPI(("openai", "anthropic", "litellm", "langchain-openai")),
    "aider": PyPI(("aider-chat",)),
    "open-webui": PyPI(("open-webui",), needs_torch=True),
    "lm-eval": PyPI(("lm-eval[api]",), needs_torch=True),
    "mcp-npm": Npm(
        (
            *(f"@modelcontextprotocol/server-{name}" for name in ("filesystem", "memory")),
            *(f"@modelcontextprotocol/server-{name}" for name in ("everything", "github")),
            "@modelcontextprotocol/server-sequential-thinking",
            *("@playwright/mcp", "chrome-devtools-mcp", "@notionhq/notion-mcp-server"),
        )
    ),
    "mcp-pypi": PyPI(("mcp-server-git", "mcp-server-time", "mcp-server-fetch", "excel-mcp-server")),
    "loads": PyPI(("guidellm", "llama-benchy"), needs_torch=True),
}


def installed(name: str, fresh: bool) -> Path:
    """The folder of that name in `FOLDERS`, installed where it is not there.

    Args:
        name: of the folder.
        fresh: install anew, for today's releases.

    Raises:
        subprocess.CalledProcessError: it cannot be had.
    """
    folder = WORLD / "clients" / name
    done = folder / ".installed"
    if fresh or not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        FOLDERS[name].install(folder)
        done.touch()
    return folder


def _output(argv: list[str]) -> str:
    answer = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    return answer.stdout.strip()
