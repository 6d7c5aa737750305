"""The arguments of a policy's specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from routing.routing import RoutingError


@dataclass(frozen=True)
class PerLayer:
    """One number for all MoE layers, or one for each."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return ",".join(f"{value:g}" for value in self.values)

    def check(self, spec: str, num_layers: int) -> None:
        """Raise `RoutingError` where there are too few or too many for a model."""
        if len(self.values) not in (1, num_layers):
            raise RoutingError(
                f"policy '{spec}' has numbers for {len(self.values)} MoE layers, and the model has "
                f"{num_layers}; give one number, or one for each"
            )

    def of(self, layer: int) -> float:
        return self.values[layer if len(self.values) > 1 else 0]


@dataclass(frozen=True)
class Arguments:
    """What stands behind a policy's name; whatever cannot be read is a `RoutingError`.

    Attributes:
        given: between colons.
        form: how the specification is written; its first part is the name.
        rule: what the arguments have to be, for people.
    """

    given: list[str]
    form: str
    rule: str

    def fail(self) -> NoReturn:
        spec = ":".join([self.form.partition(":")[0], *self.given])
        raise RoutingError(f"policy '{spec}' is not valid; write {self.form} with {self.rule}")

    def parts(self, count: int, *defaults: str) -> list[str]:
        """``count`` of them, of which the last ones may be missing."""
        missing = count - len(self.given)
        if not 0 <= missing <= len(defaults):
            self.fail()
        return [*self.given, *defaults[len(defaults) - missing :]]

    def whole(self, text: str) -> int:
        """A whole number from 1 on."""
        if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < 1:
            self.fail()
        return int(text)

    def share(self, text: str, *, zero: bool = False) -> float:
        """In ``(0, 1]``, or in ``[0, 1]``."""
        try:
            number = float(text)
        except ValueError:
            self.fail()
        if not (0 < number <= 1 or (zero and number == 0)):
            self.fail()
        return number

    def per_layer(self, text: str, *, zero: bool = False) -> PerLayer:
        """Shares with commas between."""
        return PerLayer(tuple(self.share(value, zero=zero) for value in text.split(",")))
