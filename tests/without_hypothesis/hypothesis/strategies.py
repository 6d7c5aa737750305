"""Strategies: how values are drawn; see hypothesis's own of the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any


class SearchStrategy:
    """``draw`` makes a value by a generator."""

    def __init__(self, draw: Callable[[Random], Any]) -> None:
        self.draw = draw

    def __class_getitem__(cls, _: object) -> type[SearchStrategy]:
        return cls

    def __or__(self, other: SearchStrategy) -> SearchStrategy:
        return one_of(self, other)

    def map(self, function: Callable[[Any], Any]) -> SearchStrategy:
        return SearchStrategy(lambda chances: function(self.draw(chances)))

    def flatmap(self, function: Callable[[Any], SearchStrategy]) -> SearchStrategy:
        return SearchStrategy(lambda chances: function(self.draw(chances)).draw(chances))


class DataObject:
    """Draws in the midst of a test."""

    def __init__(self, chances: Random) -> None:
        self._chances = chances

    def draw(self, strategy: SearchStrategy) -> Any:
        return strategy.draw(self._chances)


DrawFn = Callable[[SearchStrategy], Any]


def integers(least: int, most: int) -> SearchStrategy:
    """Both ends come often: faults are there."""
    return SearchStrategy(
        lambda chances: chances.choice((least, most, *[chances.randint(least, most)] * 4))
    )


def floats(least: float, most: float) -> SearchStrategy:
    return SearchStrategy(lambda chances: chances.uniform(least, most))


def sampled_from(values: Sequence[Any]) -> SearchStrategy:
    return SearchStrategy(lambda chances: chances.choice(values))


def just(value: Any) -> SearchStrategy:
    return SearchStrategy(lambda _: value)


def none() -> SearchStrategy:
    return just(None)


def booleans() -> SearchStrategy:
    return sampled_from((False, True))


def one_of(*strategies: SearchStrategy) -> SearchStrategy:
    return SearchStrategy(lambda chances: chances.choice(strategies).draw(chances))


def tuples(*strategies: SearchStrategy) -> SearchStrategy:
    return SearchStrategy(lambda chances: tuple(own.draw(chances) for own in strategies))


def permutations(values: Sequence[Any]) -> SearchStrategy:
    return SearchStrategy(lambda chances: chances.sample(values, len(values)))


def lists(
    strategy: SearchStrategy,
    *,
    min_size: int = 0,
    max_size: int | None = None,
    unique: bool = False,
) -> SearchStrategy:
    """With unique, there may be fewer."""

    def draw(chances: Random) -> list[Any]:
        count = chances.randint(min_size, min_size + 8 if max_size is None else max_size)
        values = [strategy.draw(chances) for _ in range(count)]
        return list(dict.fromkeys(values)) if unique else values

    return SearchStrategy(draw)


def builds(
    make: Callable[..., Any], *own: SearchStrategy, **named: SearchStrategy
) -> SearchStrategy:
    return SearchStrategy(
        lambda chances: make(
            *(one.draw(chances) for one in own),
            **{name: one.draw(chances) for name, one in named.items()},
        )
    )


def composite(make: Callable[..., Any]) -> Callable[..., SearchStrategy]:
    def strategy(*arguments: Any) -> SearchStrategy:
        return SearchStrategy(lambda chances: make(lambda own: own.draw(chances), *arguments))

    return strategy


def data() -> SearchStrategy:
    return SearchStrategy(DataObject)
