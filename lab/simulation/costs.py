"""What computing and sending take in a simulation of many ranks.

Legend: R ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """What ranks send over: near links within a node and far ones between nodes, both at once.

    Attributes:
        ranks_a_node: neighbours that are near each other.
        near, far: bytes a second of one rank, each way.
        latency_s: of an exchange, whatever is sent.
        peer_s: more of it for each other rank.
    """

    ranks_a_node: int
    near: float
    far: float
    latency_s: float
    peer_s: float = 0.0

    def exchange(self, start_R: Floats, bytes_RR: Floats) -> Floats:
        """``(R,)`` times at which each rank has everything, from those at which ranks begin."""
        node = np.arange(len(start_R)) // self.ranks_a_node
        is_near_RR = node[:, None] == node
        away_RR = bytes_RR * ~np.eye(len(start_R), dtype=bool)
        near_RR, far_RR = away_RR * is_near_RR, away_RR * ~is_near_RR
        sent_R = start_R + np.maximum(near_RR.sum(1) / self.near, far_RR.sum(1) / self.far)
        taking_R = np.maximum(near_RR.sum(0) / self.near, far_RR.sum(0) / self.far)
        # A rank that sends nothing to another must still say so: everybody waits for everybody.
        first = start_R.min()
        end_R = np.maximum(np.maximum(sent_R.max(), first + taking_R), start_R)
        return np.asarray(end_R + self.latency_s + self.peer_s * (len(start_R) - 1))


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options of `network_of`."""
    add = parser.add_argument
    add("--near", type=float, default=160.0, help="GB/s within nodes of 8 (%(default)s)")
    add("--far", type=float, default=50.0, help="GB/s between them (%(default)s)")
    add("--latency", type=float, default=37.0, help="microseconds of an exchange (%(default)s)")


def network_of(options: argparse.Namespace) -> Network:
    """Return the network that a command's options describe."""
    return Network(8, options.near * 1e9, options.far * 1e9, options.latency * 1e-6)


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's work at one layer, and bytes of its rows.

    Attributes:
        attention_s: and everything else that is not experts, whatever the number of tokens.
        attention_token_s: more of it for each token.
        expert_s: to read one expert.
        slot_s: to serve one slot of a token.
        out_bytes, back_bytes: of a row on its way to a rank, and of a result.
        out_slots, back_slots: whether there is one for each slot, or for each rank.
        step_s: of a step beside its layers.
    """

    attention_s: float
    attention_token_s: float
    expert_s: float
    slot_s: float
    out_bytes: float
    back_bytes: float
    out_slots: bool = False
    back_slots: bool = True
    step_s: float = 0.0
