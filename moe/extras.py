"""Optional packages: what they are for, and how to install them.

The base installation runs generate, chat, serve, convert and plan. What else needs a package says
so with `install_line`, which names that package itself: `moe-inference`, our own distribution, is
registered on no index, so anybody could publish something under that name. A maintainer who
registers it changes `INSTALL` here, and nothing else.
"""

from __future__ import annotations

from importlib.util import find_spec

INSTALL = "pip install . in its checkout, or pip install FILE.whl"
"""The command that installs `moe` itself."""

# As in pyproject.toml; tests/test_packaging.py compares the two.
EXTRAS = {
    "parallel": ("deepspeed>=0.18", "psutil>=5.9", "scipy>=1.12"),
    "gguf": ("gguf>=0.18", "transformers>=5.18"),
    "calibration": ("scipy>=1.12",),
    "images": ("Pillow>=11",),
    "plots": ("matplotlib>=3.9",),
    "gpu": ("triton>=3.4",),
    "telemetry": ("opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"),
}
"""Requirements by extra."""

_MODULES = {"Pillow": "PIL"}

# DeepSpeed's set-up compiles for CUDA without this.
_BEFORE = {"parallel": "DS_BUILD_OPS=0 "}


def install_line(extra: str) -> str:
    """The command that installs an extra's packages."""
    wanted = " ".join(f"'{requirement}'" for requirement in EXTRAS[extra])
    return f"{_BEFORE.get(extra, '')}pip install {wanted}"


def is_installed(extra: str) -> bool:
    """Return whether all packages of an extra can be imported; imports none."""
    names = (one.partition(">")[0] for one in EXTRAS[extra])
    return all(_is_found(_MODULES.get(name, name.replace("-", "."))) for name in names)


def _is_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
