"""A rank with its model that does what rank 0 orders."""

from __future__ import annotations

from torch.distributed import Store

from experts.dispatch import ExchangeError
from experts.placement import Placement
from moe.errors import LaunchError
from moe.parallel.group import form_group, leave_group
from moe.parallel.rank_worker import RankWorker
from moe.parallel.team import CoordinatorLink, WorkerLinks
from moe.parallel.transport import Message
from moe.settings import ParallelSettings


class WorkerLoop:
    """Any rank but the first, with its model.

    Args:
        team: rank 0.
        station: what this rank computes.
        store: for process groups.
        settings: of the profile.
        kv_tokens: tokens of keys and values that this rank has room for.
    """

    def __init__(
        self,
        team: CoordinatorLink,
        station: RankWorker,
        store: Store,
        settings: ParallelSettings,
        kv_tokens: int,
    ) -> None:
        self.team, self.station = team, station
        self._store, self._settings = store, settings
        self._kv_tokens = kv_tokens

    def serve(self) -> None:
        """Do what rank 0 says until it says stop. Raises whatever makes that impossible."""
        try:
            self.team.reply({"number": 0, "kv_tokens": self._kv_tokens})
            while (order := self.team.order())["do"] != "stop":
                if (reply := self._obey(order)) is not None:
                    self.team.reply({"number": order["number"], **reply})
        except BaseException as error:
            self.team.fail(error)
            raise

    def close(self) -> None:
        """Leave; rank 0 has said stop, or counts this rank as lost."""
        self.team.close()
        leave_group()

    def _obey(self, order: Message) -> Message | None:
        match order["do"]:
            case "step":
                try:
                    return self.station.step(order)
                except ExchangeError as error:  # the watchdogs find out who, and what follows
                    return {"broken": str(error)}
            case "prepare":
                self.station.prepare(order)
            case "leave":
                leave_group()
                return {}
            case "form":
                try:
                    join_group(self.station, self._store, order, self.team, self._settings)
                except LaunchError as error:
                    return {"broken": str(error)}
                return {}
        return None


def join_group(
    station: RankWorker,
    store: Store,
    order: Message,
    team: WorkerLinks | CoordinatorLink,
    settings: ParallelSettings,
) -> None:
    """Form the group that an order describes, with the others; or be alone."""
    ranks, exchange = order["ranks"], None
    if len(ranks) > 1:
        exchange = form_group(
            store, order["epoch"], ranks, team.rank, settings.timeout_s, team.pulse
        )
    station.join(
        exchange,
        [
            Placement(tuple(experts_P), num_experts, size)
            for experts_P, num_experts, size in order["placements"]
        ],
    )
