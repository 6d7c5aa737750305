"""Ranks that talk over local sockets: any sizes, several exchanges on their way, and losses."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from experts.dispatch import ExchangeError, SocketExchange, prefer_local_sockets
from tests.experts.dispatch_cases import ThreadExchange, on_ranks


def connected(ranks: int, timeout_s: float = 20.0) -> list[SocketExchange]:
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one in range(ranks):
        for other in range(one):
            peers[one][other], peers[other][one] = socket.socketpair()
    return [SocketExchange(rank, own, timeout_s) for rank, own in enumerate(peers)]


def in_threads(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(runs)

    def one(index: int) -> None:
        try:
            results[index] = runs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@hypothesis_settings(max_examples=30)
@given(data=st.data(), ranks=st.integers(1, 4), width=st.sampled_from([1, 7, 4096]))
def test_every_row_arrives_where_it_should(data: st.DataObject, ranks: int, width: int) -> None:
    """Sizes beyond what sockets hold, and up to three exchanges begun before any is waited for."""
    counts = st.sampled_from([0, 0, 1, 3, 400])
    rounds = [
        [[0 if a == b else data.draw(counts) for b in range(ranks)] for a in range(ranks)]
        for _ in range(data.draw(st.integers(1, 3)))
    ]

    def value(step: int, source: int, target: int) -> int:
        return step * 64 + source * 8 + target

    def run(exchange: SocketExchange) -> None:
        own, pending = exchange.rank, []
        for step, table in enumerate(rounds):
            going, coming = table[own], [row[own] for row in table]
            sent = torch.empty(sum(going), width, dtype=torch.uint8)
            for target, part in enumerate(sent.split(going)):
                part.fill_(value(step, own, target))
            received = torch.full((sum(coming), width), 255, dtype=torch.uint8)
            wait = exchange.all_to_all(sent, received, going, coming)
            pending.append((wait, received, coming, step))
            del sent
        for wait, received, coming, step in pending:
            wait()
            for source, part in enumerate(received.split(coming)):
                assert (part == value(step, source, own)).all()

    exchanges = connected(ranks)
    for error in in_threads([lambda e=e: run(e) for e in exchanges]):  # type: ignore[misc]
        if error is not None:
            raise error
    for exchange in exchanges:
        exchange.close()


def one_row(exchange: SocketExchange) -> None:
    other = [int(rank != exchange.rank) for rank in range(exchange.size)]
    rows = torch.zeros(exchange.size - 1, 3, dtype=torch.uint8)
    exchange.all_to_all(rows, torch.empty_like(rows), other, other)()


def test_a_rank_that_is_gone_is_named() -> None:
    first, second, third = connected(3)
    second.close()
    with pytest.raises(ExchangeError, match="rank 0 has lost rank 1: "):
        one_row(first)
    third.close()


def test_a_rank_that_is_silent_is_named() -> None:
    first, second = connected(2, timeout_s=0.05)
    with pytest.raises(ExchangeError, match=r"heard nothing from rank 1 for 0\.05 s"):
        one_row(first)
    second.close()


def test_ranks_of_one_machine_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At addresses that nobody else can reach, which are gone afterwards."""
    bind, found = socket.socket.bind, {}

    def noted(self: socket.socket, address: str) -> None:
        bind(self, address)
        found[Path(address).parent] = Path(address).parent.stat().st_mode & 0o777

    def run(exchange: ThreadExchange) -> None:
        sockets = prefer_local_sockets(exchange, 20.0)
        assert isinstance(sockets, SocketExchange)
        assert (sockets.rank, sockets.size) == (exchange.rank, 3)
        one_row(sockets)
        sockets.close()

    monkeypatch.setattr(socket.socket, "bind", noted)
    assert on_ranks(3, run) == [None] * 3
    assert list(found.values()) == [0o700] * 3
    assert not any(folder.exists() for folder in found)


@pytest.mark.parametrize("folder", ["/nowhere", "x" * 100], ids=["read-only", "long"])
def test_where_one_has_no_temporary_folder_all_stay_with_what_they_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    made = tempfile.mkdtemp
    (tmp_path / folder).mkdir() if folder[0] == "x" else None

    def run(exchange: ThreadExchange) -> bool:
        return prefer_local_sockets(exchange, 20.0) is exchange

    def make(*where: Any, **named: Any) -> str:
        calls.append(where)
        return made(dir=tmp_path / folder if len(calls) == 2 else tmp_path)

    calls: list[Any] = []
    monkeypatch.setattr("experts.dispatch.exchange.tempfile.mkdtemp", make)
    assert on_ranks(3, run) == [True] * 3
    assert len(calls) == 3


def test_where_one_is_out_of_reach_all_stay_with_what_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = socket.socket.connect

    def run(exchange: ThreadExchange) -> bool:
        return prefer_local_sockets(exchange, 20.0) is exchange

    def refuse(self: socket.socket, address: Any) -> None:
        if refused:
            raise ConnectionRefusedError
        refused.append(address)
        connect(self, address)

    refused: list[Any] = []
    monkeypatch.setattr("experts.dispatch.exchange._CONNECT_S", 0.2)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert on_ranks(3, run) == [True] * 3
