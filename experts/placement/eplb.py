"""DeepSeek's expert-parallel load balancer (github.com/deepseek-ai/EPLB), number for number.

The yardstick for our own packing; a test holds it to DeepSeek's own example.
"""

from __future__ import annotations

import numpy as np

from experts.placement.placement import Floats, Ints, Placement, PlacementError, check_shape


def eplb(loads_E: Floats, slots: int, ranks: int, *, groups: int = 1, nodes: int = 1) -> Placement:
    """Place the experts of one layer.

    Args:
        loads_E: expected load of each expert.
        slots: of all ranks.
        groups: of experts that stay on one node; hierarchical where nodes divide them, else global.
        nodes: that the ranks are dealt to evenly.

    Raises:
        PlacementError: numbers that do not divide.
    """
    experts = len(loads_E)
    check_shape(experts, slots, ranks)
    if groups % nodes:
        groups = nodes = 1
    if experts % groups or slots % nodes or ranks % nodes:
        raise PlacementError(
            f"{experts} experts in {groups} groups, {slots} slots and {ranks} ranks on {nodes} "
            "nodes do not divide evenly"
        )
    size = experts // groups
    of_node = _packs(loads_E.reshape(groups, size).sum(1), nodes)
    chosen: list[int] = []
    for node_groups in of_node:
        own = (np.array(node_groups)[:, None] * size + np.arange(size)).reshape(-1)
        expert_P, count = replicate(loads_E[own], slots // nodes)
        packs = _packs((loads_E[own] / count)[expert_P], ranks // nodes)
        chosen += [int(own[expert_P[slot]]) for pack in packs for slot in pack]
    return Placement(tuple(chosen), experts, ranks)


def replicate(loads_E: Floats, slots: int, most: int | None = None) -> tuple[Ints, Ints]:
    """The expert of each slot and the copies of each expert: the heaviest copy is halved next.

    Args:
        most: copies of one expert; None for any number.
    """
    count_E = np.ones(len(loads_E), np.int64)
    chosen = list(range(len(loads_E)))
    while len(chosen) < slots:
        open_E = count_E < (most or slots)
        heaviest = int(np.where(open_E, loads_E / count_E, -1.0).argmax())
        chosen.append(heaviest)
        count_E[heaviest] += 1
    return np.array(chosen), count_E


def _packs(loads: Floats, packs: int) -> list[list[int]]:
    """Equally many items in each pack: the heaviest first, to the lightest with room."""
    room = len(loads) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    items: list[list[int]] = [[] for _ in range(packs)]
    weights = [0.0] * packs
    for item in np.argsort(-loads, kind="stable").tolist():
        pack = min((p for p in range(packs) if len(items[p]) < room), key=weights.__getitem__)
        items[pack].append(item)
        weights[pack] += float(loads[item])
    return items
