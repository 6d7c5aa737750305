"""Stands in for hypothesis where it is not installed: what the tests of GPU kernels use of it.

Examples are drawn by a generator that begins alike for each test. An example that fails is added to
the error as it is: nothing is made smaller, and nothing remembered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum, auto
from functools import wraps
from random import Random
from typing import Any, ClassVar, TypeVar

from hypothesis.strategies import SearchStrategy

Test = TypeVar("Test", bound=Callable[..., object])
_generators: list[Any] = []


class HealthCheck(Enum):
    too_slow = auto()


class settings:
    """How many examples a test has; all else that hypothesis knows is left out."""

    profiles: ClassVar[dict[str, int]] = {}
    usual: ClassVar[int] = 100

    def __init__(self, *, max_examples: int) -> None:
        self.max_examples = max_examples

    def __call__(self, test: Test) -> Test:
        test.max_examples = self.max_examples  # type: ignore[attr-defined]
        return test

    @classmethod
    def register_profile(cls, name: str, *, max_examples: int, **_: object) -> None:
        cls.profiles[name] = max_examples

    @classmethod
    def load_profile(cls, name: str) -> None:
        cls.usual = cls.profiles[name]


def register_random(generator: Any) -> None:
    """A generator that each example finds in the same state."""
    _generators.append(generator)


def given(*last: SearchStrategy, **named: SearchStrategy) -> Callable[[Callable[..., None]], Any]:
    """Run a test with examples: of its last arguments, or of those named."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        names = list(signature.parameters)[len(signature.parameters) - len(last) :]
        strategies: dict[str, Any] = dict(zip(names, last, strict=True)) | named

        @wraps(test)
        def run(**fixtures: Any) -> None:
            chances = Random(0)
            for _ in range(getattr(run, "max_examples", settings.usual)):
                example = {name: own.draw(chances) for name, own in strategies.items()}
                for generator in _generators:
                    generator.seed(0)
                try:
                    test(**fixtures, **example)
                except Exception as error:
                    raise AssertionError(f"failed with {example}") from error

        left = [own for name, own in signature.parameters.items() if name not in strategies]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
