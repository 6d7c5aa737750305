"""`run_halves`: at each layer, dispatch the first half's rows, compute the second half up to there
and dispatch its rows, run the experts for the first half, then for the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from experts.dispatch import ExchangeError, RankDispatcher
from moe.network.lanes import Lane, LaneState
from moe.network.moe_layer import MoELayers, serve


def run_halves(
    halves: Sequence[Sequence[Lane]],
    experts: MoELayers,
    pause_at: Mapping[Lane, int] | None = None,
) -> None:
    """Run the lanes of both halves as `moe.network.lanes.run_lanes` does.

    Must run inside `MoELayers.lockstep`; visits all layers of that pass.
    """
    first, second = (_MicroBatch(lanes, experts, pause_at or {}) for lanes in halves)
    try:
        _walk(first, second, experts.take_pass())
    except ExchangeError as error:
        for half in (first, second):
            half.give_up(error)


def _walk(first: _MicroBatch, second: _MicroBatch, layers: Sequence[int]) -> None:
    first.start()
    for number, layer in enumerate(layers):
        first.depart(layer)
        if number:
            second.arrive()
        else:
            second.start()
        second.depart(layer)
        first.serve()
        second.serve()
        first.arrive()
    if layers:
        second.arrive()
    else:
        second.start()


class _MicroBatch:
    """One half of a step: lanes that reach each layer together."""

    def __init__(
        self, lanes: Sequence[Lane], experts: MoELayers, pauses: Mapping[Lane, int]
    ) -> None:
        self._lanes, self._experts, self._pauses = lanes, experts, pauses
        self._here: list[Lane] = []

    def start(self) -> None:
        for lane in self._lanes:
            if lane.state is LaneState.READY:
                lane.start()

    def depart(self, layer: int) -> None:
        """Send the rows of the lanes that wait at this layer."""
        dispatcher = self._experts.dispatcher
        assert isinstance(dispatcher, RankDispatcher)
        self._layer, self._dispatcher = layer, dispatcher
        self._here = [lane for lane in self._lanes if self._waits(lane, layer)]
        calls = [lane.call for lane in self._here if lane.call is not None]
        with self._mode():
            self._gathered = self._experts.gather(layer, calls)
            hidden, routing = self._gathered.hidden_states, self._gathered.routing
            self._sent = dispatcher.start_dispatch(layer, hidden, routing)

    def serve(self) -> None:
        """Compute the rows received for this half, and send the results back."""
        with self._mode():
            arrived = self._dispatcher.finish_dispatch(self._sent)
            experts = self._experts.layers[self._layer]
            rows, failures = serve(arrived, experts, self._experts.forward)
            self._returning = self._dispatcher.start_combine(arrived, rows, failures)
            self._gathered.run_beside()

    def arrive(self) -> None:
        """Resume the lanes with their results, to the next layer or the end."""
        with self._mode():
            combined = self._dispatcher.finish_combine(self._returning)
        try:
            outcomes = self._gathered.outcomes(combined)
        except Exception as error:
            outcomes = [error] * len(self._here)
        for lane, rows in zip(self._here, outcomes, strict=True):
            if isinstance(rows, Exception):
                lane.fail(rows)
            else:
                lane.resume(rows)

    def give_up(self, error: Exception) -> None:
        """Fail the lanes that wait, and cancel the others."""
        for lane in self._lanes:
            if lane.state is LaneState.WAITING:
                lane.fail(error)
            lane.cancel()

    def _waits(self, lane: Lane, layer: int) -> bool:
        call, pause = lane.call, self._pauses.get(lane, layer + 1)
        return call is not None and call.layer == layer < pause

    def _mode(self) -> AbstractContextManager[None]:
        return self._here[0].mode.active() if self._here else torch.inference_mode()
