"""What a rank computes to exchange a layer's rows, measured with nothing else going on.

Threads of one process stand for ranks of one machine, on the sockets that ranks have. It is their
processor time that counts: waiting, also for Python, is nobody's work. Before each half memory is
read, as experts are between layers, so that caches hold none of the code.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.published import drawn
from experts.dispatch import AllToAllDispatcher, SocketExchange
from experts.dispatch.all_to_all import Sum
from experts.placement import first_placement
from routing import Routing

ROUNDS, WARM_UP = 40, 4
COLD_BYTES = 32 << 20
TIMEOUT_S = 60.0


def dispatch_seconds(model: Mapping[str, Any], ranks: int, batch: int, combine: Sum) -> float:
    """Of a rank at a layer in a decode step of so many sequences: the median of ranks and rounds.

    Args:
        model: as `benchmarks.expert_parallel` describes it.
    """
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for a, b in combinations(range(ranks), 2):
        peers[a][b], peers[b][a] = socket.socketpair()
    experts, hidden = model["experts"], model["hidden"]
    placement = first_placement("packed", experts, ranks, 0.25)
    rounds = range(WARM_UP + ROUNDS)
    ids = [torch.from_numpy(np.sort(drawn(batch, experts, model["top_k"], 0.0, i))) for i in rounds]

    def run(rank: int) -> list[float]:
        torch.set_num_threads(1)
        exchange = SocketExchange(rank, peers[rank], TIMEOUT_S)
        dispatcher = AllToAllDispatcher(exchange, [placement], combine=combine)
        cold, spent = torch.ones(COLD_BYTES // 4), []
        for ids_TK in ids:
            own_TK = ids_TK.tensor_split(ranks)[rank].contiguous()
            rows = torch.ones(len(own_TK), hidden)
            cold.sum()
            began = time.thread_time()
            arrived = dispatcher.dispatch(0, rows, Routing(own_TK, torch.ones(own_TK.shape)))
            half = time.thread_time() - began
            results = torch.ones_like(arrived.hidden_states)
            cold.sum()
            began = time.thread_time()
            dispatcher.combine(arrived, results, {})
            spent.append(half + time.thread_time() - began)
        exchange.close()
        return spent[WARM_UP:]

    with ThreadPoolExecutor(ranks) as threads:
        return median(seconds for spent in threads.map(run, range(ranks)) for seconds in spent)
