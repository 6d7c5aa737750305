"""Whether prefetching a layer's experts pays, from what its bids have come to.

A layer is off until its bids would have paid: while it is off they are made on paper, now and then,
and judged like those that are placed, so that a bad predictor costs a few forecasts and no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.95  # a judgement of 14 visits ago counts half
TRIAL = 8
"""Visits judged before anything is placed."""
RAREST = 256
"""Steps between two trials of a layer that keeps losing."""


@dataclass
class BidRecord:
    """What became of the forecasts of one layer; plain counters, readable from any thread.

    Attributes:
        right: absent experts forecast surely enough to bid on, and asked for.
        wrong: the same, and not asked for.
        missed: absent experts asked for without a bid.
        placed: bids that became transfers.
        useful: of those, asked for when their layer came.
        wasted: of those, not asked for then.
        cancelled: of those, contradicted by the router before they had begun.
        saved_seconds: stalls that placed bids are estimated to have saved.
        lost_seconds: what wasted ones and forecasting are estimated to have cost.
    """

    right: int = 0
    wrong: int = 0
    missed: int = 0
    placed: int = 0
    useful: int = 0
    wasted: int = 0
    cancelled: int = 0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0

    @property
    def precision(self) -> float:
        """Share of the bids, placed or on paper, that were right; 0 without any."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of the absent experts asked for that a bid had named; 0 without any."""
        return self.right / max(1, self.right + self.missed)


class Governor:
    """Turns the bids of one layer on and off.

    Attributes:
        on: whether bids are placed; otherwise they are made on paper.
        record: what became of them.
    """

    def __init__(self) -> None:
        self.on = False
        self.record = BidRecord()
        self._profit = 0.0
        self._judged = 0
        self._interval, self._next = 1, 0
        self._penalty = float(TRIAL)  # steps that a layer is left alone after a failure

    def asks(self, step: int) -> bool:
        """Whether a forecast is wanted in this step."""
        return self.on or step >= self._next

    def outcome(
        self, placed: bool, asked: bool, there: bool, rest: float | None, load: float, loss: float
    ) -> float:
        """What a bid has come to when its layer was reached.

        Args:
            placed: or on paper.
            asked: whether the layer asks for the expert.
            there: whether it is there.
            rest: see `offload.bids.Bid.rest`.
            load: seconds for which a missing expert is waited for.
            loss: seconds that an expert brought in vain costs.

        Returns:
            Seconds; less than 0 where it did harm.
        """
        record = self.record
        record.right += asked
        record.wrong += not asked
        if asked and rest is not None:
            saved = load - rest if placed or not there else 0.0
            record.useful += placed
            record.saved_seconds += saved * placed
            return saved
        if not placed and rest == load:  # it would not have begun
            return 0.0
        lost = loss + (rest or 0.0)
        record.wasted += placed
        record.lost_seconds += lost * placed
        return -lost

    def judge(self, gain: float, step: int) -> None:
        """What the bids of a visit came to, in seconds; less than 0 for a loss."""
        self._profit = DECAY * self._profit + gain
        self._judged += 1
        if self._judged < TRIAL:
            return
        failed, self.on = self.on, self._profit > 0
        if self.on:
            self._interval = 1
            self._penalty = max(TRIAL, self._penalty * DECAY)
        elif failed:  # what looked good on paper was not: back to paper, after a rest
            self._profit, self._judged, self._interval = 0.0, 0, 1
            self._penalty = min(4 * self._penalty, RAREST)
            self._next = step + int(self._penalty)
            return
        else:
            self._interval = 1 if gain > 0 else min(2 * self._interval, RAREST)
        self._next = step + self._interval
