"""What a rank computes to exchange a layer's rows, measured with nothing else going on.

Threads of one process stand for ranks of one machine, on the sockets that ranks have. It is their
processor time that counts: waiting, also for Python, is nobody's work. Before each half memory is
read, as experts are between layers, so that caches hold none of the code.

Compiled calls look out for the others before they sleep, which is no work either: where they are
what a step makes, they are measured without their exchange, and its bytes by themselves.
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
from torch import Tensor

from experts.dispatch import AllToAllDispatcher, SocketExchange
from experts.dispatch.all_to_all import CombineMode
from experts.dispatch.native import NativeDispatched
from experts.placement import first_placement
from routing import Routing

ROUNDS, WARM_UP = 40, 4
COLD_BYTES = 32 << 20
TIMEOUT_S = 60.0
TOLD, RETURNED = 1, 2
"""What has been exchanged before a call; see kernels/cpu/all_to_all.h."""


def drawn(tokens: int, experts: int, top_k: int, spread: float, seed: int) -> np.ndarray[Any, Any]:
    """``(tokens, K)`` expert ids by log-normal popularity; a spread of 0 is uniform."""
    rng = np.random.default_rng(seed)
    keys = spread * rng.normal(size=experts) + rng.gumbel(size=(tokens, experts))
    return np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]


def dispatch_seconds(
    model: Mapping[str, Any], ranks: int, batch: int, combine: CombineMode
) -> float:
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
            whole = half + time.thread_time() - began
            compiled = isinstance(arrived, NativeDispatched)
            spent.append(_compiled_seconds(dispatcher, own_TK, rows, cold) if compiled else whole)
        exchange.close()
        return spent[WARM_UP:]

    with ThreadPoolExecutor(ranks) as threads:
        return median(seconds for spent in threads.map(run, range(ranks)) for seconds in spent)


def _compiled_seconds(
    dispatcher: AllToAllDispatcher, ids_TK: Tensor, rows_TH: Tensor, cold: Tensor
) -> float:
    """Of what the last two calls did; the ranks' messages are where they were."""
    assert dispatcher.native is not None
    exchange = dispatcher.native._native
    record, part = exchange.record, exchange.assigned(0)
    hidden = rows_TH.shape[1]
    results, weights = torch.ones(len(part.token_A), hidden), torch.ones(ids_TK.shape)
    total, spent = torch.empty_like(rows_TH), 0.0
    for had, call in (
        (TOLD, lambda: exchange.dispatch(0, ids_TK, rows_TH)),
        (RETURNED, lambda: exchange.combine(results, weights, total)),
    ):
        record.had = had
        cold.sum()
        began = time.thread_time()
        call()
        spent += time.thread_time() - began
    message = len(exchange.messages[record.rank]) * (record.ranks - 1)
    leaving = len(part.token_A) - part.served_R[record.rank]
    return spent + _moving_seconds(message) + _moving_seconds(leaving * hidden * 4)


def _moving_seconds(nbytes: int) -> float:
    """Of as many bytes into a socket, and as many out of one."""
    sent, received = bytes(nbytes), bytearray(nbytes)
    one, other = socket.socketpair()
    with one, other:
        for end, option in ((one, socket.SO_SNDBUF), (other, socket.SO_RCVBUF)):
            end.setsockopt(socket.SOL_SOCKET, option, nbytes)
        began, at = time.thread_time(), 0
        while at < nbytes:
            left = memoryview(sent)[at : at + (64 << 10)]
            one.sendall(left)
            other.recv_into(memoryview(received)[at:], len(left), socket.MSG_WAITALL)
            at += len(left)
        return time.thread_time() - began
