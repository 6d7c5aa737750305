"""Which rank serves which slot, in tensor operations on the ids' own device.

The host reads nothing back, so a GPU does it in line with its other work. Every rank computes the
same integers from the same ids, as in `experts.dispatch.assignment`, but by a rule without a loop
over experts. A rank's *room* is what it lacks to the mean load. The slots of experts with copies
stand in one line, expert by expert, and each goes to the rank of its expert that stands at the same
share of that expert's room. So ranks with more room get more, and few experts are split, each of
which is read once more. Where experts have many tokens, reading costs little, and each expert is
split over all its ranks, which levels the loads further.

Legend: E experts, S experts that several ranks hold, R ranks, T tokens of all ranks, K slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experts.placement import Placement
from routing.routing import counted

SPLIT_ROWS = 32
"""Mean tokens of an expert from which on each one is split over all its ranks."""
_UNIT, _LEAST, _MOST = 1 << 16, 1, 1 << 24
"""Units of room, in integers: as much as the mean load, and bounds. No rank is shut out, and
products with the tokens of a prompt stay far below 2^63."""


class DeviceCopies:
    """A placement of one layer on a device.

    Args:
        placement: which ranks hold which experts.
        device: of the ids.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self._num_experts, self._ranks = placement.num_experts, placement.ranks
        self._home_E = torch.from_numpy(placement.home_E).to(device)  # the last: unused slots
        self._num_shared = len(placement.shared_S)
        if self._num_shared:
            shared_S = torch.from_numpy(placement.shared_S)
            index_E = torch.full((placement.num_experts + 1,), self._num_shared)
            index_E[shared_S] = torch.arange(self._num_shared)
            held_ER = torch.from_numpy(placement.copies_ER > 0).long()
            self._shared_S, self._index_E = shared_S.to(device), index_E.to(device)
            self._held_SR = held_ER[shared_S].to(device)
            self._alone_RE = torch.from_numpy(placement.alone_RE).to(device)

    def serving(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The rank of each slot, and each expert's load.

        Args:
            ids_TK: ``(T, K)`` int64 ids of all ranks' tokens, rank 0's first; -1 for unused slots.

        Returns:
            ``(T, K)`` int64 ranks, -1 for unused slots; and ``(E,)`` int64 tokens of each expert.
        """
        loads_E = counted(ids_TK.flatten() + 1, self._num_experts + 1)[1:]
        home_TK = self._home_E[ids_TK]
        if not self._num_shared:
            return home_TK, loads_E
        index_TK = self._index_E[ids_TK]
        is_shared_TK = index_TK < self._num_shared
        index_TK = index_TK.clamp(max=self._num_shared - 1)
        tokens_S = loads_E[self._shared_S]
        place_TK, of = self._line(index_TK, is_shared_TK, tokens_S)
        end_TKR = self._room_SR(loads_E, tokens_S).cumsum(1)[index_TK]
        share_TK1 = (place_TK * end_TKR[..., -1] // of.clamp(min=1))[..., None]
        return torch.where(is_shared_TK, (end_TKR <= share_TK1).sum(-1), home_TK), loads_E

    def _line(
        self, index_TK: Tensor, is_shared_TK: Tensor, tokens_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each slot's place in its line, and the line's length."""
        key_S = index_TK.where(is_shared_TK, self._num_shared).flatten()
        order = key_S.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        place_TK = place.view_as(index_TK)
        if index_TK.numel() < SPLIT_ROWS * self._num_experts:
            return place_TK, is_shared_TK.sum()
        before_S = tokens_S.cumsum(0) - tokens_S
        return place_TK - before_S[index_TK], tokens_S[index_TK]

    def _room_SR(self, loads_E: Tensor, tokens_S: Tensor) -> Tensor:
        """Room of each rank for each shared expert; 0 where it does not hold the expert."""
        load_R = (self._alone_RE * loads_E).sum(1)
        mean = loads_E.sum() // self._ranks + 1
        room_R = ((mean - load_R) * _UNIT // mean).clamp(min=_LEAST)
        room_SR = self._held_SR * room_R
        # Some ranks are in reach of few experts: correct by the load that this room would give.
        taken_R = (tokens_S[:, None] * room_SR // room_SR.sum(1, keepdim=True)).sum(0)
        room_R = (room_R * mean // (load_R + taken_R).clamp(min=1)).clamp(_LEAST, _MOST)
        return self._held_SR * room_R
