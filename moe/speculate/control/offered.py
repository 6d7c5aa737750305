"""Which offers of model-free drafts are worth reading: decided in every step that looks for any."""

from __future__ import annotations

from collections.abc import Sequence

from moe.speculate.control.account import TRUST, Account
from moe.speculate.control.search import CAUTION, NONE
from moe.speculate.control.steps import StepCosts
from moe.speculate.draft import Choice, Draft


class Offered:
    """Judges them beside plain decoding: offers come and go, and where one is left a sequence
    decodes plainly meanwhile."""

    def __init__(self, costs: StepCosts, account: Account) -> None:
        self._costs, self._account = costs, account

    def choose(self, offers: Sequence[Sequence[Draft]]) -> Sequence[Choice] | None:
        """A choice for each sequence; None where all together are not worth it, or could lose more
        than there is room for."""
        if not any(offers):
            return None
        costs, batch, choices = self._costs, len(offers), list[Choice]()
        step, row = costs.verify(batch, batch), costs.row(batch)
        price, rows, gained = row * batch / step, batch, 0.0
        for own in offers:
            best, most = NONE, 0.0
            for draft in own:
                depth, survival, expected = 0, 1.0, 0.0
                for chance in draft.confidence:
                    survival *= chance
                    if survival < price:
                        break
                    depth, expected = depth + 1, expected + survival
                if expected > most:
                    best, most = Choice(draft.mode, depth), expected
            choices.append(best)
            rows, gained = rows + best.depth, gained + most
        seconds = costs.verify(batch, rows) + costs.overhead
        if (batch + gained) * step <= CAUTION * batch * seconds:
            return None
        return choices if self._account.affords(seconds - step, TRUST * step) else None
