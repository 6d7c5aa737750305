"""What pyproject.toml cannot say: a wheel with compiled CPU kernels inside.

`pip wheel . --config-settings=--build-option=--compiled` makes one, for Linux and this machine's
architecture; `make wheel` does so in a clean copy. Without the option the wheel is plain Python,
and compiles the kernels on first use.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("kernels", "cpu")


class BuildWithKernels(build_py):
    """The packages, and the compiled kernels where `compiled` is set."""

    compiled = False

    def run(self) -> None:
        super().run()
        if self.compiled:
            spec = importlib.util.spec_from_file_location("compiler", FOLDER / "compiler.py")
            assert spec is not None
            assert spec.loader is not None
            compiler = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(compiler)
            compiler.compile_bundle(Path(self.build_lib) / FOLDER / compiler.BUNDLED_DIR.name)


class Wheel(bdist_wheel):
    """A wheel; with ``--compiled`` one for a platform."""

    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("compiled", None, "compile the CPU kernels into it"),
    ]
    boolean_options: ClassVar = [*bdist_wheel.boolean_options, "compiled"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.compiled = False

    def finalize_options(self) -> None:
        if self.compiled:  # else the packages go where wheels have no shared libraries
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()
        if self.compiled:
            self.get_finalized_command("build_py").compiled = True

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3: ctypes loads the kernels, they use nothing of Python's."""
        if self.compiled:
            return "py3", "none", f"linux_{platform.machine()}"
        return super().get_tag()


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
