"""Ranks meet at every MoE layer that any of them visits, also those that have nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offload.errors import OffloadError


class Pass:
    """One pass of all ranks through the MoE layers.

    Args:
        layers: that any rank visits; the same on every rank.
        join: meets the others at a layer, with no tokens of its own.
    """

    def __init__(self, layers: Iterable[int], join: Callable[[int], None]) -> None:
        self._ahead = sorted(set(layers), reverse=True)
        self._join = join

    @property
    def left(self) -> int:
        """Layers where the others have not been met yet."""
        return len(self._ahead)

    def reach(self, layer: int) -> None:
        """Join the layers before this one, which the caller is about to visit.

        Raises:
            OffloadError: the others have left this layer, or do not come here: a forward pass that
                failed is begun again.
        """
        if layer not in self._ahead:
            raise OffloadError(
                f"MoE layer {layer} cannot be visited again: the other ranks do not come back to it"
            )
        while (following := self._ahead.pop()) != layer:
            self._join(following)

    def take(self) -> list[int]:
        """The layers that are left, for a caller that will meet the others at each of them."""
        layers, self._ahead = self._ahead[::-1], []
        return layers

    def finish(self) -> None:
        """Join the layers that are left."""
        while self._ahead:
            self._join(self._ahead.pop())
